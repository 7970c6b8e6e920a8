"""Where do the queries of a plan keep their progress, and which process runs them?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.pipeline.graph.plan import keeps_state
from penstock.pipeline.run.backfill import NothingToDo, Share, pin
from penstock.pipeline.run.errors import NotStarted
from penstock.pipeline.source.checkpoint import folder_of, last_batch
from penstock.queue.append_once import has_batches
from penstock.queue.ownership import Ownership
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import ExitStack

    from penstock.pipeline.graph.model import Pipeline, Sink
    from penstock.pipeline.graph.plan import Plan, Query
    from penstock.pipeline.run.backfill import Backfill

__all__ = ["CHECKPOINTS", "Checkpoints", "checkpoint_for", "own", "used_before"]

#: The default folder of checkpoints, below the working directory.
CHECKPOINTS: Final = ".penstock/checkpoints"


def checkpoint_for(setting: str | None, given: str | None) -> str:
    """Return the folder of a pipeline's checkpoints: the given one, its setting, or the default."""
    where = given or setting or CHECKPOINTS
    return where if ":" in where else str(Path(where).absolute())


class Checkpoints:
    """Checkpoints and source options of the queries of a plan."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: str | None,
        backfill: Backfill | None,
        owned: ExitStack,
        say: Callable[[str], None],
        *,
        is_near: bool,
    ) -> None:
        """Find the checkpoints, and lock the queries until `owned` is closed.

        :raises AlreadyOwned: another process runs one of the queries.
        :raises NothingToDo: a backfill has no messages to process.
        :raises Unfinished: an earlier backfill has messages of the range, and is not finished.
        :raises NotStarted: Spark is remote, and no checkpoint folder is given.
        """
        self.is_near = is_near
        #: Whether all queries end by themselves.
        self.is_bounded = backfill is not None
        self._where: dict[str, str] = {}
        #: By query and source.
        self.options: dict[str, dict[str, dict[str, str]]] = {}
        #: The queries to run.
        self.queries: list[Query] = []
        self._owned = owned
        faults: list[NothingToDo] = []
        shares: list[tuple[Query, Share]] = []
        for query in plan.queries:
            pipeline = plan.pipeline(query.pipeline)
            where = f"{checkpoint_for(pipeline.settings.checkpoint, checkpoint)}/{query.name}"
            if backfill is None:
                self._live(query, pipeline, where, checkpoint)
                continue
            try:
                share = self._share(query, pipeline, where, backfill, say)
            except NothingToDo as error:
                faults.append(error)
            else:
                shares += [] if share is None else [(query, share)]
        for query, share in shares:  # nothing is noted before all queries are known to be able
            part = share.take()
            _own_until(owned, part.checkpoint)
            self._add(query, part.checkpoint, part.options)
        if faults and not self.queries:
            raise faults[0]
        for fault in faults:
            say(str(fault))

    def _live(self, query: Query, pipeline: Pipeline, where: str, given: str | None) -> None:
        if self.is_near:
            _own_until(self._owned, where)
            sources = {name: pipeline.sources[name] for name in query.sources}
            self._add(query, where, pin(where, sources))
        elif given is None and pipeline.settings.checkpoint is None:
            raise NotStarted(
                "of Spark Connect on another machine",
                "it is not said where checkpoints are there",
                "--checkpoint, or checkpoint: in the settings of the file",
            )
        else:
            self._add(query, where, {})

    def _share(
        self,
        query: Query,
        pipeline: Pipeline,
        where: str,
        backfill: Backfill,
        say: Callable[[str], None],
    ) -> Share | None:
        if query.after:
            say(f"{query.name} takes no part: it gets its rows from {', '.join(query.after)}")
            return None
        if not self.is_near:
            raise NothingToDo(f"{query.name}: what it has done is on another machine")
        if any(keeps_state(pipeline.stages[name]) for name in query.stages):
            say(f"{query.name} keeps state: what it adds up across the seam comes in two parts")
        return Share(backfill, query.name, pipeline, query.sources, where, say)

    def _add(self, query: Query, where: str, options: dict[str, dict[str, str]]) -> None:
        self.queries.append(query)
        self._where[query.name] = where
        self.options[query.name] = options

    def of(self, query: Query) -> str:
        return self._where[query.name]


def own(checkpoint: str) -> list[Ownership]:
    """Lock the query with this checkpoint against other runs, if it is on the local disk.

    Two concurrent runs would write the same batch, and files have no other lock than this.

    :raises AlreadyOwned: another process runs the query.
    """
    path = folder_of(checkpoint)
    if path is None:
        return []
    with storage_errors("making", str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the checkpoint: its content belongs to Spark.
    return [Ownership.claim(f"{path}.running", "penstock run", f"the query {path.name}")]


def _own_until(end: ExitStack, checkpoint: str) -> None:
    """Lock a query until `end` is closed."""
    for owned in own(checkpoint):
        end.callback(owned.release, remove=True)


def used_before(checkpoint: str, sinks: Iterable[Sink]) -> list[str]:
    """Return the sinks with batches of other queries, if this query has no progress yet.

    Such a query starts over, so these sinks may get the same rows again: its checkpoint was
    removed, or its name changed with its first sink.
    """
    folder = folder_of(checkpoint)
    if folder is None or last_batch(folder / "offsets") is not None:
        return []
    return [sink.target for sink in sinks if _has_batches(sink)]


def _has_batches(sink: Sink) -> bool:
    if sink.stream is not None:
        return has_batches(sink.stream)
    return sink.writes_files and any(Path(sink.target, "_penstock").glob("*.json"))
