"""How does a monitoring system get the progress and the losses of queries?

`GET /metrics` answers in Prometheus' text format, with the `Progress` of each query:
`penstock run` has it, and other programs get it from `QueryListener`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.core.errors import Malformed
from penstock.core.interfaces import Closable
from penstock.pipeline.run.progress import Watch
from penstock.protocols.server import Limits, Server, Session, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.pipeline.run.progress import Progress
    from penstock.protocols.connection import Connection

__all__ = ["Metrics", "MetricsServer", "QueryListener"]

log = logging.getLogger(__name__)

_STATES: Final = ("waiting", "starting", "running", "done", "failed")
#: The largest request in bytes, and its time limit in seconds.
_LARGEST: Final = 16 << 10
_PATIENCE: Final = 5.0
_MOST_CLIENTS: Final = 16
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Family(NamedTuple):
    """A metric of all queries."""

    name: str
    kind: str
    help: str
    #: Labels beside the query, and a value for each.
    of: Callable[[Progress], Iterable[tuple[dict[str, str], float]]]


def _one(value: float) -> list[tuple[dict[str, str], float]]:
    return [({}, value)]


def _by(label: str, values: Any) -> list[tuple[dict[str, str], float]]:
    return [({label: key}, value) for key, value in sorted((values or {}).items())]


_FAMILIES: Final = (
    _Family("rows_total", "counter", "Rows read.", lambda p: _one(p.rows)),
    _Family("batches_total", "counter", "Batches done.", lambda p: _one(p.batches)),
    _Family("batch_seconds", "gauge", "Time of the latest batch.", lambda p: _one(p.batch_seconds)),
    _Family(
        "rows_per_second",
        "gauge",
        "Rows a second of the latest batch that had any.",
        lambda p: _one(p.rows_per_second),
    ),
    _Family(
        "lag_messages",
        "gauge",
        "Messages of a stream that are not read yet.",
        lambda p: _by("url", p.lag),
    ),
    _Family(
        "lost_messages_total",
        "counter",
        "Messages that were gone before they could be read.",
        lambda p: _by("url", p.lost),
    ),
    _Family(
        "lost_unknown_total",
        "counter",
        "Times that messages were lost which nobody could count.",
        lambda p: _one(p.lost_unknown),
    ),
    _Family(
        "skipped_messages_total",
        "counter",
        "Messages that did not decode and were left out.",
        lambda p: _by("node", p.skipped),
    ),
    _Family("restarts_total", "counter", "Starts after an outage.", lambda p: _one(p.restarts)),
    _Family(
        "state",
        "gauge",
        "1 for the state that a query is in.",
        lambda p: [({"state": one}, float(p.state == one)) for one in _STATES],
    ),
)


class Metrics:
    """The latest progress of each query, as text."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._seen: dict[str, float] = {}

    def take(self, progress: Progress) -> None:
        """Store the progress of a query."""
        self._latest[progress.query] = progress
        self._seen[progress.query] = time.time()

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        latest = dict(self._latest)  # others may be added meanwhile
        for family in _FAMILIES:
            name = f"penstock_query_{family.name}"
            yield f"# HELP {name} {family.help}"
            yield f"# TYPE {name} {family.kind}"
            for query, progress in latest.items():
                for labels, value in family.of(progress):
                    yield f"{name}{_labels({'query': query, **labels})} {value:.12g}"
        name = "penstock_query_progress_timestamp_seconds"
        yield f"# HELP {name} When a query was last heard of."
        yield f"# TYPE {name} gauge"
        for query, at in dict(self._seen).items():
            yield f"{name}{_labels({'query': query})} {at:.3f}"


def _labels(given: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in given.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class QueryListener(StreamingQueryListener):
    """Reports the `Progress` of the queries of a Spark session.

        spark.streams.addListener(QueryListener(print))

    Lost, skipped and unread messages, which Spark does not report, are counted from the start of
    each query.
    """

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self._on_progress = on_progress
        self._watches: dict[str, Watch] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's names, here and below
        watch = self._watches[str(event.runId)] = Watch(event.name or str(event.id))
        watch.say("starting")
        self._on_progress(watch.now)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        watch = self._watches.get(str(event.progress.runId))
        if watch is not None and watch.take(json.loads(event.progress.json)):
            self._on_progress(watch.now)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Ignore it: an idle query has no progress."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        watch = self._watches.pop(str(event.runId), None)
        if watch is not None:
            watch.say("done" if event.exception is None else "failed")
            self._on_progress(watch.now)


class MetricsServer(Closable):
    """Answers `GET /metrics`, from construction until `close`."""

    def __init__(self, metrics: Metrics, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 is any free port.

        :raises StorageError: the address cannot be bound.
        """
        limits = Limits(
            max_clients=_MOST_CLIENTS, first_message=_PATIENCE, idle=60.0, stalled=_PATIENCE
        )
        self._server = Server(
            "metrics",
            listen_tcp(host, port),
            lambda connection: _Http(connection, metrics),
            limits,
            log=log,
        ).start()
        self.host = host
        self.port = self._server.port

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host.strip("[]") else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop. Idempotent."""
        self._server.close()


class _Http(Session):
    """The connection of a client that requests metrics."""

    def __init__(self, connection: Connection, metrics: Metrics) -> None:
        super().__init__(connection)
        self._metrics = metrics
        self._buffer = bytearray(_LARGEST)

    def serve(self) -> bool:
        head = self._head()
        if head is None:
            return False
        self.connection.welcome()
        method, _, rest = head.partition("\r\n")[0].partition(" ")
        path, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            raise Malformed("request", "line", "GET /metrics HTTP/1.1", head[:80])
        stays = version == "HTTP/1.1" and "\r\nconnection: close" not in head.lower()
        status, body = "200 OK", ""
        if method not in {"GET", "HEAD"}:
            status = "405 Method Not Allowed"
        elif path.partition("?")[0] == "/metrics":
            body = self._metrics.text()
        else:
            status, body = "404 Not Found", "see /metrics\n"
        data = body.encode()
        answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(data)}\r\n"
            f"Connection: {'keep-alive' if stays else 'close'}\r\n\r\n"
        )
        self.connection.send(answer.encode(), b"" if method == "HEAD" else data)
        return stays

    def _head(self) -> str | None:
        """Receive a request up to its empty line; None: the client has closed.

        :raises Malformed: it is too long, or has a body.
        """
        self.connection.expect(_PATIENCE)
        view, count = memoryview(self._buffer), 0
        while count < len(view):
            received = self.connection.receive(view[count:])
            if not received:
                return None
            count += received
            end = self._buffer.find(b"\r\n\r\n", 0, count)
            if end == count - len(b"\r\n\r\n"):
                return self._buffer[:end].decode("latin-1")
            if end >= 0:
                break
        found = bytes(self._buffer[:80])
        raise Malformed("request", "head", f"at most {_LARGEST} bytes, and nothing behind", found)
