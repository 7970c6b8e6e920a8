"""Where is a query in each of its streams, what does its checkpoint say, and is it complete?

Spark writes the ranges of a batch before it starts the batch, and they are synced to disk before a
note refers to them.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import Malformed, NotFound
from penstock.core.provenance import Origin, Ranges, Span
from penstock.core.whole_files import sync_names
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.message import Message

__all__ = [
    "DamagedCheckpoint",
    "Offset",
    "Offsets",
    "check_whole",
    "checksum",
    "folder_of",
    "is_local",
    "last_batch",
    "last_offsets",
    "offsets_at",
    "offsets_from_json",
    "offsets_to_json",
    "origin_of",
]

_HEADER: Final = struct.Struct("<qii")


@dataclass(frozen=True, slots=True)
class Offset:
    """Start and end of a batch in one stream, with the losses so far."""

    epoch: int
    #: The first message after the batch.
    end: int
    #: The first message of the batch. So the end offset alone defines a batch: after a failure
    #: Spark asks again for the start of the first batch, and "latest" has moved on by then.
    start: int
    #: Messages lost since the query first started. Spark has no metrics for Python sources, but
    #: reports the offsets in the progress of every batch.
    lost: int = 0
    #: The number of losses of unknown size.
    lost_unknown: int = 0
    #: The name for loss reports of tasks of this query; empty: a loss fails the task.
    reader: str = ""
    #: The stream was removed, and its loss is counted.
    is_gone: bool = False
    #: A checksum of the last message before `end`, to detect a stream that was restored from an
    #: older copy and reuses numbers. Empty: not known.
    check: str = ""
    #: Of a live stream: how many messages it lost before its log, in the life of the log, as far as
    #: `lost` counts them. None: none are counted yet, or it is no live stream.
    lost_before_log: int | None = None


#: One for each URL.
Offsets = dict[str, Offset]


def checksum(message: Message) -> str:
    """Return a checksum that tells a message from others with the same number."""
    header = _HEADER.pack(message.time_ns, message.type, message.subtype)
    return f"{zlib.crc32(message.payload, zlib.crc32(header)):08x}"


def offsets_to_json(offsets: Mapping[str, Offset]) -> dict[str, Any]:
    """Return offsets as JSON for Spark, which compares the text: the order is fixed."""
    return {
        url: {
            "end": offset.end,
            "epoch": str(offset.epoch),  # of 64 bits, which not all JSON readers keep
            "lost": offset.lost,
            "lost_unknown": offset.lost_unknown,
            "start": offset.start,
            **({"reader": offset.reader} if offset.reader else {}),
            **({"gone": True} if offset.is_gone else {}),
            **({"check": offset.check} if offset.check else {}),
            **(
                {}
                if offset.lost_before_log is None
                else {"lost_before_log": offset.lost_before_log}
            ),
        }
        for url, offset in sorted(offsets.items())
    }


def offsets_from_json(stored: Mapping[str, Any]) -> Offsets:
    """Parse offsets that Spark stored.

    :raises Malformed: they are not from `offsets_to_json`.
    """
    offsets = {}
    for url, fields in stored.items():
        try:
            offsets[url] = Offset(
                int(fields["epoch"]),
                int(fields["end"]),
                int(fields["start"]),
                int(fields["lost"]),
                int(fields["lost_unknown"]),
                str(fields.get("reader", "")),
                bool(fields.get("gone", False)),
                str(fields.get("check", "")),
                int(fields["lost_before_log"]) if "lost_before_log" in fields else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed(
                "offsets of the checkpoint",
                url,
                "epoch, end, start, lost, lost_unknown",
                fields,
                hint="it is of another source; give the query a new checkpointLocation",
            ) from error
    return offsets


# --- the files of a checkpoint --------------------------------------------------------------------

#: The first line of Spark's offset files; other versions are not parsed here.
_VERSION: Final = "v1"
#: The line of a source that has no offset yet.
_NO_OFFSET: Final = "-"
#: The first line of any batch file.
_ANY_VERSION: Final = re.compile(r"v\d+")


def origin_of(checkpoint: str | None, batch: int, run: str | None = None) -> Origin:
    """Return the ranges of a batch from a checkpoint, and sync its files to disk.

    For a remote checkpoint the ranges are unknown.

    :raises StorageError: the operating system refuses.
    """
    folder = folder_of(checkpoint)
    if folder is None:
        return Origin(None, checkpoint, run)
    ranges = _ranges(folder, batch)
    if ranges is not None:
        _sync(folder, batch)
    return Origin(ranges, str(folder), run, _has_new_name(folder))


def _has_new_name(folder: Path) -> bool:
    """Tell whether Spark gave the query a new id because the file with the old one was lost.

    A new query has its id before its first offsets.
    """
    try:
        named = (folder / "metadata").stat().st_mtime_ns
        oldest = min(path.stat().st_mtime_ns for path in (folder / "offsets").glob("[0-9]*"))
    except (OSError, ValueError):
        return False
    return oldest < named


def is_local(checkpoint: str | None) -> bool:
    """Tell whether a checkpoint is on the local disk."""
    if checkpoint is None:
        return True
    scheme, separator, _ = checkpoint.partition(":")
    return not separator or scheme == "file" or "/" in scheme


def folder_of(checkpoint: str | None) -> Path | None:
    """Return the folder of a checkpoint on the local disk; None: it is remote."""
    if checkpoint is None or not is_local(checkpoint):
        return None
    return Path(checkpoint.removeprefix("file:")).absolute()


def _ranges(folder: Path, batch: int) -> Ranges | None:
    try:
        now = _sources(folder, batch)
        before = _sources(folder, batch - 1) if batch else []
    except (OSError, ValueError):
        return None
    found: Ranges = {}
    for i, (said, earlier) in enumerate(zip(now, [*before, *[None] * len(now)], strict=False)):
        if isinstance(said, str):
            found[str(i)] = said
            continue
        then = earlier if isinstance(earlier, dict) else {}
        for url, at in said.items():
            was = then.get(url)
            if was != at and at.start < at.end:  # a stream with nothing new is left as it was
                is_anew = was is not None and was.epoch == at.epoch and at.start < was.end
                found[f"{i} {url}"] = Span(at.epoch, at.start, at.end, is_anew)
    return found


def _sources(folder: Path, batch: int) -> list[Any]:
    """Return the offsets of each source: as `Offsets`, or as text for other formats."""
    lines = (folder / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    if lines[:1] != [_VERSION]:
        raise ValueError("offsets of another version")
    return [_offsets(line) for line in lines[2:]]


def _offsets(line: str) -> Any:
    if line == _NO_OFFSET:
        return {}
    try:
        return offsets_from_json(json.loads(line))
    except (ValueError, AttributeError, Malformed):
        return line


def last_offsets(folder: Path) -> tuple[int, list[Any]] | None:
    """Return the latest planned batch, and the offsets of each of its sources."""
    last = last_batch(folder / "offsets")
    found = None if last is None else offsets_at(folder, last)
    return None if last is None or found is None else (last, found)


def offsets_at(folder: Path, batch: int) -> list[Any] | None:
    """Return the offsets of each source at a batch; None: there are none, or not any more."""
    try:
        return _sources(folder, batch)
    except (OSError, ValueError):
        return None


def last_batch(folder: Path) -> int | None:
    """Return the latest batch with a file in a folder of a checkpoint, or None."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=None)  # noqa: PTH208
    except OSError:
        return None


