"""How are the queues and logs below a directory served over Arrow Flight?"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import pyarrow as pa
from pyarrow import flight
from pydantic import Field

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import InvalidOption, Malformed, PenstockError, StorageError
from penstock.core.interfaces import Closable
from penstock.core.options import Directory, Duration, Options, Size
from penstock.core.url import is_loopback
from penstock.core.worker import Worker
from penstock.protocols.flight.access import (
    DEFAULT_PORT,
    Clients,
    Root,
    TokenGate,
    load_token,
)
from penstock.protocols.flight.answers import Answers
from penstock.protocols.flight.bulk import BulkPort
from penstock.protocols.flight.errors import AccessRefused, describe_error
from penstock.protocols.flight.wire import (
    ActionKind,
    Hold,
    Piece,
    Stage,
    Take,
    parse_command,
    parse_ticket,
    payload_bytes,
)
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.batch import Batch
    from penstock.protocols.flight.wire import Outcome

__all__ = ["FlightServer", "FlightServerStatistics", "ServerOptions"]

log = logging.getLogger(__name__)

#: Seconds between two rounds that expire idle readers, writers and files.
_BETWEEN_ROUNDS: Final = 1.0
#: Seconds that calls under way have to end when the server stops.
_GRACE: Final = 3.0


class ServerOptions(Options):
    """Options of `serve flight`."""

    #: The directory that all streams are below.
    root: Directory
    host: str = "127.0.0.1"
    #: 0: any free port.
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    #: Port for bulk connections of writers; 0: any free port; `off`: none. Default: any free port
    #: if only this machine can reach the server, otherwise none.
    bulk_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: A file with the token that clients have to send.
    token_file: Path | None = None
    #: Most clients with a call under way at the same time.
    max_clients: Annotated[int, Field(ge=1, le=100_000)] = 64
    #: Most bytes of one batch from a client.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 30)] = 64 << 20
    #: Most bytes of a queue, or of a segment of a log, that a client creates.
    max_queue: Annotated[Size, Field(ge=4096)] = 1 << 30
    #: Readers and writers that make no call for this long expire, and lose their holds.
    idle: Annotated[Duration, Field(gt=0)] = 600.0
    #: Most bytes staged at the same time, and how long uncommitted files are kept.
    max_staged: Annotated[Size, Field(ge=1024)] = 16 << 30
    keep_staged: Annotated[Duration, Field(gt=0)] = 86_400.0
    #: Nothing may be written, created or held.
    read_only: bool = False
    #: Admit other machines without a token.
    insecure: bool = False


class FlightServerStatistics(NamedTuple):
    """Counters of a server."""

    #: Connections with a call under way.
    clients: int
    #: Connections seen so far.
    clients_seen: int
    #: Calls begun so far, and calls refused because of the limit of clients.
    calls: int
    refused: int
    #: Messages and their payload bytes sent to clients.
    messages_out: int
    bytes_out: int
    #: Messages and their payload bytes appended for clients.
    messages_in: int
    bytes_in: int
    #: Messages that were overwritten before they could be sent.
    lost: int
    #: Current readers, writers and held names.
    readers: int
    writers: int
    holds: int
    #: Open bulk connections.
    bulk: int


class _Traffic:
    """Counts messages and bytes sent and appended. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages_out = self.bytes_out = self.messages_in = self.bytes_in = self.lost = 0

    def sent(self, batch: Batch, lost: int) -> None:
        size = payload_bytes(batch)
        with self._lock:
            self.messages_out += batch.num_rows
            self.bytes_out += size
            self.lost += lost

    def appended(self, batch: Batch, outcome: Outcome) -> None:
        size = payload_bytes(batch.slice(0, outcome.written))
        with self._lock:
            self.messages_in += outcome.written
            self.bytes_in += size

    def committed(self, messages: int, size: int) -> None:
        with self._lock:
            self.messages_in += messages
            self.bytes_in += size


