"""How is one connection of a client served, so that it cannot hold up the others?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from penstock.core.errors import Malformed, PenstockError
from penstock.protocols.lrose.ds_message import (
    Category,
    DsMessage,
    ErrorCode,
    StatusRequest,
    error_reply,
    is_known_category,
)
from penstock.protocols.lrose.pings import status_reply
from penstock.protocols.lrose.sessions import is_refusal
from penstock.protocols.lrose.sku import HEADER_SIZE, HTTP_REPLY, Decoder, Frame, encode_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import EllipsisType

    from penstock.protocols.lrose.sessions import (
        Answer,
        Encoded,
        ServerStatistics,
        ServingOptions,
        Session,
    )

    _Glance: TypeAlias = Callable[[bytearray, int, int, float], bytes | None]

__all__ = ["Host", "ServedClient"]

log = logging.getLogger(__name__)

#: Who does not take a reply for so long (seconds) is cut off.
_STALLED: Final = 30.0
#: Seconds that a client beyond the limit has to say what it wants.
_DENIED_PATIENCE: Final = 5.0
#: Bytes that a client has not taken yet: above it no more of its requests are looked at.
_UNSENT: Final = 1 << 16
#: A request may take longer than others by its size at so many bytes a second.
_SLOWEST: Final = 1 << 14
#: A reply above so many bytes is many packets anyway: it is not copied to be put behind its header.
_LARGE: Final = 1 << 16


class Host(Protocol):
    """The server, as one of its clients sees it."""

    options: ServingOptions
    counts: ServerStatistics
    #: Bytes of requests that have not come to their end, of all clients.
    held: int
    #: Clients that do not take their replies just now.
    behind: set[ServedClient]
    new_session: Callable[[str], Session]
    stop_requested: asyncio.Event

    def now(self) -> float: ...
    def admit(self, client: ServedClient, /) -> None: ...
    def release(self, client: ServedClient, /) -> None: ...
    def client_count(self) -> int: ...
    def limit_unsent(self) -> None: ...


class ServedClient(asyncio.BufferedProtocol):
    """One connection. One request at a time; those behind it wait in the socket."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._counts = server.counts
        self._now = server.now
        self._decoder = Decoder(server.options.max_message, allow_http=True)
        self._waiting: deque[Frame] = deque()
        self._session: Session | None = None
        self._shortcut: Callable[[bytes], Answer | Awaitable[Answer] | EllipsisType] | None = None
        self._glance: _Glance | None = None
        self._task: asyncio.Task[None] | None = None
        self._seq = 0
        self._held = 0
        self._has_spoken = False
        self._is_closing = False
        self._is_paused = False
        self._stalled_since: float | None = None
        self.is_denied = False
        self.name = "?"

    # --- what asyncio tells -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_UNSENT)
        peer = transport.get_extra_info("peername")
        self.name = ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else str(peer)
        self._socket: socket.socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        #: When it came, when its last bytes came, and the first of the request that is half there;
        #: before the first request that is when it came, too.
        self._came = self._heard = self._begun = self._server.now()
        self._server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._is_closing = True
        self._counts.unanswered += len(self._waiting)
        self._waiting.clear()
        self._server.held -= self._held
        self._held = 0
        if self._task is not None:
            self._task.cancel()
        elif self._session is not None:
            self._close_session()
        self._server.release(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._decoder.room()

    def buffer_updated(self, nbytes: int) -> None:
        now = self._heard = self._now()
        if (
            self._glance is not None
            and self._task is None
            and not self._waiting
            and not self._is_paused
            and not self._is_closing
            and (buffer := self._decoder.glance()) is not None
            and (reply := self._glance(buffer, nbytes, self._seq + 1, now)) is not None
        ):
            self._transport.write(reply)
            # The client is at work again by now.
            self._seq += 1
            counts = self._counts
            counts.requests += 1
            counts.replies += 1
            counts.bytes_in += nbytes - HEADER_SIZE
            counts.bytes_out += len(reply) - HEADER_SIZE
            return
        try:
            frames = self._decoder.took(nbytes)
        except Malformed as fault:
            self._refuse_bytes(fault)
            return
        if self._held or not frames or self._decoder.held:
            if self._decoder.held:
                self._ask_for_the_rest()
            self._count_held(is_next=bool(frames))
        if frames:
            self._has_spoken = True
            self._counts.requests += len(frames)
            self._waiting.extend(frames)
            self._work()

    def _ask_for_the_rest(self) -> None:
        """Acknowledge half a request at once.

        LROSE's clients write a request in three pieces, and send none before the last one is
        acknowledged, for which the kernel takes 40 ms. It does so at once for a while only, so it
        is told each time. A request that comes whole has its acknowledgement in the reply.
        """
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def eof_received(self) -> bool:
        # It may still read: what is under way is answered first.
        if self._task is None and not self._waiting:
            return False
        self._is_closing = True
        return True

    def pause_writing(self) -> None:
        self._is_paused = True
        self._stalled_since = self._server.now()
        self._server.behind.add(self)
        self._server.limit_unsent()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._stalled_since = None
        self._server.behind.discard(self)
        self._wait_anew()
        self._work()

    # --- limits -----------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes of replies that it has not taken."""
        return self._transport.get_write_buffer_size()

    def _wait_anew(self) -> None:
        """Begin to wait for what comes next: until now it waited for us."""
        self._heard = self._begun = self._server.now()

    def _count_held(self, *, is_next: bool) -> None:
        held = self._decoder.held
        if is_next or (self._has_spoken and not self._held):
            self._begun = self._heard
        self._server.held += held - self._held
        self._held = held
        if self._server.held > self._server.options.max_held:
            self._refuse_bytes(Malformed("requests under way", "bytes", "fewer", self._server.held))

    def _refuse_bytes(self, fault: Malformed) -> None:
        """Say what is wrong with what came, and hang up: nothing behind it can be made out."""
        log.warning("%s: %s", self.name, fault)
        self._counts.clients_malformed += 1
        self._send(0, error_reply(0, -1, ErrorCode.BAD_MESSAGE, str(fault)))
        self.hang_up()

    def look(self, now: float) -> None:
        """Cut off a client that has been silent, or deaf, for too long."""
        options = self._server.options
        silent = now - self._heard
        is_closing = self._transport.is_closing()
        if self.is_denied:
            is_over = now - self._came > min(_DENIED_PATIENCE, options.first_message)
        elif self._stalled_since is not None:
            is_over = now - self._stalled_since > min(_STALLED, options.idle)
        elif self._task is not None:
            is_over = False  # it waits for us
        elif is_closing:
            is_over = silent > min(_STALLED, options.idle)
        elif self._held or not self._has_spoken:
            patience = min(options.first_message, options.idle)
            is_late = now - self._begun > patience + self._held / _SLOWEST
            is_over = is_late or silent > patience
        else:
            is_over = silent > options.idle
        # One that is closing is gone at once, unless there is something that it does not take.
        if is_over and not (is_closing and not self.unsent):
            self._counts.clients_timed_out += not self.is_denied
            self.cut_off(f"{silent:.0f} s of silence, or of half a request")

    def cut_off(self, reason: str) -> None:
        """End the connection now, whatever has not been sent."""
        log.info("%s: cut off: %s", self.name, reason)
        self._transport.abort()

    def hang_up(self) -> None:
        """Close the connection when all that was said is sent."""
        self._is_closing = True
        self._counts.unanswered += len(self._waiting)
        self._waiting.clear()
        self._transport.close()

    async def leave(self) -> None:
        """End what is under way, because the server stops."""
        task = self._task
        self._transport.abort()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # --- requests ---------------------------------------------------------------------------

    def _work(self) -> None:
        """Carry out what is waiting, as far as that can be done at once."""
        while self._waiting and self._task is None and not self._is_paused:
            self._begin(self._waiting.popleft())
            if self._transport.is_closing():
                return
        must_wait = bool(self._waiting) or self._task is not None
        if must_wait:
            self._transport.pause_reading()
            return
        if self._decoder.fault is not None:
            self._refuse_bytes(self._decoder.fault)
        elif self._is_closing:
            self._transport.close()
        else:
            self._transport.resume_reading()

    def _begin(self, frame: Frame) -> None:
        payload = frame.payload
        self._counts.bytes_in += len(payload)
        session = self._session
        if (
            self._shortcut is not None  # what comes often is not taken apart twice
            and session is not None
            and self._attempt(session, frame, self._shortcut, payload)
        ):
            return
        try:
            request = DsMessage.from_bytes(payload)
        except Malformed as fault:
            self._counts.clients_malformed += 1
            self._reply(frame, 0, error_reply(0, -1, ErrorCode.BAD_MESSAGE, str(fault)))
            self.hang_up()
            return
        if request.category == Category.SERVER_STATUS:
            self._answer_status(frame, request)
        elif self.is_denied:
            text = f"the server has {self._server.options.max_clients} clients, and takes no more"
            self._reply(frame, 0, error_reply(request.type, -1, ErrorCode.SERVICE_DENIED, text))
            self.hang_up()
        elif not is_known_category(request.category):
            text = f"there is no category {request.category}"
            self._reply(frame, 0, error_reply(request.type, -1, ErrorCode.BAD_MESSAGE, text))
        else:
            self._hand_over(frame, request)

    def _hand_over(self, frame: Frame, request: DsMessage) -> None:
        session = self._session
        if session is None:
            session = self._session = self._server.new_session(self.name)
            self._shortcut = getattr(session, "handle_payload", None)
            self._glance = getattr(session, "handle_frame", None)
        self._attempt(session, frame, session.handle, request)

    def _attempt(
        self,
        session: Session,
        frame: Frame,
        call: Callable[[Any], Answer | Awaitable[Answer] | EllipsisType],
        request: DsMessage | bytes,
    ) -> bool:
        """Carry out a request; False if the session wants it in its other form."""
        try:
            answer = call(request)
        except Exception as error:  # noqa: BLE001 - it is told to the client
            self._fail(session, frame, error)
        else:
            if answer is ...:
                return False
            if answer is None or isinstance(answer, (bytes, bytearray, DsMessage)):
                self._give(session, frame, answer)
            else:
                self._task = asyncio.create_task(self._finish(session, frame, answer))
        return True

    async def _finish(self, session: Session, frame: Frame, answer: Awaitable[Answer]) -> None:
        """Wait for what takes time, answer it, and go on with what came meanwhile."""
        is_answered = False
        try:
            try:
                reply = await answer
            except Exception as error:  # noqa: BLE001 - it is told to the client
                self._fail(session, frame, error)
            else:
                self._give(session, frame, reply)
            is_answered = True
        finally:
            self._task = None
            if not is_answered:
                self._counts.unanswered += 1
            if self._transport.is_closing():
                self._close_session()
        self._wait_anew()
        if not self._transport.is_closing():
            self._work()

    def _give(self, session: Session, frame: Frame, answer: Answer) -> None:
        if answer is None:
            self._counts.unanswered += 1
        else:
            self._reply(frame, session.socket_id, answer)
        if session.is_over:
            self.hang_up()

    def _fail(self, session: Session, frame: Frame, error: Exception) -> None:
        request = DsMessage.head_of(frame.payload)
        if not isinstance(error, (PenstockError, OSError)):
            log.error("%s: a request failed", self.name, exc_info=error)
        socket_id, reply = session.failure(request, error)
        log.info("%s: request %d: %s", self.name, request.type, error)
        self._reply(frame, socket_id, reply, is_error=True)
        if session.is_over:
            self.hang_up()

    def _reply(
        self, frame: Frame, id: int, answer: DsMessage | Encoded, *, is_error: bool = False
    ) -> None:
        self._counts.replies += 1
        if is_error or (isinstance(answer, DsMessage) and is_refusal(answer)):
            self._counts.errors += 1
        self._send(id, answer, is_tunnelled=frame.is_tunnelled)

    def _send(self, id: int, answer: DsMessage | Encoded, *, is_tunnelled: bool = False) -> None:
        if self._transport.is_closing():
            return
        payload = answer.to_bytes() if isinstance(answer, DsMessage) else answer
        self._seq += 1
        self._counts.bytes_out += len(payload)
        header = encode_header(id, self._seq, len(payload))
        front = HTTP_REPLY + header if is_tunnelled else header
        if len(payload) > _LARGE:
            self._transport.write(front)
            self._transport.write(payload)
        else:
            self._transport.write(front + payload)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except (PenstockError, OSError) as error:
                log.warning("%s: closing: %s", self.name, error)

    def _answer_status(self, frame: Frame, request: DsMessage) -> None:
        self._counts.pings += 1
        if request.type == StatusRequest.SHUTDOWN:
            if not self._server.options.allow_shutdown:
                log.warning("%s: wants to stop the server, and may not", self.name)
                self._counts.unanswered += 1
                self.hang_up()
                return
            log.warning("%s: stops the server", self.name)
            self._server.stop_requested.set()
        self._reply(frame, 0, status_reply(request, self._server.client_count()))
