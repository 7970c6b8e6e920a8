"""How does one process serve many of LROSE's clients, whatever the service?

A `Service` answers the requests of one client; `DsSession` reads them from the connection, and
`DsServer` has the limits and the statistics of all sessions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias

from pydantic import Field

from penstock.core.errors import Malformed, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.options import Duration, Options, Size
from penstock.core.url import is_loopback
from penstock.protocols.lrose.datamapper_wire import DATAMAPPER_TYPE, MapReply
from penstock.protocols.lrose.ds_message import (
    Category,
    CommonPart,
    DsMessage,
    ErrorCode,
    Part,
    StatusRequest,
    error_reply,
    int_part,
    is_known_category,
    text_part,
)
from penstock.protocols.lrose.sku import (
    HEADER_SIZE,
    HTTP_REPLY,
    Decoder,
    Frame,
    encode_header,
    keep_memory,
)
from penstock.protocols.server import End, Limits, Server, Session, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType

    from penstock.protocols.connection import Connection

    _Glance: TypeAlias = Callable[[bytearray, int, int], bytes | None]

__all__ = [
    "Answer",
    "Counts",
    "DsServer",
    "DsSession",
    "Encoded",
    "ServerStatistics",
    "Service",
    "ServingOptions",
]

# --- services -----------------------------------------------------------------------------------

#: A reply: a message, an encoded message, or nothing.
Encoded: TypeAlias = bytes | bytearray
Answer: TypeAlias = DsMessage | Encoded | None


class ServingOptions(Options):
    """Options of every server: address and limits."""

    host: str = "127.0.0.1"
    #: 0: any free port.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Most clients at the same time.
    max_clients: Annotated[int, Field(ge=1, le=100_000)] = 256
    #: Most bytes of one request.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 31)] = 64 << 20
    #: Most bytes of incomplete requests, of all clients together.
    max_held: Annotated[Size, Field(ge=1024)] = 512 << 20
    #: Most bytes of replies that clients have not received yet, of all clients together; the
    #: largest reply has to fit. Above it, the clients with most of them are disconnected.
    max_unsent: Annotated[Size, Field(ge=1024)] = 512 << 20
    #: Time for the first request, and for each later one from its first byte; a large one may take
    #: longer while it makes progress.
    first_message: Annotated[Duration, Field(gt=0)] = 30.0
    #: A client that is silent for this long is disconnected. Long, because LROSE's never connect
    #: again: a program that writes once a day would end, or write no more. Probes find dead ones.
    idle: Annotated[Duration, Field(gt=0)] = 30 * 86400.0
    #: Allow every client to stop the server, as LROSE's does.
    allow_shutdown: bool = False


@dataclass(slots=True)
class Counts:
    """Counters of the requests of one client, or of all that have left."""

    requests: int = 0
    replies: int = 0
    errors: int = 0
    unanswered: int = 0
    pings: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(slots=True)
class ServerStatistics:
    """Counters of a server. Every request was answered, or is one of `unanswered`."""

    #: Clients connected now.
    clients: int = 0
    #: Clients since the start.
    clients_seen: int = 0
    #: Clients refused because of the limit of clients.
    clients_denied: int = 0
    #: Clients disconnected because they were silent, or received no reply, for too long.
    clients_timed_out: int = 0
    #: Clients disconnected because of malformed input.
    clients_malformed: int = 0
    #: Clients disconnected because of too many unreceived replies.
    clients_behind: int = 0
    #: Requests received, pings included.
    requests: int = 0
    #: Of those: answered, and answered with an error.
    replies: int = 0
    errors: int = 0
    #: Of those: not answered, because the client left, or because there is no answer to them.
    unanswered: int = 0
    #: Of those: pings, and the like.
    pings: int = 0
    #: Payload bytes of requests and replies.
    bytes_in: int = 0
    bytes_out: int = 0


def _is_refusal(reply: DsMessage) -> bool:
    """Tell whether a reply reports an error, in the form of any of LROSE's services."""
    if reply.error:
        return True
    if reply.type == DATAMAPPER_TYPE:
        # Only the head is decoded: a reply may hold thousands of entries.
        return MapReply.from_message(reply._replace(parts=())).error is not None
    return reply.error_text is not None