class FlightServer(Closable):
    """Serves the streams below a directory from construction until `close`.

    :raises InvalidOption: other machines could reach it, and no token is required.
    :raises StorageError: the port is in use, or a file cannot be read.
    """

    def __init__(self, options: ServerOptions) -> None:
        _check_exposure(options)
        self.options = options
        self._stopping = threading.Event()
        self._traffic = _Traffic()
        self._clients = Clients(options.max_clients)
        self._answers = Answers(
            Root(options.root),
            options,
            self._stopping.is_set,
            self._traffic.appended,
            self._traffic.committed,
        )
        certificates = _certificates(options)
        middleware = {}
        if options.token_file is not None:
            middleware["token"] = TokenGate(load_token(options.token_file))
        scheme = "grpc+tls" if certificates else "grpc+tcp"
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            self._service = _Service(
                self._answers,
                self._clients,
                self._traffic,
                f"{scheme}://{host}:{options.port}",
                tls_certificates=certificates,
                middleware=middleware,
            )
        except (OSError, flight.FlightError, pa.ArrowException) as error:
            cause = OSError(None, f"the address cannot be served ({_first_line(error)})")
            raise StorageError(
                "listening on", f"{host}:{options.port}", cause, hint="choose another --port"
            ) from error
        self.port: int = self._service.port
        self._bulk = self._open_bulk_port()
        #: Port for bulk connections; None: there is none.
        self.bulk_port = None if self._bulk is None else self._bulk.port
        scheme = "flight+tls" if certificates else "flight"
        #: URL of the server; append the name of a stream.
        self.url = f"{scheme}://{host}:{self.port}/"
        self._rounds = Worker(
            "flight rounds",
            lambda _: self._answers.expire(),
            log=log,
            every=min(_BETWEEN_ROUNDS, options.idle / 2),
        ).start()

    def _open_bulk_port(self) -> BulkPort | None:
        if not BulkPort.is_wanted(self.options):
            return None
        try:
            with storage_errors("listening on", f"{self.options.host}:{self.options.bulk_port}"):
                bulk = BulkPort(self.port, self.options, self._answers, self._clients)
        except StorageError:
            self._service.shutdown()
            raise
        self._answers.offer(ActionKind.OPEN_BULK, bulk.open)
        return bulk

    def statistics(self) -> FlightServerStatistics:
        """Return the counters, and the number of current clients."""
        traffic, answers = self._traffic, self._answers
        return FlightServerStatistics(
            clients=len(self._clients),
            clients_seen=self._clients.seen,
            calls=self._clients.calls,
            refused=self._clients.refused,
            messages_out=traffic.messages_out,
            bytes_out=traffic.bytes_out,
            messages_in=traffic.messages_in,
            bytes_in=traffic.bytes_in,
            lost=traffic.lost,
            readers=len(answers.readers),
            writers=len(answers.writers),
            holds=len(answers.holds),
            bulk=0 if self._bulk is None else len(self._bulk),
        )

    def close(self) -> None:
        """End all calls, and release all resources. Idempotent."""
        self.stop()

    def stop(self, grace: float = _GRACE) -> bool:
        """Close; tell whether all calls have ended within `grace` seconds.

        A call that has not ended stays until the process ends; it uses nothing of the server.
        """
        self._stopping.set()
        # It returns when all calls have ended. A client that does not read its stream blocks its
        # call, and Flight has no way to end that.
        ending = Worker("flight end", lambda _: self._service.shutdown(), log=log).start()
        if self._bulk is not None:
            self._bulk.close(grace)
        has_ended = ending.join(grace)
        self._rounds.stop(grace)
        self._answers.close()
        return has_ended

    def __repr__(self) -> str:
        return f"<FlightServer {self.url}>"


def _check_exposure(options: ServerOptions) -> None:
    if is_loopback(options.host):
        return
    if options.token_file is None and not options.insecure:
        raise InvalidOption(
            "host",
            options.host,
            "other machines could read and write everything",
            hint="give --token-file FILE, and --tls-cert and --tls-key; or --insecure",
        )
    if options.tls_cert is None:
        log.warning("everything that passes can be read on the network: no --tls-cert is given")


def _certificates(options: ServerOptions) -> list[tuple[bytes, bytes]] | None:
    if (options.tls_cert is None) != (options.tls_key is None):
        missing = "tls_cert" if options.tls_cert is None else "tls_key"
        raise InvalidOption(missing, None, "a certificate and its key are given together")
    if options.tls_cert is None or options.tls_key is None:
        return None
    with storage_errors("reading", str(options.tls_cert)):
        certificate = options.tls_cert.read_bytes()
    with storage_errors("reading", str(options.tls_key)):
        return [(certificate, options.tls_key.read_bytes())]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["unknown"])[0]


