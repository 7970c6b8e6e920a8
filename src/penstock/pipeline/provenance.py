"""What does a checkpoint of Spark say of a batch: which messages of which streams is it made of?

Spark writes that down before it begins a batch, and it is on the disk before a note tells of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import Malformed
from penstock.core.provenance import Origin, Ranges, Span
from penstock.core.whole_files import sync_names
from penstock.pipeline.offsets import offsets_from_json
from penstock.pipeline.session import is_local
from penstock.queue.storage import storage_errors

__all__ = ["folder_of", "last_batch", "last_offsets", "origin_of"]

#: The first line of the offsets that Spark writes; others are read by Spark only.
_VERSION: Final = "v1"
_NO_OFFSET: Final = "-"


def origin_of(checkpoint: str | None, batch: int, run: str | None = None) -> Origin:
    """Look into a checkpoint, and bring what it says of the batch to the disk.

    Where it cannot be read from here, the ranges of the batch are not known.

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
    """Tell whether Spark has given the query a new name, since the file with the old was lost.

    A query that begins anew has its name before it has any offsets.
    """
    try:
        named = (folder / "metadata").stat().st_mtime_ns
        oldest = min(path.stat().st_mtime_ns for path in (folder / "offsets").glob("[0-9]*"))
    except (OSError, ValueError):
        return False
    return oldest < named


def folder_of(checkpoint: str | None) -> Path | None:
    """Return the folder of a checkpoint on this machine's disk; None: it is elsewhere."""
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
    """Return the offsets of each source: ours as `Offsets`, another's as text."""
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
    """Return the latest batch that Spark has planned, and the offsets of each of its sources."""
    last = last_batch(folder / "offsets")
    try:
        return None if last is None else (last, _sources(folder, last))
    except (OSError, ValueError):
        return None


def last_batch(folder: Path) -> int | None:
    """Return the latest batch of which Spark has a file in one of a checkpoint's folders."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=None)  # noqa: PTH208
    except OSError:
        return None


def _sync(folder: Path, batch: int) -> None:
    """Return when what Spark has written down before a batch is on the disk."""
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