class Service(Protocol):
    """Answers the requests of one client.

    Two optional methods are shortcuts. `handle_payload(payload: bytes)` gets the bytes of each
    request but the first; it returns `...` for those that `handle` has to answer. Before that,
    `handle_frame(buffer: bytearray, size: int, seq: int)` gets all received bytes, if no other
    request is under way; it returns the complete frame of the reply, with number `seq`, or None if
    it has done nothing.
    """

    #: The id of the frames of replies.
    socket_id: int
    #: True once the session is over; then the connection is closed.
    is_over: bool

    def handle(self, request: DsMessage) -> Answer:
        """Execute a request; it may block while the client is connected.

        A `PenstockError` or an `OSError` is answered with the reply of `failure`.

        :raises ConnectionAbortedError: the client left meanwhile.
        """
        ...

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        """Return the frame id and the reply that report an error."""
        ...

    def close(self) -> None:
        """Release all resources: the client has left."""
        ...


# --- pings --------------------------------------------------------------------------------------

#: What LROSE's servers answer to a ping besides their process id; clients ignore it.
_PING_TEXT: Final = "Executable Name should go here."


def _status_reply(request: DsMessage, client_count: int) -> DsMessage:
    """Return the reply to a status request, such as a ping."""
    parts: tuple[Part, ...] = ()
    match request.type:
        case StatusRequest.IS_ALIVE:
            parts = (int_part(os.getpid()), text_part(CommonPart.STRING, _PING_TEXT))
        case StatusRequest.CLIENT_COUNT:
            parts = (int_part(client_count),)
        case StatusRequest.SHUTDOWN:
            pass
        case _:
            text = f"there is no command {request.type}"
            reply = error_reply(request.type, -1, ErrorCode.UNKNOWN_COMMAND, text)
            return reply._replace(category=Category.SERVER_STATUS)
    return request._replace(parts=parts)


def _refusal(error: ErrorCode, text: str) -> DsMessage:
    """Return the reply to what never gets to a service: LROSE's is of no type."""
    return error_reply(-1, -1, error, text)


# --- one client ---------------------------------------------------------------------------------

log = logging.getLogger(__name__)

#: A client silent for this long (seconds) releases its thread until its next request.
_LINGER: Final = 1.0
#: Bytes per second by which the time for a large request is extended.
_SLOWEST: Final = 1 << 14
#: While a request lacks more bytes than this, a part of them is not worth a wake.
_MUCH: Final = 1 << 12
#: Larger replies are many packets anyway, and are not copied behind their header.
_LARGE: Final = 1 << 16