class _Service(flight.FlightServerBase):  # type: ignore[misc]
    """The handlers that Flight calls in its threads: parse requests, and send answers."""

    def __init__(
        self,
        answers: Answers,
        clients: Clients,
        traffic: _Traffic,
        location: str,
        **options: Any,
    ) -> None:
        self._answers = answers
        self._clients = clients
        self._traffic = traffic
        super().__init__(location, **options)

    @contextlib.contextmanager
    def _answering(self, context: Any) -> Iterator[str]:
        """Count the call, and convert errors to those that the client understands."""
        peer = context.peer()
        try:
            with self._clients.calling(peer):
                yield peer
        except PenstockError as error:
            failure = self._answers.hide(describe_error(error))
            log.debug("%s: %s", peer, error)
            kind = flight.FlightServerError
            if isinstance(error, AccessRefused):
                kind = flight.FlightUnauthorizedError
            raise kind(failure.message, failure.to_bytes()) from None
        except (flight.FlightError, GeneratorExit):
            raise
        except Exception:
            log.exception("%s: a call failed", peer)
            raise flight.FlightInternalError("the server failed; its log says why") from None

    # --- streams of messages ----------------------------------------------------------------------

    def do_get(self, context: Any, ticket: Any) -> Any:
        # All inside the generator: it ends with the call, and so does the count of calls.
        return flight.GeneratorStream(BATCH_SCHEMA, self._batches(context, ticket.ticket))

    def _batches(self, context: Any, ticket: bytes) -> Iterator[tuple[Batch, bytes]]:
        with self._answering(context) as peer:
            asked = parse_ticket(ticket)
            if isinstance(asked, Take):
                for batch, told in self._answers.take(asked, context.is_cancelled):
                    yield batch, told.to_bytes()
                    self._traffic.sent(batch, told.lost)
            else:
                yield from self._hold(context, peer, asked)

    def _hold(self, context: Any, peer: str, asked: Hold) -> Iterator[tuple[Batch, bytes]]:
        log.info("%s holds %s of %s", peer, asked.name, asked.stream)
        for batch, told in self._answers.hold(asked, context.is_cancelled):
            yield batch, told.to_bytes()
        log.info("%s holds %s of %s no more", peer, asked.name, asked.stream)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._answering(context):
            if not descriptor.command:
                raise Malformed("flight Put", "descriptor", "a command", "a path")
            asked = parse_command(descriptor.command)
            if not reader.schema.equals(BATCH_SCHEMA):
                raise Malformed("batch", "its schema", "that of messages", "another")
            if isinstance(asked, Stage):
                with self._answers.staging(asked) as add:
                    self._take_pieces(reader, writer, add)
            else:
                self._take_pieces(reader, writer, self._answers.put(asked))

    def _take_pieces(
        self, reader: Any, writer: Any, take: Callable[[Batch, Piece], Outcome]
    ) -> None:
        """Pass each batch of a call to `take`, and send its outcome."""
        while True:
            try:
                batch, metadata = reader.read_chunk()
            except StopIteration:
                return
            except flight.FlightError:
                raise  # the client left
            except pa.ArrowException as error:
                raise Malformed("batch", "its bytes", "Arrow IPC", error) from None
            if metadata is None:
                raise Malformed("flight Piece", "metadata", "there", "none")
            outcome = take(batch, Piece.from_bytes(metadata.to_pybytes()))
            try:
                writer.write(self._answers.hidden(outcome).to_bytes())
            except OSError:
                raise flight.FlightCancelledError("the client left") from None
            if outcome.failure is not None:
                # Pieces sent ahead must not be appended: the client has to decide first.
                with contextlib.suppress(StopIteration):
                    while True:
                        reader.read_chunk()

    # --- questions --------------------------------------------------------------------------------

    def do_action(self, context: Any, action: Any) -> list[Any]:
        with self._answering(context) as peer:
            body = b"" if action.body is None else action.body.to_pybytes()
            answer = self._answers.act(action.type, body, peer)
            return [flight.Result(answer)]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        with self._answering(context):
            return [(kind.value, "see docs/flight.md") for kind in ActionKind]

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        del criteria
        with self._answering(context):
            for name, count, size in self._answers.streams():
                yield self._info(name, count, size)

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with self._answering(context):
            name = b"/".join(descriptor.path or []).decode(errors="replace")
            info = json.loads(self._answers.described(name).info)
            return self._info(name, info["count"], info["bytes"])

    def _info(self, name: str, count: int, size: int) -> Any:
        ticket = Take(stream=name, reader=secrets.token_hex(16)).to_bytes()
        return flight.FlightInfo(
            BATCH_SCHEMA,
            flight.FlightDescriptor.for_path(*name.split("/")),
            [flight.FlightEndpoint(ticket, [])],
            count,
            size,
        )
