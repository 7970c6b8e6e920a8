"""How does an importer reach an exporter's messages: by TCP, UDP or a named pipe?"""

from __future__ import annotations

import logging
import socket
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed
from penstock.protocols.connection import hang_up, tune
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.psi.chunks import Chunker, Unchunker
from penstock.protocols.psi.envelope import MessageDecoder, PsiMessage, decode_message
from penstock.protocols.psi.handshake import (
    ServerHello,
    Transport,
    encode_session_id,
    pipe_path,
)

if TYPE_CHECKING:
    from penstock.protocols.psi.chunks import UnchunkerStatistics
    from penstock.protocols.psi.options import ImporterOptions

__all__ = ["DataChannel", "DatagramChannel", "StreamChannel", "open_channel"]

log = logging.getLogger(__name__)

_RECEIVED_AT_ONCE: Final = 1 << 18
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

    #: Bytes that came.
    bytes: int = 0

    @abstractmethod
    def receive(self) -> list[PsiMessage] | None:
        """Return what has come, possibly nothing after a moment; None at the end.

        :raises Malformed: what came is no psi.
        :raises OSError: the connection broke.
        """

    @abstractmethod
    def close(self) -> None:
        """End it, also for a thread that waits for it."""


class StreamChannel(DataChannel):
    """A TCP connection, or a named pipe."""

    def __init__(self, sock: socket.socket, hello: ServerHello, max_message: int) -> None:
        self._socket = sock
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

    def close(self) -> None:
        hang_up(self._socket)


class DatagramChannel(DataChannel):
    """Datagrams; what is lost of them is counted."""

    def __init__(self, sock: DatagramSocket, hello: ServerHello, max_message: int) -> None:
        self._socket = sock
        self._hello = hello
        self._max_message = max_message
        self._unchunker = Unchunker(max_message)
        #: Datagrams that made no message.
        self.malformed = 0
        self._hellos = 0
        self._next_hello = 0.0
        self._say_hello()

    def _say_hello(self) -> None:
        if self._hellos >= _HELLOS or time.monotonic() < self._next_hello:
            return
        self._hellos += 1
        self._next_hello = time.monotonic() + _BETWEEN_HELLOS
        datagrams = Chunker().split(encode_session_id(self._hello.session))
        self._socket.send([(each, None) for each in datagrams], _PATIENCE)

    def receive(self) -> list[PsiMessage] | None:
        messages: list[PsiMessage] = []
        found = self._socket.receive(_TAKEN_AT_ONCE, _PATIENCE)
        if not found and not self.bytes:
            self._say_hello()
        self.malformed += len(found.cut)
        for datagram, _ in found.whole:
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

    def close(self) -> None:
        if dropped := self._socket.statistics().dropped:
            log.warning(
                "this machine dropped %s datagrams of psi, because they came faster than they "
                "were read; what was in them is counted as lost",
                f"{dropped:,}",
            )
        self._socket.close()


def open_channel(host: str, hello: ServerHello, options: ImporterOptions) -> DataChannel:
    """Connect to where an exporter says that its messages are.

    :raises OSError: it cannot be reached.
    """
    limit = options.max_message
    timeout = options.connect_timeout
    if hello.transport is Transport.UDP:
        datagrams = DatagramSocket.connect(host, hello.port or 0)
        try:
            return DatagramChannel(datagrams, hello, limit)
        except BaseException:
            datagrams.close()
            raise
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
) -> DataChannel:
    try:
        if address is not None:
            sock.connect(address)  # type: ignore[arg-type] # of its family
        return StreamChannel(sock, hello, limit)
    except BaseException:
        sock.close()
        raise
