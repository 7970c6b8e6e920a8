"""Whose is the progress of a query: does a run go on with it, or begin anew?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.pipeline.commits import notes_of
from penstock.pipeline.session import is_local
from penstock.queue.ownership import Ownership
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.pipeline.model import Sink

__all__ = ["own", "used_before"]


def own(checkpoint: str) -> list[Ownership]:
    """Keep others from running the query that has this checkpoint, where that is on our disk.

    Two runs at once would write the same batch, and files have no other lock than this.

    :raises AlreadyOwned: it is being run.
    """
    if not is_local(checkpoint):
        return []
    path = _path(checkpoint)
    with storage_errors("making", str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it: what is in it is Spark's.
    return [Ownership.claim(f"{path}.running", "penstock run", f"the query {path.name}")]


def used_before(checkpoint: str, sinks: Iterable[Sink]) -> list[str]:
    """Return where there are batches of other queries, if this one has no progress yet.

    It reads its sources from their beginning, so that they may get the same rows again: its
    checkpoint was removed, or it is called otherwise since its first sink is another.
    """
    if not is_local(checkpoint) or _path(checkpoint).exists():
        return []
    return [sink.target for sink in sinks if _has_batches(sink)]


def _has_batches(sink: Sink) -> bool:
    if sink.stream is not None:
        return notes_of(sink.stream, Path(sink.stream)).exists()
    return sink.writes_files and any(Path(sink.target, "_penstock").glob("*.json"))


def _path(checkpoint: str) -> Path:
    return Path(checkpoint.removeprefix("file:"))
