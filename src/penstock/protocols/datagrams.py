"""How do datagrams come and go by batches, so that none is lost without a count?"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.closing import Closable
from penstock.protocols._datagrams import SO_RXQ_OVFL, Batches
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = ["Address", "DatagramSocket", "DatagramStatistics", "Datagrams"]

#: (host, port), with two numbers more for IPv6; the path of a Unix socket; None of one without a
#: path, and of the other end of a connected socket.
Address: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | str | None

#: The most that a datagram of IP carries, and a bit.
LARGEST: Final = 1 << 16
#: What the kernel is asked to hold; it gives less where it may not.
_ROOM: Final = 32 << 20
#: Linux's; Python has no name for them.
_SO_RCVBUFFORCE: Final = 33


class Datagrams(NamedTuple):
    """What one call received."""

    #: Those that came whole: the payload, and who sent it.
    whole: list[tuple[bytes, Address]]
    #: Those larger than the socket's limit: what there was room for, who sent it, the true size.
    cut: list[tuple[bytes, Address, int]]

    def __bool__(self) -> bool:
        return bool(self.whole or self.cut)


class DatagramStatistics(NamedTuple):
    """Books of a socket. What reached the machine for it was received, cut, or dropped."""

    #: Datagrams that came whole, and their bytes.
    received: int
    bytes_in: int
    #: Datagrams that were larger than the limit.
    cut: int
    #: Datagrams that the kernel dropped, because nobody had taken those before them. It says so
    #: with the next one that comes.
    dropped: int
    #: Datagrams that the kernel took from us, and their bytes.
    sent: int
    bytes_out: int


class DatagramSocket(Closable):
    """A UDP or Unix datagram socket. One thread may receive while any others send."""

    def __init__(self, sock: socket.socket, *, batch: int = 256, largest: int = LARGEST) -> None:
        """Take over a socket; up to `batch` datagrams of `largest` bytes pass in one call."""
        self.socket = sock
        sock.setblocking(False)
        # The first is allowed to an administrator only, and knows no limit.
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _ROOM)
                break
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        self._batch = batch
        self._incoming = Batches(batch, largest)
        self._outgoing = Batches(batch, 1)  # it has no use for the room
        self._sending = threading.Lock()
        self._received = self._bytes_in = self._cut = self._sent = self._bytes_out = 0

    @classmethod
    def bind(
        cls, host: str, port: int, *, batch: int = 256, largest: int = LARGEST
    ) -> DatagramSocket:
        """Hear what is sent to an address; port 0 takes any that is free.

        :raises StorageError: the address cannot be had.
        """
        with storage_errors("listening on", f"{host}:{port}"):
            found = socket.getaddrinfo(
                host.strip("[]") or None, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(found[0], socket.SOCK_DGRAM)
            try:
                sock.bind(found[4])
                return cls(sock, batch=batch, largest=largest)
            except BaseException:
                sock.close()
                raise

    @classmethod
    def connect(cls, host: str, port: int, *, batch: int = 256) -> DatagramSocket:
        """Speak with one peer; None is its address.

        :raises OSError: there is no way to it.
        """
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        sock = socket.socket(found[0], socket.SOCK_DGRAM)
        try:
            sock.connect(found[4])
            return cls(sock, batch=batch)
        except BaseException:
            sock.close()
            raise

    @property
    def port(self) -> int:
        number: int = self.socket.getsockname()[1]
        return number

    def receive(self, limit: int | None = None, timeout: float | None = None) -> Datagrams:
        """Return what has come, up to so many; wait so many seconds for the first.

        :raises OSError: a connected peer is not there, or the socket was closed.
        """
        whole, cut = self._incoming.receive(self.socket.fileno(), limit or self._batch, timeout)
        self._received += len(whole)
        self._bytes_in += sum(len(payload) for payload, _ in whole)
        self._cut += len(cut)
        return Datagrams(whole, cut)

    def send(
        self, datagrams: Sequence[tuple[Buffer, Address]], timeout: float | None = None
    ) -> int:
        """Send in this order, and return how many the kernel took in so many seconds.

        :raises OSError: the first cannot be sent: it is too large, or there is no way to its peer.
            One further back ends the count, and is told of when it is the first.
        """
        with self._sending:
            taken = self._outgoing.send(self.socket.fileno(), datagrams, timeout)
            self._sent += taken
            self._bytes_out += sum(len(memoryview(payload)) for payload, _ in datagrams[:taken])
        return taken

    def statistics(self) -> DatagramStatistics:
        return DatagramStatistics(
            self._received,
            self._bytes_in,
            self._cut,
            self._incoming.dropped,
            self._sent,
            self._bytes_out,
        )

    def close(self) -> None:
        self.socket.close()
