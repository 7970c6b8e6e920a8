"""How do datagrams come, are handled, and go by batches, so that none is lost without a count?"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.interfaces import Closable
from penstock.core.worker import Worker
from penstock.protocols._datagrams import SO_RXQ_OVFL, Batches
from penstock.protocols.host_port import check_port
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from typing_extensions import Buffer

__all__ = ["Address", "DatagramServer", "DatagramSocket", "DatagramStatistics", "Datagrams"]

#: (host, port), with two more numbers for IPv6; the path of a Unix socket; None for a Unix socket
#: without a path, and for the peer of a connected socket.
Address: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | str | None

#: A bit more than the largest IP datagram.
LARGEST: Final = 1 << 16
#: Requested size of the kernel's buffer; it may grant less.
_ROOM: Final = 32 << 20
#: Linux options that Python does not define.
_SO_RCVBUFFORCE: Final = 33
#: Interval (seconds) of `assist`: per byte of the kernel's buffer, a quarter of the time in which a
#: fast sender fills it; minimum and maximum.
_FILLED: Final = 0.25 * 4e-6 / 2304
_SHORTEST: Final = 0.000_25
_LONGEST: Final = 0.005
#: Seconds between two checks whether to stop.
_LOOK: Final = 0.2
#: The most bytes of buffered datagrams.
_WAITING: Final = 64 << 20
#: Seconds to handle the last datagrams, and for the threads to end.
_LAST: Final = 2.0


class Datagrams(NamedTuple):
    """Datagrams received by one call."""

    #: Complete ones: payload and sender.
    whole: list[tuple[bytes, Address]]
    #: Ones larger than the socket's limit: truncated payload, sender, true size.
    cut: list[tuple[bytes, Address, int]]

    def __bool__(self) -> bool:
        return bool(self.whole or self.cut)


class DatagramStatistics(NamedTuple):
    """Counters of a socket. A datagram that reached the machine was received, cut or dropped."""

    #: Complete datagrams, and their bytes.
    received: int
    bytes_in: int
    #: Datagrams that were larger than the limit.
    cut: int
    #: Datagrams that the kernel dropped, because its buffer was full.
    dropped: int
    #: Datagrams that the kernel accepted, and their bytes.
    sent: int
    bytes_out: int


class DatagramSocket(Closable):
    """A UDP or Unix datagram socket. One thread may receive while others send."""

    def __init__(self, sock: socket.socket, *, batch: int = 256, largest: int = LARGEST) -> None:
        """Take over a socket; one call handles up to `batch` datagrams of `largest` bytes."""
        self.socket = sock
        sock.setblocking(False)
        # The first needs root, and has no limit.
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _ROOM)
                break
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._between = min(max(room * _FILLED, _SHORTEST), _LONGEST)
        self._batch = batch
        self._incoming = Batches(batch, largest)
        self._outgoing = Batches(batch, 1)  # its buffer is not used
        self._sending = threading.Lock()
        self._sent = 0

    @classmethod
    def bind(
        cls, host: str, port: int, *, batch: int = 256, largest: int = LARGEST
    ) -> DatagramSocket:
        """Bind a socket to an address; port 0 picks a free one.

        :raises StorageError: the address is in use or not available.
        """
        check_port(host, port)
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
        """Connect a socket to one peer, whose address is then None.

        :raises OSError: there is no route to it.
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
        """Return up to `limit` datagrams; wait up to `timeout` seconds for the first.

        :raises OSError: a connected peer does not listen, or the socket was closed.
        """
        fd = self.socket.fileno()
        return Datagrams(*self._incoming.receive(fd, limit or self._batch, timeout))

    def take(self, most_bytes: int, seconds: float) -> Datagrams:
        """Return datagrams as `receive` does; move the others from the kernel to a buffer here.

        Beyond `most_bytes` in the buffer, they stay in the kernel.

        :raises OSError: as `receive`.
        """
        fd = self.socket.fileno()
        return Datagrams(*self._incoming.take(fd, self._batch, most_bytes, seconds))

    def assist(self, most_bytes: int, seconds: float) -> None:
        """Move datagrams from the kernel to the buffer while the thread that calls `take` is busy.

        :raises OSError: as `receive`.
        """
        self._incoming.assist(self.socket.fileno(), most_bytes, self._between, seconds)

    @property
    def waiting(self) -> int:
        """Buffered datagrams, for `take`."""
        return self._incoming.waiting

    def send(
        self, datagrams: Sequence[tuple[Buffer, Address]], timeout: float | None = None
    ) -> int:
        """Send in order; return how many the kernel accepted within `timeout` seconds.

        :raises OSError: the first cannot be sent: it is too large, or its peer has no route. For
            a later one, the call returns the count before it, and the next call raises.
        """
        with self._sending:
            taken = self._outgoing.send(self.socket.fileno(), datagrams, timeout)
            self._sent += taken
        return taken

    def send_columns(
        self,
        heads: pa.FixedSizeBinaryArray,
        payloads: pa.BinaryArray,
        address: Address,
        timeout: float | None = None,
    ) -> int:
        """Send datagrams of a header and a payload each, as `send` does, without a copy.

        :raises OSError: as `send`.
        """
        _, head_data = heads.buffers()
        _, offsets, data = payloads.buffers()
        width, count = heads.type.byte_width, len(payloads)
        places = memoryview(offsets)[4 * payloads.offset :].cast("i")
        with self._sending:
            taken = self._outgoing.send_columns(
                self.socket.fileno(),
                memoryview(head_data)[width * heads.offset :],
                width,
                places,
                data or b"",
                count,
                address,
                timeout,
            )
            self._sent += taken
        return taken

    def statistics(self) -> DatagramStatistics:
        self._ask_dropped()
        return DatagramStatistics(
            self._incoming.whole,
            self._incoming.bytes,
            self._incoming.cut,
            self._incoming.dropped,
            self._sent,
            self._outgoing.bytes,
        )

    def _ask_dropped(self) -> None:
        if (descriptor := self.socket.fileno()) >= 0:
            self._incoming.ask_dropped(descriptor)

    def close(self) -> None:
        self._ask_dropped()
        self.socket.close()


