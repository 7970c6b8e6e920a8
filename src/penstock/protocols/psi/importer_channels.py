"""How does an importer reach an exporter's messages: by TCP, UDP or a named pipe?"""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed
from penstock.protocols.psi.chunks import Chunker, Unchunker
from penstock.protocols.psi.envelope import MessageDecoder, PsiMessage, decode_message
from penstock.protocols.psi.handshake import (
    ServerHello,
    Transport,
    encode_session_id,
    pipe_path,
)
from penstock.protocols.psi.serving import hang_up, is_readable, tune

if TYPE_CHECKING:
    from penstock.protocols.psi.chunks import UnchunkerStatistics
    from penstock.protocols.psi.options import ImporterOptions

__all__ = ["DataChannel", "DatagramChannel", "StreamChannel", "open_channel"]

_RECEIVED_AT_ONCE: Final = 1 << 18
_LARGEST_DATAGRAM: Final = 65536
#: What the kernel is asked to hold of datagrams; it may give less.
_RECEIVE_BUFFER: Final = 8 << 20
#: Linux's; Python has no name for it.
_SO_RCVBUFFORCE: Final = 33
#: While nothing comes, a caller gets control back this often (seconds).
_PATIENCE: Final = 0.1
#: The id of a session may be lost on its way: it is sent again so often, so far apart (seconds).
_HELLOS: Final = 5
_BETWEEN_HELLOS: Final = 1.0
_TAKEN_AT_ONCE: Final = 256
#: Where fewer bytes than these come more often than so (seconds), they are gathered for a moment.
_LITTLE: Final = 1 << 15
_OFTEN: Final = 0.002
_GATHERING: Final = 0.001


class DataChannel(ABC):
    """Messages from an exporter."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        #: Bytes that came.
        self.bytes = 0

    @abstractmethod
    def receive(self) -> list[PsiMessage] | None:
        """Return what has come, possibly nothing after a moment; None at the end.

        :raises Malformed: what came is no psi.
        :raises OSError: the connection broke.
        """

    def close(self) -> None:
        hang_up(self._socket)


class StreamChannel(DataChannel):
    """A TCP connection, or a named pipe."""

    def __init__(self, sock: socket.socket, hello: ServerHello, max_message: int) -> None:
        super().__init__(sock)
        self._decoder = MessageDecoder(max_message)
        self._came_at = 0.0
        #: Little comes each time, and often.
        self._is_dripping = False
        sock.sendall(encode_session_id(hello.session))
        sock.settimeout(_PATIENCE)

    def receive(self) -> list[PsiMessage] | None:
        if self._decoder.fault is not None:
            raise self._decoder.fault
        if self._is_dripping:
            # psi sends each message by itself: to wake up for each takes the processor from it.
            time.sleep(_GATHERING)
        try:
            data = self._socket.recv(_RECEIVED_AT_ONCE)
        except TimeoutError:
            self._is_dripping = False
            return []
        self.bytes += len(data)
        now = time.monotonic()
        self._is_dripping = len(data) < _LITTLE and now - self._came_at < _OFTEN
        self._came_at = now
        return self._decoder.feed(data) if data else None


class DatagramChannel(DataChannel):
    """Datagrams; what is lost of them is counted."""

    def __init__(self, sock: socket.socket, hello: ServerHello, max_message: int) -> None:
        super().__init__(sock)
        self._hello = hello
        self._max_message = max_message
        self._unchunker = Unchunker(max_message)
        #: Datagrams that made no message.
        self.malformed = 0
        self._hellos = 0
        self._next_hello = 0.0
        sock.setblocking(False)
        self._say_hello()

    def _say_hello(self) -> None:
        if self._hellos >= _HELLOS or time.monotonic() < self._next_hello:
            return
        self._hellos += 1
        self._next_hello = time.monotonic() + _BETWEEN_HELLOS
        for datagram in Chunker().split(encode_session_id(self._hello.session)):
            self._socket.send(datagram)

    def receive(self) -> list[PsiMessage] | None:
        messages: list[PsiMessage] = []
        if not is_readable(self._socket, _PATIENCE) and not self.bytes:
            self._say_hello()
        while len(messages) < _TAKEN_AT_ONCE:
            try:
                datagram = self._socket.recv(_LARGEST_DATAGRAM)
            except BlockingIOError:
                break
            self.bytes += len(datagram)
            self._take(datagram, messages)
        return messages

    def _take(self, datagram: bytes, messages: list[PsiMessage]) -> None:
        data = self._unchunker.feed(datagram)
        if data is not None:
            try:
                messages.append(decode_message(data, self._max_message))
            except Malformed:
                self.malformed += 1

    def statistics(self) -> UnchunkerStatistics:
        return self._unchunker.statistics()


def open_channel(host: str, hello: ServerHello, options: ImporterOptions) -> DataChannel:
    """Connect to where an exporter says that its messages are.

    :raises OSError: it cannot be reached.
    """
    limit = options.max_message
    timeout = options.connect_timeout
    if hello.transport is Transport.UDP:
        found = socket.getaddrinfo(host, hello.port, type=socket.SOCK_DGRAM)[0]
        sock = socket.socket(found[0], socket.SOCK_DGRAM)
        # The first is allowed to an administrator only, and has no limit.
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BUFFER)
                break
        return _made(sock, found[4], hello, limit, DatagramChannel)
    if hello.transport is Transport.NAMED_PIPES:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        return _made(sock, pipe_path(hello.pipe or "", options.pipe_folder), hello, limit)
    sock = socket.create_connection((host, hello.port or 0), timeout)
    tune(sock)
    return _made(sock, None, hello, limit)


def _made(
    sock: socket.socket,
    address: object,
    hello: ServerHello,
    limit: int,
    kind: type[StreamChannel | DatagramChannel] = StreamChannel,
) -> DataChannel:
    try:
        if address is not None:
            sock.connect(address)  # type: ignore[arg-type] # of its family
        return kind(sock, hello, limit)
    except BaseException:
        sock.close()
        raise