def _sync(folder: Path, batch: int) -> None:
    """Sync the files that Spark wrote before a batch to disk."""
    with storage_errors("syncing", str(folder)):
        for path in (folder / "offsets" / str(batch), folder / "metadata"):
            if path.exists():
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        for names in (folder / "offsets", folder, folder.parent):
            sync_names(names)


class DamagedCheckpoint(Malformed):
    """A file of a query's checkpoint is not what Spark wrote."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(
            "checkpoint",
            path,
            "as Spark wrote it",
            found,
            hint="put an older copy of the whole checkpoint back: what was delivered since is "
            "skipped; or remove the files of the latest batches from offsets and commits",
        )


def check_whole(checkpoint: str) -> None:
    """Check that a checkpoint has all files that Spark needs.

    Without `metadata` Spark would give the query a new id, and deliver the batch in progress
    twice. A batch that is committed but not planned fails the query with an assertion, and
    truncated files fail it with errors that do not name them.

    :raises NotFound: a file is missing.
    :raises DamagedCheckpoint: a required file is damaged.
    """
    folder = folder_of(checkpoint)
    if folder is None:
        return
    planned, committed = last_batch(folder / "offsets"), last_batch(folder / "commits")
    if planned is not None and not (folder / "metadata").exists():
        raise NotFound(
            f"the checkpoint {folder} has lost its file metadata, with the name of the query",
            hint="put it back; or remove the whole checkpoint, and the query begins anew",
        )
    if committed is not None and (planned is None or planned < committed):
        has = "no offsets" if planned is None else f"offsets of batch {planned}"
        raise NotFound(
            f"the checkpoint {folder} does not fit together: commits of batch {committed}, {has}",
            hint="put the offsets back; or remove the newer files of commits, too: "
            "those batches are planned again, and what of them was delivered is skipped",
        )
    needed = [folder / "metadata"]
    if planned is not None:
        needed += [folder / "offsets" / str(number) for number in (planned - 1, planned)]
    if committed is not None:
        needed.append(folder / "commits" / str(committed))
    for path in needed:
        if path.exists() and (damage := _damage(path)) is not None:
            raise DamagedCheckpoint(str(path), damage)


def _damage(path: Path) -> str | None:
    """Describe the damage of a file of a checkpoint, if there is any."""
    with storage_errors("reading", str(path)):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if path.name != "metadata":
        if not _ANY_VERSION.fullmatch(lines[0]):
            return "it does not begin with a version"
        del lines[0]
    if not lines or not lines[0]:
        return "it is cut off"
    for number, line in enumerate(lines, start=1):
        try:
            if line not in (_NO_OFFSET, ""):
                json.loads(line)
        except ValueError:
            return f"what it says is cut off, or was changed, in line {number}"
    return None
