"""Whose is the progress of a query: does a run go on with it, or begin anew?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed, NotFound
from penstock.pipeline.commits import has_batches
from penstock.pipeline.provenance import folder_of, last_batch
from penstock.queue.ownership import Ownership
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.pipeline.model import Sink

__all__ = ["DamagedCheckpoint", "check_whole", "own", "used_before"]

#: How the files of batches begin.
_VERSION: Final = re.compile(r"v\d+")
#: What stands there of a source that has no offset yet, and behind the last line.
_NO_OFFSET: Final = ("-", "")


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


def own(checkpoint: str) -> list[Ownership]:
    """Keep others from running the query that has this checkpoint, where that is on our disk.

    Two runs at once would write the same batch, and files have no other lock than this.

    :raises AlreadyOwned: it is being run.
    """
    path = folder_of(checkpoint)
    if path is None:
        return []
    with storage_errors("making", str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it: what is in it is Spark's.
    return [Ownership.claim(f"{path}.running", "penstock run", f"the query {path.name}")]


def check_whole(checkpoint: str) -> None:
    """Make sure that a checkpoint has not lost files without which Spark goes wrong.

    Without `metadata` it would give the query another name, and what was under way would be
    delivered twice. A batch that is committed and not planned ends the query by an assertion, and
    files that were cut off by errors that name none.

    :raises NotFound: it has.
    :raises DamagedCheckpoint: one of those that are needed is not whole.
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
    """Tell what is wrong with a file of a checkpoint, if anything is."""
    with storage_errors("reading", str(path)):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if path.name != "metadata":
        if not _VERSION.fullmatch(lines[0]):
            return "it does not begin with a version"
        del lines[0]
    if not lines or not lines[0]:
        return "it is cut off"
    for number, line in enumerate(lines, start=1):
        try:
            if line not in _NO_OFFSET:
                json.loads(line)
        except ValueError:
            return f"what it says is cut off, or was changed, in line {number}"
    return None


def used_before(checkpoint: str, sinks: Iterable[Sink]) -> list[str]:
    """Return where there are batches of other queries, if this one has no progress yet.

    It reads its sources from their beginning, so that they may get the same rows again: its
    checkpoint was removed, or it is called otherwise since its first sink is another.
    """
    folder = folder_of(checkpoint)
    if folder is None or folder.exists():
        return []
    return [sink.target for sink in sinks if _has_batches(sink)]


def _has_batches(sink: Sink) -> bool:
    if sink.stream is not None:
        return has_batches(sink.stream)
    return sink.writes_files and any(Path(sink.target, "_penstock").glob("*.json"))
