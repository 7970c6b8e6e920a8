"""How does a graph run: who starts, watches and stops its queues and workers?"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import PenstockError
from penstock.core.interfaces import Closable
from penstock.core.retry import Backoff
from penstock.core.supervision import Program, Restart, Supervisor
from penstock.core.worker_graph import fields_of, filled
from penstock.workers.edges import Edges, EdgeStatistics
from penstock.workers.job import JOB, UNFIT, Job
from penstock.workers.worker_counters import WorkerCounters, WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.supervision import ProgramStatistics
    from penstock.core.worker_graph import Vertex, WorkerGraph

__all__ = ["GraphRun", "GraphStatistics", "NoWorker", "VertexStatistics"]

log = logging.getLogger(__name__)

#: A worker that dies is started again after so long, and its failures count from one after calm.
_BACKOFF: Final = Backoff(initial=0.05, maximum=5.0)
_CALM: Final = 2.0
#: Seconds in which nothing happens, after which all is done.
_QUIET: Final = 0.5


class NoWorker(PenstockError):
    """No worker of a vertex can start: its function or program does not exist."""


class VertexStatistics(NamedTuple):
    """Counters of a vertex."""

    #: Processes that run, and that should.
    running: int
    workers: int
    #: How often one was started again.
    restarts: int
    #: What they did; None: its programs do not tell.
    work: WorkerStatistics | None


class GraphStatistics(NamedTuple):
    """Counters of a running or finished graph."""

    vertices: dict[str, VertexStatistics]
    edges: dict[str, EdgeStatistics]

    @property
    def lost(self) -> int:
        """Number of messages that edges lost."""
        return sum(edge.lost or 0 for edge in self.edges.values())


class GraphRun(Closable):
    """A running graph, from construction until `close`."""

    def __init__(
        self,
        graph: WorkerGraph,
        *,
        state: str | None = None,
        on_output: Callable[[str, str], None] | None = None,
    ) -> None:
        """Open the edges, and start the workers.

        :param state: the folder of its queues, if not the one that the file names
        :param on_output: called with each line of a worker's output and the worker's name
        :raises ConfigError: an edge cannot be used as the file describes it.
        :raises PenstockError: a queue cannot be opened, or a port is in use.
        """
        self.graph = graph
        self._failure: str | None = None
        self._counters: dict[str, WorkerCounters] = {}
        #: Messages that each worker held when its process ended last; they are delivered again.
        self._held_at_end: dict[str, int] = {}
        #: The name of each worker at its queues.
        self._clients: dict[str, str] = {}
        #: The last line of each worker: why it could not begin.
        self._said: dict[str, str] = {}
        self._on_output = on_output
        self._last: GraphStatistics | None = None
        #: The books when something happened last, and when that was.
        self._seen: GraphStatistics | None = None
        self._quiet_since = time.monotonic()
        self._closing = threading.Lock()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            folder = tempfile.TemporaryDirectory(prefix="penstock-graph-")
            self._folder = self._stack.enter_context(folder)
            self._edges = self._stack.enter_context(Edges(graph, state))
            self._supervisor = self._stack.enter_context(
                Supervisor(on_output=self._take_line, on_end=self._note_end)
            )
            for name, vertex in graph.vertices.items():
                for number in range(vertex.workers):
                    # A name that is nobody else's: that of a vertex may be too long for a queue.
                    self._clients[f"{name}.{number}"] = f"w{len(self._clients)}"
                    self._supervisor.add(self._program(name, vertex, number))
            undo.pop_all()

    # --- workers ------------------------------------------------------------------------------

    def _program(self, name: str, vertex: Vertex, number: int) -> Program:
        slot = f"{name}.{number}"
        environment = {
            **vertex.environment,
            "PENSTOCK_GRAPH": self.graph.name,
            "PENSTOCK_VERTEX": name,
            "PENSTOCK_WORKER": str(number),
        }
        if vertex.is_udp:
            assert vertex.command is not None
            places = {edge: self._edges.address(edge) for edge in (*vertex.from_, *vertex.to)}
            fields = {field: places[edge] for field, edge in fields_of(vertex).items()}
            environment["PENSTOCK_INPUT"] = ",".join(places[edge] for edge in vertex.from_)
            environment["PENSTOCK_OUTPUT"] = ",".join(places[edge] for edge in vertex.to)
            command = tuple(filled(word, fields) for word in self._found(vertex.command))
            restart = Restart.ON_FAILURE
        else:
            environment["PENSTOCK_OUTPUTS"] = ",".join(vertex.to)
            job = self._job(name, vertex, number, environment)
            command = (sys.executable, "-m", "penstock.workers.process")
            environment = {JOB: job.model_dump_json()}
            restart = Restart.ALWAYS
        return Program(
            name=slot,
            command=command,
            environment=environment,
            restart=restart,
            backoff=_BACKOFF,
            calm=_CALM,
            grace=self.graph.settings.grace,
        )

    def _job(self, name: str, vertex: Vertex, number: int, environment: dict[str, str]) -> Job:
        slot = f"{name}.{number}"
        counters = WorkerCounters(str(Path(self._folder) / slot), vertex.to)
        self._counters[slot] = self._stack.enter_context(counters)
        return Job(
            graph=self.graph.name,
            vertex=name,
            number=number,
            sources=[
                source
                for edge in vertex.from_
                for source in self._edges.sources(edge, number, vertex.workers, self._clients[slot])
            ],
            targets=[self._edges.target(edge) for edge in vertex.to],
            use=vertex.use,
            options=vertex.options,
            command=None if vertex.command is None else self._found(vertex.command),
            environment=environment,
            path=[self.graph.folder, str(Path.cwd())],
            batch=self.graph.settings.batch,
            # It has to end its program before it is ended itself.
            grace=self.graph.settings.grace * 0.8,
            counters=counters.path,
        )

    def _found(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command with a relative program path resolved beside the graph's file."""
        program = command[0]
        if os.sep in program and not os.path.isabs(program):  # noqa: PTH117 - it is text
            program = str(Path(self.graph.folder) / program)
        return (program, *command[1:])

    # --- what the supervisor tells ------------------------------------------------------------

    def _take_line(self, slot: str, line: str) -> None:
        self._said[slot] = line
        if self._on_output is not None:
            self._on_output(slot, line)
        else:
            log.warning("%s: %s", slot, line)

    def _note_end(self, slot: str, now: ProgramStatistics) -> None:
        self._edges.release(f"{self._clients[slot]}-{now.last_pid}")
        if slot in self._counters:
            self._held_at_end[slot] = self._counters[slot].statistics().held
        if now.is_missing or now.last_end == f"ended with status {UNFIT}":
            self._supervisor.end(slot)
            said = "" if now.is_missing else self.said(slot)
            self._failure = f"{slot.rpartition('.')[0]}: {said or now.last_end}"

    # --- for its owner ------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every vertex has a worker that can run.

        :raises NoWorker: no worker of a vertex can start.
        """
        if self._failure is not None:
            raise NoWorker(self._failure, hint="mend it in the file or beside it, then try again")

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids of each vertex."""
        found: dict[str, list[int]] = {name: [] for name in self.graph.vertices}
        for slot, program in self._supervisor.statistics().items():
            if program.pid is not None:
                found[slot.rpartition(".")[0]].append(program.pid)
        return found

    def said(self, worker: str) -> str:
        """Return the last output line of a worker, by its name (`vertex.0`)."""
        return self._said.get(worker, "")

    def address(self, edge: str) -> str:
        """Return `host:port` of an edge's queue."""
        return self._edges.address(edge)

    def is_done(self) -> bool:
        """Tell whether no message is left and nothing has happened for half a second.

        An edge that does not tell how many it holds is not done. Two things are unknown: whether a
        program that speaks the protocol itself still holds a message, and whether the queue of
        another server (an `lhhttt:` URL) still leases one to a worker that was killed. That one is
        not counted until its lease ends.

        :raises NoWorker: as for `check`.
        """
        self.check()
        now, moment = self.statistics(), time.monotonic()
        is_left = any(now.edges[edge].held != 0 for edge in now.edges if self.graph.readers(edge))
        if is_left or self._is_working(now) or now != self._seen:
            self._seen, self._quiet_since = now, moment
        return moment - self._quiet_since > _QUIET

    def _is_working(self, now: GraphStatistics) -> bool:
        """Tell whether a worker holds a message; the queue of another may not count those."""
        held = sum(vertex.work.held for vertex in now.vertices.values() if vertex.work is not None)
        return held > sum(self._held_at_end.values())

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until `is_done`; False after `timeout` seconds.

        :raises NoWorker: as for `check`.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not (is_done := self.is_done()) and time.monotonic() < deadline:
            time.sleep(_QUIET / 5)
        return is_done

    def statistics(self) -> GraphStatistics:
        """Return the current counters, or the final ones."""
        if self._last is not None:
            return self._last
        programs = self._supervisor.statistics()
        vertices = {}
        for name, vertex in self.graph.vertices.items():
            slots = [f"{name}.{number}" for number in range(vertex.workers)]
            mine = [programs[slot] for slot in slots]
            work = [self._counters[slot].statistics() for slot in slots if slot in self._counters]
            vertices[name] = VertexStatistics(
                running=sum(program.pid is not None for program in mine),
                workers=vertex.workers,
                restarts=sum(max(0, program.starts - 1) for program in mine),
                work=_sum(work) if work else None,
            )
        edges = self._edges.statistics()
        for name, edge in edges.items():
            if edge.put is None:  # of a stream nobody knows but those who write to it
                work = [v.work for v in vertices.values() if v.work is not None]
                put = sum(each.given.get(name, 0) for each in work)
                edges[name] = edge._replace(put=put)
        return GraphStatistics(vertices, edges)

    def close(self) -> None:
        """Stop the workers, each within the graph's grace period, and then the queues.

        The final counters are those of closed queues: one that is open still takes messages.
        Idempotent. After an error, too, nothing stays open.
        """
        with self._closing:
            if self._last is not None:
                return
            self._supervisor.close()
            try:
                self._edges.close()
            finally:
                with self._stack:
                    self._last = self._last_statistics()

    def _last_statistics(self) -> GraphStatistics:
        """Return the counters of closed queues, and tell what ends with them."""
        books, left = self.statistics(), self._edges.left
        if not left:
            return books
        log.warning(
            "%s messages end with queues that are in memory only (durable: false)", f"{left:,}"
        )
        return _with_left(books, self.graph)


def _sum(work: list[WorkerStatistics]) -> WorkerStatistics:
    given = {edge: sum(each.given[edge] for each in work) for edge in work[0].given}
    taken, done, failed, lost = (sum(column) for column in zip(*(w[:4] for w in work), strict=True))
    return WorkerStatistics(taken, done, failed, lost, given)


def _with_left(books: GraphStatistics, graph: WorkerGraph) -> GraphStatistics:
    """Count the messages left in in-memory queues as lost."""
    edges = {
        name: edge
        if graph.edges[name].durable or graph.edges[name].url is not None
        else edge._replace(lost=(edge.lost or 0) + (edge.held or 0))
        for name, edge in books.edges.items()
    }
    return books._replace(edges=edges)