class DatagramServer(Closable):
    """Handles datagrams in batches, from `start` until `close`.

    The kernel's buffer may hold a hundred datagrams only. So it is emptied between two batches,
    and by a second thread during a long batch.
    """

    def __init__(
        self,
        name: str,
        sock: DatagramSocket,
        handle: Callable[[Datagrams], None],
        *,
        log: logging.Logger,
        waiting: int = _WAITING,
    ) -> None:
        """Take over the socket; `handle` gets each batch, and may reply through the socket.

        Exceptions of `handle` are logged, and the next batch follows.

        :param waiting: the most bytes of buffered datagrams
        """
        self.socket = sock
        self._handle = handle
        self._most_waiting = waiting
        #: Batches handled, and those for which `handle` raised.
        self.batches = self.failures = 0
        #: Datagrams of batches for which `handle` raised, and those not handled in time on `close`.
        self._failed = self._left = 0
        self._give_up_at = math.inf
        self._assistant = Worker(f"{name}-intake", self._assist, log=log, restart=True)
        self._worker = Worker(name, self._run, log=log, restart=True, on_failure=self._count)

    def start(self) -> DatagramServer:
        self._worker.start()
        self._assistant.start()
        return self

    @property
    def port(self) -> int:
        return self.socket.port

    def _assist(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self.socket.assist(self._most_waiting, _LOOK)
            worker.note_success()

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self._handle_next(worker, _LOOK)
        while time.monotonic() < self._give_up_at and self._handle_next(worker, 0.0):
            pass

    def _handle_next(self, worker: Worker, patience: float) -> bool:
        found = self.socket.take(self._most_waiting, patience)
        if found:
            self.batches += 1
            try:
                self._handle(found)
            except Exception:
                self._failed += len(found.whole) + len(found.cut)
                raise
            worker.note_success()
        return bool(found)

    def _count(self, _: Exception) -> None:
        self.failures += 1

    @property
    def unhandled(self) -> int:
        """Datagrams that were received, and not handled to the end."""
        return self._failed + self._left

    def statistics(self) -> DatagramStatistics:
        return self.socket.statistics()

    def close(self, grace: float = _LAST) -> None:
        """Stop; handle received datagrams for up to `grace` seconds. Idempotent."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace)
        self._assistant.ask_to_stop()
        is_over = self._worker.stop(2 * _LOOK + grace + _LAST) and self._assistant.join(_LAST)
        if not is_over:  # it is still at a batch, and takes no more of them
            self._left = self.socket.waiting
        elif self.socket.socket.fileno() >= 0:
            try:
                self._left = self._count_rest()
            finally:
                self.socket.close()

    def _count_rest(self) -> int:
        """Take what has come and nobody handled, also from the kernel; return how many."""
        count, deadline = 0, time.monotonic() + _LAST
        while time.monotonic() < deadline and (found := self.socket.take(self._most_waiting, 0.0)):
            count += len(found.whole) + len(found.cut)
        return count
