"""Which streams are the edges of a running graph, and what do they hold?

An edge with a URL is that stream. Any other gets a queue in this process, on a log below the
graph's folder, and workers reach it by its address; `lb` queues stand behind one address.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from penstock.core.capabilities import Grouped
from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.errors import (
    ConfigError,
    InvalidOption,
    LockTimeout,
    NotFound,
    PenstockError,
)
from penstock.core.interfaces import Closable
from penstock.core.options import nearest
from penstock.core.units import parse_duration, parse_size
from penstock.core.url import URL, escaped
from penstock.protocols.lhhttt.frames import DEFAULT_PORT
from penstock.protocols.lhhttt.queue import MessageQueue
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions
from penstock.relay.faults import FaultRouter, Faults, parse_delay, parse_share
from penstock.workers.balancer import Balancer, sum_of_books
from penstock.workers.job import Source, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.worker_graph import Edge, WorkerGraph
    from penstock.protocols.lhhttt.interface import QueueStatistics
    from penstock.relay.faults import Counters

__all__ = ["EdgeStatistics", "Edges", "check_edges"]

log = logging.getLogger(__name__)

#: Where the queues of graphs are, unless a file says otherwise.
_STATE: Final = ".penstock/graphs"
#: Addresses that mean every one of this machine.
_ANY: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - it is the other way round


class EdgeStatistics(NamedTuple):
    """Counters of an edge in this run; None where unknown."""

    #: Where it is, for people.
    place: str
    #: Messages that were there when the run began.
    recovered: int | None
    #: Messages that came since; into a stream, those of this graph.
    put: int | None
    #: Messages that are done: acknowledged, or taken by a program of the prototype.
    done: int | None
    #: Messages that are not; those of them that a worker has.
    held: int | None
    leased: int | None
    redelivered: int | None
    dead: int | None
    lost: int | None
    #: Datagrams or kilobytes that the fault router did not pass on.
    faults: Counters | None


class Edges(Closable):
    """The streams of a graph, open from construction until `close`."""

    def __init__(self, graph: WorkerGraph, state: str | None = None) -> None:
        """Open the streams, and create missing ones.

        :param state: the folder of the queues, if not the one that the file names
        :raises ConfigError: an edge cannot be used as the file describes it.
        :raises PenstockError: a queue cannot be opened, or a port is in use.
        """
        self._graph = graph
        default = f"{_STATE}/{graph.name}"
        self._folder = Path(state or graph.settings.state or default).absolute()
        self._made: dict[str, _Queue] = {}
        self._routers: dict[str, list[FaultRouter]] = {}
        self._sources: dict[str, list[Source]] = {}
        self._targets: dict[str, Target] = {}
        #: The counters of each edge's group when the run began: they go on over many runs.
        self._before: dict[str, Mapping[str, int]] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            _refuse_left(graph, self._folder)
            for name, edge in graph.edges.items():
                faults = faults_of(graph, name)
                if edge.url is None:
                    self._make(name, edge, faults)
                else:
                    self._use(name, edge, edge.url, faults)
            undo.pop_all()

    # --- for workers --------------------------------------------------------------------------

    def sources(self, edge: str, number: int, workers: int, client: str) -> list[Source]:
        """Return what one of `workers` workers reads of an edge; together they read all of it.

        :param client: prefix of the worker's client name, before its process id; see `release`
        """
        queues = self._sources[edge]
        if edge in self._made:
            queues = [
                queue._replace(options={**queue.options, "client": client}) for queue in queues
            ]
        if workers >= len(queues):
            return [queues[number % len(queues)]]
        return queues[number::workers]

    def target(self, edge: str) -> Target:
        """Return where to append messages of an edge."""
        return self._targets[edge]

    def address(self, edge: str) -> str:
        """Return `host:port` for programs that speak the protocol themselves."""
        target = self._targets.get(edge)
        url = URL.parse(self._sources[edge][0].url if target is None else target.url)
        return f"{_bracketed(url.host or '')}:{url.port or DEFAULT_PORT}"

    def release(self, client: str) -> None:
        """End the leases of a dead worker (`w3-4711`), so that others get its messages at once."""
        for queue in self._made.values():
            queue.release(client)

    # --- queues that are made -----------------------------------------------------------------

    def _make(self, name: str, edge: Edge, faults: tuple[Faults, int] | None) -> None:
        try:
            made = self._stack.enter_context(_Queue(name, edge, self._folder))
        except PenstockError as error:
            raise self._graph.error(
                ("edges", name), str(error), hint=error.hint, at_key=True
            ) from error
        self._made[name] = made
        scheme = "lhhttt+tcp" if edge.transport == "tcp" else "lhhttt"

        def url(address: tuple[str, int]) -> str:
            host, port = self._through(name, edge, address, faults)
            return f"{scheme}://{_bracketed(host)}:{port}?mode=reliable"

        self._targets[name] = Target(name, url(made.address), is_shared=False)
        if made.lb is None:
            self._sources[name] = [Source(name, self._targets[name].url, {})]
        else:
            self._sources[name] = [Source(name, url(each), {}) for each in made.lb]

    def _through(
        self, name: str, edge: Edge, to: tuple[str, int], faults: tuple[Faults, int] | None
    ) -> tuple[str, int]:
        """Return the address of a fault router in front of this one."""
        if faults is None:
            return to
        start = FaultRouter.tcp if edge.transport == "tcp" else FaultRouter.udp
        try:
            router = self._stack.enter_context(start(to, faults[0], seed=faults[1]))
        except InvalidOption as error:
            path = ("edges", name, "chaos", error.option)
            raise self._graph.error(path, error.reason, hint=error.hint) from None
        self._routers.setdefault(name, []).append(router)
        return router.address

    # --- streams that are there ---------------------------------------------------------------

    def _use(self, name: str, edge: Edge, url: str, faults: tuple[Faults, int] | None) -> None:
        graph, path = self._graph, ("edges", name, "url")
        if faults is not None:
            parsed = URL.parse(url)
            if parsed.host is None or parsed.port is None:
                raise graph.error(
                    ("edges", name, "chaos"),
                    "there is no network to break on the way to this URL",
                    hint="it needs scheme://host:port",
                    at_key=True,
                )
            host, port = self._through(name, edge, (parsed.host, parsed.port), faults)
            url = url.replace(urlsplit(url).netloc, f"{_bracketed(host)}:{port}", 1)
        writers = sum(graph.vertices[each].workers for each in graph.writers(name))
        try:
            if writers:
                self._targets[name] = Target(name, url, _create_and_probe(url, writers))
            if readers := graph.readers(name):
                self._sources[name] = [Source(name, url, self._group_options(edge, url))]
                self._before[name] = self._group(name, url)
        except NotFound as error:
            hint = f"start what writes it, or create it: penstock create {url}"
            raise graph.error(path, str(error), hint=hint) from error
        except ConfigError:
            raise
        except PenstockError as error:
            raise graph.error(path, str(error), hint=error.hint) from error
        for vertex in (*readers, *graph.writers(name)):
            if graph.vertices[vertex].is_udp and URL.parse(url).host is None:
                raise graph.error(path, f"{vertex} speaks udp, and there is no host:port to ask")

    def _group_options(self, edge: Edge, url: str) -> dict[str, Any]:
        """Return the URL options with which workers share a stream.

        :raises PenstockError: the stream has no consumer groups.
        """
        asked = {"lease": edge.lease, "deliveries": edge.deliveries, "dead": edge.dead}
        options: dict[str, Any] = {k: value for k, value in asked.items() if value is not None}
        if "group" not in URL.parse(url).options:
            options["group"] = self._graph.name
        try:
            open_reader(url, **options).close()
        except InvalidOption as error:
            if error.option != "group" or len(options) > 1:
                raise
        else:
            return options
        with open_reader(url) as reader:  # which may share its messages without a name for that
            if not isinstance(reader, Grouped):
                raise PenstockError(
                    f"{url} cannot be shared, and what is read cannot be given back",
                    hint=f"take it through a log: penstock cp --follow {url} log:/path/name",
                )
        return {}

    # --- books --------------------------------------------------------------------------------

    def statistics(self) -> dict[str, EdgeStatistics]:
        """Return the counters of each edge."""
        return {name: self._books(name) for name in self._graph.edges}

    def _books(self, name: str) -> EdgeStatistics:
        routers = self._routers.get(name)
        faults = routers[0].counters() if routers else None
        if name in self._made:
            books = self._made[name].statistics()
            return EdgeStatistics(
                place=self._made[name].place,
                recovered=books.recovered,
                put=books.queued,
                done=books.acked + books.taken,
                held=books.held,
                leased=books.leased,
                redelivered=books.redelivered,
                dead=books.dead,
                lost=books.lost + sum(books.dropped.values()),
                faults=faults,
            )
        url = self._graph.edges[name].url
        assert url is not None
        group, before = self._group(name, url), self._before.get(name, {})

        def in_this_run(counter: str) -> int | None:
            return group[counter] - before.get(counter, 0) if counter in group else None

        return EdgeStatistics(
            place=url,
            recovered=None,
            put=None,
            done=in_this_run("acked"),
            held=group.get("lag"),
            leased=group.get("leased"),
            redelivered=in_this_run("redelivered"),
            dead=in_this_run("dead"),
            lost=in_this_run("lost"),
            faults=faults,
        )

    def _group(self, name: str, url: str) -> Mapping[str, int]:
        """Return the counters of the consumer group of an edge."""
        if name not in self._sources:
            return {}
        try:
            found = describe(url)
        except PenstockError as error:
            log.debug("%s: %s", url, error)
            return {}
        wanted = self._sources[name][0].options.get("group", URL.parse(url).options.get("group"))
        groups: list[dict[str, Any]] = found.details.get("groups", [])
        mine = [group for group in groups if group["name"] == wanted]
        return mine[0] if mine else {"lag": found.count}

    @property
    def left(self) -> int:
        """Number of messages in queues that end with this process."""
        return sum(made.statistics().held for made in self._made.values() if not made.is_durable)

    def close(self) -> None:
        """Stop serving. Queues on disk keep their messages. Idempotent."""
        self._stack.close()


class _Queue(Closable):
    """The queue of an edge, or the queues behind its balancer."""

    def __init__(self, name: str, edge: Edge, folder: Path) -> None:
        self.is_durable = edge.durable
        self.place = ""
        #: The addresses of the queues behind the balancer; None: there is none.
        self.lb: list[tuple[str, int]] | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            options = _server_options(edge)
            names = [name] if edge.lb is None else [f"{name}.{i}" for i in range(edge.lb)]
            self._queues = [self._queue(options, edge, folder / each) for each in names]
            if edge.lb is None:
                front = self._stack.enter_context(LhhtttServer(options, self._queues[0]))
            else:
                inner = options.model_copy(update={"host": "127.0.0.1", "port": 0})
                behind = [
                    self._stack.enter_context(LhhtttServer(inner, queue)) for queue in self._queues
                ]
                self.lb = [(inner.host, server.port) for server in behind]
                balancer = Balancer(self._queues, (edge.key or "") if edge.by == "key" else None)
                self._stack.callback(balancer.close)
                front = self._stack.enter_context(LhhtttServer(options, balancer))
            host = options.host if options.host not in _ANY else "127.0.0.1"
            self.address = (host, front.port)
            self.place = f"lhhttt://{front.address}"
            if edge.lb is not None:
                self.place += f", {edge.lb} queues by {edge.by.replace('_', ' ')}"
            undo.pop_all()

    def _queue(self, options: ServerOptions, edge: Edge, place: Path) -> MessageQueue:
        journal = None
        if edge.durable:
            place.parent.mkdir(parents=True, exist_ok=True)
            sync = "" if edge.sync is None else f"?sync={edge.sync}"
            journal = f"log:{escaped(str(place))}{sync}"
        settings = options.model_copy(update={"journal": journal}).settings()
        return self._stack.enter_context(MessageQueue(settings))

    def release(self, client: str) -> None:
        for queue in self._queues:
            queue.release(client.encode())

    def statistics(self) -> QueueStatistics:
        return sum_of_books([queue.statistics() for queue in self._queues])

    def close(self) -> None:
        self._stack.close()


def _server_options(edge: Edge) -> ServerOptions:
    given = {
        "host": edge.host,
        "port": edge.port,
        "tcp": edge.transport == "tcp",
        "capacity": edge.capacity,
        "capacity_bytes": edge.capacity_bytes,
        "lease": edge.lease,
        "deliveries": edge.deliveries,
        "dead": edge.dead,
    }
    return ServerOptions.model_validate(
        {name: value for name, value in given.items() if value is not None}
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _create_and_probe(url: str, writers: int) -> bool:
    """Create the stream if it is missing; tell whether several writers have to take turns."""
    with open_writer(url):
        if writers == 1:
            return False
        try:
            open_writer(url, lock_timeout=0).close()
        except LockTimeout:
            return True
        except InvalidOption:
            return False  # it knows no lock
    return False


def _refuse_left(graph: WorkerGraph, folder: Path) -> None:
    """Refuse to start if a queue of an edge that the file no longer has holds messages."""
    known = {
        each
        for name, edge in graph.edges.items()
        if edge.url is None and edge.durable
        for each in ([name] if edge.lb is None else [f"{name}.{i}" for i in range(edge.lb)])
    }
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in known or not path.is_dir():
            continue
        try:
            found = describe(f"log:{escaped(str(path))}")
        except PenstockError:
            continue  # it is no queue
        groups: list[dict[str, Any]] = found.details.get("groups", [])
        left = sum(group.get("lag", 0) for group in groups)
        if left:
            raise graph.error(
                ("edges",),
                f"{path} holds {left:,} messages, and no edge has this queue",
                hint="bring the edge back, as it was, until they are done; or remove the folder",
                at_key=True,
            )


# --- faults ---------------------------------------------------------------------------------------


def _share(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return parse_share(str(value))


_FAULTS: Final[dict[str, Callable[[Any], Any]]] = {
    "drop": _share,
    "duplicate": _share,
    "reorder": _share,
    "garble": _share,
    "refuse": _share,
    "rate": parse_size,
    "cut_every": parse_duration,
    "cut_after": parse_size,
    "cut": str,
    "half_open": bool,
    "one_way": str,
}


def faults_of(graph: WorkerGraph, name: str) -> tuple[Faults, int] | None:
    """Return the faults of an edge and their seed, or None.

    :raises ConfigError: a fault is unknown or invalid.
    """
    edge = graph.edges[name]
    if edge.chaos is None:
        return None
    given = dict(edge.chaos)
    seed = given.pop("seed", 0)
    parsed: dict[str, Any] = {}

    def refuse(key: str, reason: str, hint: str | None = None) -> ConfigError:
        return graph.error(("edges", name, "chaos", key), reason, hint=hint)

    if type(seed) is not int:
        raise refuse("seed", "should be a number")
    for key, value in given.items():
        try:
            if key == "delay":
                parsed["delay"], parsed["jitter"] = parse_delay(str(value))
            elif key in _FAULTS:
                parsed[key] = _FAULTS[key](value)
            else:
                known = [*_FAULTS, "delay", "seed"]
                raise refuse(key, "unknown key", nearest(key, known, "known keys"))
        except InvalidOption as error:
            raise refuse(key, error.reason, error.hint) from None
    try:
        faults = Faults(**parsed)
        faults.refuse_for(edge.transport)
    except InvalidOption as error:
        raise refuse(error.option, error.reason, error.hint) from None
    return faults, seed


def check_edges(graph: WorkerGraph) -> None:
    """Check the edges beyond the file's syntax, without opening anything.

    :raises ConfigError: an edge names an unknown fault.
    """
    for name in graph.edges:
        faults_of(graph, name)
