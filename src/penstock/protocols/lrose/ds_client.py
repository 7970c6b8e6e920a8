"""How does a client talk to one of LROSE's servers, or to one of ours?"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.core.errors import ConnectionLost, Malformed, PenstockError
from penstock.core.interfaces import Closable
from penstock.protocols.lrose.ds_message import (
    Category,
    CommonPart,
    DsMessage,
    ErrorCode,
    StatusRequest,
)
from penstock.protocols.lrose.sku import Decoder, Frame, encode_header, keep_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MAX_BYTES", "PING_TIMEOUT", "Connection", "RequestRefused", "client_count", "ping"]


class RequestRefused(PenstockError):
    """The server answered with an error."""

    def __init__(
        self, server: str, code: int, text: str | None, *, hint: str | None = None
    ) -> None:
        said = " ".join(text.split()) if text else f"error {code & 0xFFFFFFFF:#x}"
        super().__init__(f"{server} refused: {said}", hint=hint)
        self.server = server
        #: `DsMessage.error`: -1, or one of `ErrorCode`.
        self.code = code
        #: The server's error text, if any.
        self.text = text


#: Default limit of bytes of a reply.
MAX_BYTES: Final = 64 << 20
#: Seconds to wait for the answer to a ping (docs/specs/lrose.md 2.4).
PING_TIMEOUT: Final = 10.0
#: Least timeout in seconds; 0 would mean no timeout to the system.
_SHORTEST: Final = 0.001
_TIMEVAL: Final = struct.Struct("ll")
#: Larger payloads are sent without being copied behind their header.
_LARGE: Final = 1 << 15

T = TypeVar("T")


class Connection(Closable):
    """One connection: a request, then its reply. Not safe to share between threads.

    It is closed after an error, since a late reply could be taken for the next one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout: float = 10.0,
        timeout: float = 30.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        #: `host:port`, for messages.
        self.server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.timeout = timeout
        #: Whether all bytes of the last request were sent: it may have been executed.
        self.is_sent = False
        #: LROSE's servers send a reply in three pieces, and wait for an ACK before the next. Ours
        #: do not, and then ACKs of their own only cost time.
        self.quick_ack = True
        #: The number of the frame that was sent last.
        self.seq = 0
        self._decoder = Decoder(max_bytes, allow_http=True)
        self._frames: deque[Frame] = deque()
        self._patience = -1.0
        keep_memory()
        try:
            self._socket = socket.create_connection((host, port), max(connect_timeout, _SHORTEST))
        except OSError as error:
            raise self._lost(error) from error
        # Blocking, with the system's own timers: a timeout of Python's costs a poll each time.
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*_timeval(timeout))
        )

    def call(self, id: int, request: DsMessage, timeout: float | None = None) -> DsMessage:
        """Send a request, and return the reply, also if it reports an error.

        :raises ConnectionLost: the connection broke, or no answer came in time.
        :raises Malformed: the answer is not valid.
        """
        return DsMessage.from_bytes(self.exchange(id, request.to_bytes(), timeout).payload)

    def ask(self, id: int, request: DsMessage, timeout: float | None = None) -> DsMessage:
        """Send a request, and return the reply; raise an error that it reports.

        :raises RequestRefused: the server reports an error.
        """
        reply = self.call(id, request, timeout)
        if reply.error:
            raise self.refusal(reply)
        return reply

    def refusal(self, reply: DsMessage) -> RequestRefused:
        """Return the error that a reply reports."""
        hint = None
        if reply.error == ErrorCode.SERVICE_DENIED:
            hint = "the server has as many clients as it takes: try again later"
        return RequestRefused(self.server, reply.error, reply.error_text, hint=hint)

    def exchange(self, id: int, payload: bytes, timeout: float | None = None) -> Frame:
        """Send a payload in a frame, and return the frame of the reply."""
        try:
            self.send(id, payload)
            return self.receive(timeout)
        except BaseException:
            self.close()  # also after Ctrl-C: the reply would be taken for that of the next one
            raise

    def send(self, id: int, payload: bytes) -> None:
        """Send a payload in a frame, in one piece."""
        header = encode_header(id, self.seq + 1, len(payload))
        if len(payload) > _LARGE:
            self._send(header, payload)
        else:
            self._send(header + payload)

    def send_all(self, id: int, payloads: Sequence[bytes]) -> None:
        """Send payloads, each in a frame, in one piece."""
        first = self.seq + 1
        self._send(
            b"".join(
                encode_header(id, seq, len(payload)) + payload
                for seq, payload in enumerate(payloads, first)
            )
        )
        self.seq = first + len(payloads) - 1

    def exchange_frame(self, frame: bytes, read: Callable[[bytearray, int], T | None]) -> T | Frame:
        """Send a frame with the next number; return `read` of the reply's bytes.

        If that is None, or the reply came in several pieces, return the reply as a frame.
        """
        self.seq += 1
        self.is_sent = False
        try:
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise self._lost(error) from error
            self.is_sent = True
            buffer = self._decoder.glance()
            if buffer is None or self._frames or self.quick_ack or self._patience != self.timeout:
                return self.receive()
            try:
                count = self._socket.recv_into(buffer)
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            except OSError as error:
                raise self._unanswered(error, self.timeout) from error
            found = read(buffer, count)
            if found is not None:
                return found
            self._frames.extend(self._decoder.took(count))
            return self.receive()
        except BaseException:
            self.close()  # as in `exchange`
            raise

    def _send(self, data: bytes, more: bytes = b"") -> None:
        self.seq += 1
        self.is_sent = False
        try:
            if more:
                sent = self._socket.sendmsg((data, more))
                if sent < len(data) + len(more):
                    self._socket.sendall(data[sent:])
                    self._socket.sendall(memoryview(more)[max(sent - len(data), 0) :])
            else:
                self._socket.sendall(data)
        except OSError as error:
            self.close()
            raise self._lost(error) from error
        self.is_sent = True

    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame from the server."""
        if self._frames:
            return self._frames.popleft()
        patience = self.timeout if timeout is None else timeout
        try:
            frames = self._receive(patience)
        except OSError as error:
            self.close()
            raise self._unanswered(error, patience) from error
        except Malformed:
            self.close()
            raise
        if len(frames) > 1:
            self._frames.extend(frames[1:])
        return frames[0]

    def _unanswered(self, error: OSError, patience: float) -> ConnectionLost:
        if isinstance(error, BlockingIOError | TimeoutError):
            return ConnectionLost(self.server, f"no answer came in {patience:g} s")
        return self._lost(error)

    def _receive(self, patience: float) -> list[Frame]:
        sock = self._socket
        deadline = time.monotonic() + patience
        while True:
            if patience != self._patience:
                self._patience = patience
                timeval = _TIMEVAL.pack(*_timeval(patience))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            if self.quick_ack:
                # The kernel resets this option after a while. Without it, ACKs take 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            count = sock.recv_into(self._decoder.room())
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            if frames := self._decoder.took(count):
                return frames
            patience = deadline - time.monotonic()
            if patience <= 0:
                raise TimeoutError

    @property
    def is_alive(self) -> bool:
        """Whether the server has not closed the connection; a request would then be in doubt."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _lost(self, error: OSError) -> ConnectionLost:
        reason = error.strerror or str(error) or type(error).__name__
        if isinstance(error, BlockingIOError):
            reason = "it does not take what is sent"
        hint = None
        if isinstance(error, ConnectionRefusedError):
            hint = "start the server, or check host and port"
        elif isinstance(error, socket.gaierror):
            hint = "look at the name of the host"
        return ConnectionLost(self.server, reason, hint=hint)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _timeval(seconds: float) -> tuple[int, int]:
    whole = min(max(seconds, _SHORTEST), 1e9)
    return int(whole), int(whole % 1 * 1e6)


def ping(host: str, port: int, timeout: float | None = None) -> int | None:
    """Check that a server answers; return its process id, if the reply has it.

    :raises ConnectionLost: it does not.
    """
    return _status(host, port, StatusRequest.IS_ALIVE, timeout)


def client_count(host: str, port: int, timeout: float | None = None) -> int | None:
    """Return how many clients a server has.

    :raises ConnectionLost: it does not answer.
    """
    return _status(host, port, StatusRequest.CLIENT_COUNT, timeout)


def _status(host: str, port: int, request: int, timeout: float | None) -> int | None:
    patience = _ping_timeout() if timeout is None else timeout
    with Connection(host, port, connect_timeout=patience, timeout=patience) as connection:
        reply = connection.ask(0, DsMessage(request, category=Category.SERVER_STATUS))
    part = reply.part(CommonPart.INT)
    return None if part is None else part.number


def _ping_timeout() -> float:
    """Return the timeout of LROSE's own clients."""
    said = os.environ.get("DS_PING_TIMEOUT_MSECS", "")
    return int(said) / 1000 if said.isascii() and said.isdigit() else PING_TIMEOUT
