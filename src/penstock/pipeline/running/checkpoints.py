"""Whose is the progress of a query: does a run go on with it, or begin anew?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import NotFound
from penstock.pipeline.commits import has_batches
from penstock.pipeline.provenance import folder_of, last_offsets
from penstock.queue.ownership import Ownership
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.pipeline.model import Sink

__all__ = ["check_name", "own", "used_before"]


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


def check_name(checkpoint: str) -> None:
    """Make sure that a checkpoint has not lost the name that its batches are noted under.

    Spark would give the query another, and what was under way would be delivered twice.

    :raises NotFound: it has.
    """
    folder = folder_of(checkpoint)
    if folder is None or (folder / "metadata").exists() or last_offsets(folder) is None:
        return
    raise NotFound(
        f"the checkpoint {folder} has lost its file metadata, with the name of the query",
        hint="put it back; or remove the whole checkpoint, and the query begins anew",
    )


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
