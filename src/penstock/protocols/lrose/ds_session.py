"""How is one of LROSE's clients served, whatever the service?"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
from penstock.protocols.lrose.sessions import Counts, is_refusal
from penstock.protocols.lrose.sku import HEADER_SIZE, HTTP_REPLY, Decoder, Frame, encode_header
from penstock.protocols.server import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType

    from penstock.protocols.connection import Connection
    from penstock.protocols.lrose.serving import DsServer
    from penstock.protocols.lrose.sessions import Answer, Encoded, Service

    _Glance: TypeAlias = Callable[[bytearray, int, int], bytes | None]

__all__ = ["DsSession"]

log = logging.getLogger(__name__)

#: A client that says nothing for so long (seconds) has no thread any more, until it does.
_LINGER: Final = 1.0
#: A request may take longer than others by its size at so many bytes a second.
_SLOWEST: Final = 1 << 14
#: Of a request that lacks more bytes than these, a part is of no use.
_MUCH: Final = 1 << 12
#: A reply above so many bytes is many packets anyway: it is not copied to be put behind its header.
_LARGE: Final = 1 << 16


class DsSession(Session):
    """One connection. One request at a time; those behind it wait in the socket."""

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
        #: Bytes of a request that is half there, and when its first came.
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
        """Show a service all that came; False: it has done nothing."""
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
        """Carry out the requests that are whole by now; False: the conversation is over."""
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
        """Count what has come of half a request, and give it time.

        LROSE's clients write a request in three pieces, and send none before the last one is
        acknowledged, for which the kernel takes 40 ms. It does so at once for a while only, so it
        is told each time. A request that comes whole has its acknowledgement in the reply.
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
        """Say what is wrong with what came: nothing behind it can be made out."""
        self._send(0, error_reply(0, -1, ErrorCode.BAD_MESSAGE, str(fault)))
        return fault

    # --- requests ---------------------------------------------------------------------------

    def _carry_out(self, frame: Frame) -> bool:
        """Answer a request; False: the conversation is over."""
        payload = frame.payload
        self.counts.bytes_in += len(payload)
        service = self._service
        if service is not None and self._shortcut is not None:
            # What comes often is not taken apart twice.
            answer = self._attempt(service, frame, self._shortcut, payload)
            if answer is not ...:
                return answer
        try:
            request = DsMessage.from_bytes(payload)
        except Malformed as fault:
            self._reply(frame, 0, error_reply(0, -1, ErrorCode.BAD_MESSAGE, str(fault)))
            raise
        if request.category == Category.SERVER_STATUS:
            return self._answer_status(frame, request)
        if self._is_one_too_many:
            text = f"the server has {self._server.options.max_clients} clients, and takes no more"
            self._reply(frame, 0, error_reply(request.type, -1, ErrorCode.SERVICE_DENIED, text))
            return False
        if not is_known_category(request.category):
            text = f"there is no category {request.category}"
            self._reply(frame, 0, error_reply(request.type, -1, ErrorCode.BAD_MESSAGE, text))
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
        """Carry out a request; `...` if the service wants it in its other form."""
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
        if is_error or (isinstance(answer, DsMessage) and is_refusal(answer)):
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
        self._reply(frame, 0, status_reply(request, self._server.client_count()))
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