class DsSession(Session):
    """One connection. One request at a time; later ones wait in the socket."""

    def __init__(
        self, connection: Connection, server: DsServer, *, is_one_too_many: bool = False
    ) -> None:
        super().__init__(connection)
        self.counts = Counts()
        self._server = server
        self._is_one_too_many = is_one_too_many
        self._decoder = Decoder(server.options.max_message, allow_http=True)
        self._service: Service | None = None
        self._shortcut: Callable[[bytes], Answer | EllipsisType] | None = None
        self._glance: _Glance | None = None
        self._seq = 0
        #: Bytes of an incomplete request, and the time of its first byte.
        self._held = 0
        self._begun = time.monotonic()
        self._has_spoken = False
        server.enter(self)

    def serve(self) -> bool:
        connection, decoder = self.connection, self._decoder
        while True:
            if decoder.missing > _MUCH:
                count = connection.receive(decoder.room()[: decoder.missing], eager=True)
            elif self._held or not self._has_spoken:
                count = connection.receive(decoder.room())
            elif (came := connection.receive(decoder.room(), _LINGER)) is not None:
                count = came
            else:
                return True
            if not count:
                return False
            if self._answer_at_once(count):
                continue
            if not self._take(count):
                return False

    def _answer_at_once(self, count: int) -> bool:
        """Offer all received bytes to `handle_frame`; False: it has done nothing."""
        if self._glance is None or (buffer := self._decoder.glance()) is None:
            return False
        reply = self._glance(buffer, count, self._seq + 1)
        if reply is None:
            return False
        self._seq += 1
        self.connection.send(reply)
        # The client is at work again by now.
        counts = self.counts
        counts.requests += 1
        counts.replies += 1
        counts.bytes_in += count - HEADER_SIZE
        counts.bytes_out += len(reply) - HEADER_SIZE
        return True

    def _take(self, count: int) -> bool:
        """Execute the complete requests; False: the session is over."""
        try:
            frames = self._decoder.took(count)
        except Malformed as fault:
            raise self._refused(fault) from None
        if frames:
            self._has_spoken = True
            self.connection.welcome()
        self.counts.requests += len(frames)
        done = 0
        try:
            for frame in frames:
                done += 1
                if not self._carry_out(frame):
                    return False
        finally:
            self.counts.unanswered += len(frames) - done
        if self._decoder.fault is not None:
            raise self._refused(self._decoder.fault)
        if self._held or self._decoder.held:
            self._wait_for_the_rest(is_another=bool(frames) or not self._held)
        return True

    # --- limits -----------------------------------------------------------------------------

    def _wait_for_the_rest(self, *, is_another: bool) -> None:
        """Count the bytes of an incomplete request, and set its deadline.

        LROSE's clients write a request in three pieces, and send each only after the ACK of the one
        before, which the kernel delays by 40 ms. Quick ACKs last only a while, so they are set each
        time. A request that arrives complete is acknowledged by the reply.
        """
        self.connection.acknowledge_now()
        held = self._decoder.held
        total = self._server.hold(held - self._held)
        self._held = held
        options = self._server.options
        if total > options.max_held:
            raise self._refused(Malformed("requests under way", "bytes", "fewer", total))
        if not held:
            self.connection.until = None
        elif not self._is_one_too_many:
            now = time.monotonic()
            if is_another and self._has_spoken:
                self._begun = now
            patience = min(options.first_message, options.idle)
            self.connection.until = min(self._begun + held / _SLOWEST, now) + patience

    def _refused(self, fault: Malformed) -> Malformed:
        """Report malformed input; nothing after it can be decoded."""
        self._send(0, _refusal(ErrorCode.BAD_MESSAGE, str(fault)))
        return fault

    # --- requests ---------------------------------------------------------------------------

    def _carry_out(self, frame: Frame) -> bool:
        """Answer a request; False: the session is over."""
        payload = frame.payload
        self.counts.bytes_in += len(payload)
        service = self._service
        if service is not None and self._shortcut is not None:
            # Frequent requests are not decoded twice.
            answer = self._attempt(service, frame, self._shortcut, payload)
            if answer is not ...:
                return answer
        try:
            request = DsMessage.from_bytes(payload)
        except Malformed as fault:
            self._reply(frame, 0, _refusal(ErrorCode.BAD_MESSAGE, str(fault)))
            raise
        if request.category == Category.SERVER_STATUS:
            return self._answer_status(frame, request)
        if self._is_one_too_many:
            text = f"the server has {self._server.options.max_clients} clients, and takes no more"
            self._reply(frame, 0, _refusal(ErrorCode.SERVICE_DENIED, text))
            return False
        if not is_known_category(request.category):
            text = f"there is no category {request.category}"
            self._reply(frame, 0, _refusal(ErrorCode.BAD_MESSAGE, text))
            return True
        if service is None:
            service = self._service = self._server.new_service(self.connection)
            self._shortcut = getattr(service, "handle_payload", None)
            self._glance = getattr(service, "handle_frame", None)
        return self._attempt(service, frame, service.handle, request) is True

    def _attempt(
        self,
        service: Service,
        frame: Frame,
        call: Callable[[Any], Answer | EllipsisType],
        request: DsMessage | bytes,
    ) -> bool | EllipsisType:
        """Execute a request; `...` if the service needs it decoded."""
        try:
            answer = call(request)
        except ConnectionAbortedError:
            self.counts.unanswered += 1  # the client left before it had an answer
            raise
        except Exception as error:  # noqa: BLE001 - it is told to the client
            self._fail(service, frame, error)
            return not service.is_over
        if answer is ...:
            return ...
        if answer is None:
            self.counts.unanswered += 1
        else:
            self._reply(frame, service.socket_id, answer)
        return not service.is_over

    def _fail(self, service: Service, frame: Frame, error: Exception) -> None:
        request = DsMessage.head_of(frame.payload)
        if not isinstance(error, (PenstockError, OSError)):
            log.error("%s: a request failed", self.connection.peer, exc_info=error)
        socket_id, reply = service.failure(request, error)
        log.info("%s: request %d: %s", self.connection.peer, request.type, error)
        self._reply(frame, socket_id, reply, is_error=True)

    def _reply(
        self, frame: Frame, id: int, answer: DsMessage | Encoded, *, is_error: bool = False
    ) -> None:
        self.counts.replies += 1
        if is_error or (isinstance(answer, DsMessage) and _is_refusal(answer)):
            self.counts.errors += 1
        self._send(id, answer, is_tunnelled=frame.is_tunnelled)

    def _send(self, id: int, answer: DsMessage | Encoded, *, is_tunnelled: bool = False) -> None:
        payload = answer.to_bytes() if isinstance(answer, DsMessage) else answer
        self._seq += 1
        self.counts.bytes_out += len(payload)
        header = encode_header(id, self._seq, len(payload))
        front = HTTP_REPLY + header if is_tunnelled else header
        if len(payload) > _LARGE:
            self.connection.send(front, payload)
        else:
            self.connection.send(front + payload)

    def _answer_status(self, frame: Frame, request: DsMessage) -> bool:
        self.counts.pings += 1
        if request.type == StatusRequest.SHUTDOWN:
            if not self._server.options.allow_shutdown:
                log.warning("%s: wants to stop the server, and may not", self.connection.peer)
                self.counts.unanswered += 1
                return False
            log.warning("%s: stops the server", self.connection.peer)
            self._server.stop_requested.set()
        self._reply(frame, 0, _status_reply(request, self._server.client_count()))
        return True

    def close(self) -> None:
        self._server.hold(-self._held)
        self._held = 0
        service, self._service = self._service, None
        if service is not None:
            try:
                service.close()
            except (PenstockError, OSError) as error:
                log.warning("%s: closing: %s", self.connection.peer, error)
        self._server.leave(self)


# --- all clients --------------------------------------------------------------------------------

#: A client that receives no reply data for this long (seconds) is disconnected.
_STALLED: Final = 30.0


class DsServer(Closable):
    """A server of one service. Serves from construction until `close`."""

    def __init__(
        self,
        options: ServingOptions,
        new_service: Callable[[Connection], Service],
        *,
        grants: str = "read and write",
    ) -> None:
        """Start to listen.

        :param new_service: creates the service for a client
        :param grants: what every client may do, for a warning.
        :raises StorageError: the address is in use.
        """
        self.options = options
        self.new_service = new_service
        #: Set when a client that is allowed to requests the stop.
        self.stop_requested = threading.Event()
        self._grants = grants
        self._lock = threading.Lock()
        self._sessions: set[DsSession] = set()
        self._past = Counts()
        #: Bytes of incomplete requests.
        self.held = 0
        keep_memory()
        self._server = Server(
            "lrose",
            listen_tcp(options.host, options.port),
            lambda connection: DsSession(connection, self),
            Limits(
                max_clients=options.max_clients,
                first_message=min(options.first_message, options.idle),
                idle=options.idle,
                stalled=min(_STALLED, options.idle),
                max_unsent=options.max_unsent,
            ),
            log=log,
            turn_away=lambda connection: DsSession(connection, self, is_one_too_many=True),
        )
        self._warn_if_open()
        self._server.start()

    def _warn_if_open(self) -> None:
        """Log a warning if other machines can connect: the protocol has no passwords."""
        if not all(is_loopback(str(each.getsockname()[0])) for each in self._server.sockets):
            log.warning(
                "%s is open to other machines: anybody who can reach it can %s, "
                "because the protocol has no passwords; a firewall can say who",
                self.address,
                self._grants,
            )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`, for messages."""
        host = self.options.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def client_count(self) -> int:
        return self._server.statistics().open

    @property
    def unsent(self) -> int:
        """Bytes of replies that clients have not received yet."""
        return self._server.statistics().unsent

    def enter(self, session: DsSession) -> None:
        """Include a session in the statistics."""
        with self._lock:
            self._sessions.add(session)

    def leave(self, session: DsSession) -> None:
        """Keep the counts of a session that is over."""
        with self._lock:
            if session in self._sessions:
                self._sessions.remove(session)
                self._past.add(session.counts)

    def hold(self, change: int) -> int:
        """Add `change` to the bytes of incomplete requests; return their sum."""
        with self._lock:
            self.held += change
            return self.held

    def statistics(self) -> ServerStatistics:
        counts = Counts()
        books = self._server.statistics()
        with self._lock:
            counts.add(self._past)
            for session in self._sessions:
                counts.add(session.counts)
        return ServerStatistics(
            clients=books.open,
            clients_seen=books.accepted - sum(books.refused.values()),
            clients_denied=sum(books.refused.values()),
            clients_timed_out=books.ended[End.TIMED_OUT] + books.ended[End.CROWDED_OUT],
            clients_malformed=books.ended[End.MALFORMED],
            clients_behind=books.ended[End.BEHIND],
            **asdict(counts),
        )

    def close(self) -> None:
        """Stop: accept no clients, and answer requests under way for a while. Idempotent."""
        self._server.stop()
