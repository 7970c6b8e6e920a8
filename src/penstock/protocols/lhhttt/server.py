"""How do clients reach a queue: by datagrams, TCP and a Unix socket?"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from pydantic import Field

from penstock.core.errors import Malformed, StorageError
from penstock.core.interfaces import Closable
from penstock.core.options import Duration, Options, Size
from penstock.core.overflow import OverflowPolicy
from penstock.core.url import is_loopback
from penstock.protocols.datagrams import DatagramServer, DatagramSocket
from penstock.protocols.lhhttt.commands import (
    LARGEST_HEAD,
    MOST_MESSAGES,
    Code,
    error_reply,
    format_limits,
    seq_of_store,
)
from penstock.protocols.lhhttt.frames import DEFAULT_PORT, FrameDecoder, decode_all, group
from penstock.protocols.lhhttt.interface import CommandQueue, QueueSettings, QueueStatistics
from penstock.protocols.lhhttt.queue import MessageQueue
from penstock.protocols.server import (
    Limits,
    Server,
    ServerStatistics,
    Session,
    listen_tcp,
    listen_unix,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Address, Datagrams, DatagramStatistics

__all__ = ["LhhtttServer", "LhhtttStatistics", "ServerOptions"]

log = logging.getLogger(__name__)

#: What a datagram of IPv4 can carry.
LARGEST_DATAGRAM: Final = 65_507
#: Seconds that answers have to leave: a kernel without room for them loses them.
_SENDING: Final = 1.0
#: Bytes of a connection that are read at once.
_PIECE: Final = 1 << 16
#: Seconds between two looks whether a client that waits has left; and that one who says nothing
#: keeps its thread.
_LOOK: Final = 1.0
_QUIET: Final = 1.0
#: Any free port is tried so often, until one is free by UDP and by TCP.
_ATTEMPTS: Final = 20


class ServerOptions(Options):
    """Options of `penstock serve lhhttt`."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    #: Serve TCP at the same port, too.
    tcp: bool = False
    #: Serve a Unix socket, too.
    unix: Path | None = None
    capacity: int = 1_000_000
    capacity_bytes: Size = 128 << 20
    policy: OverflowPolicy = OverflowPolicy.FAIL
    journal: str | None = None
    lease: Duration = 30.0
    deliveries: int | None = None
    dead: str | None = None
    #: The largest frame by TCP and Unix sockets: it has room for every request and error.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 30)] = 16 << 20
    max_clients: Annotated[int, Field(ge=1, le=100_000)] = 256

    def settings(self) -> QueueSettings:
        return QueueSettings(
            capacity=self.capacity,
            capacity_bytes=self.capacity_bytes,
            policy=self.policy,
            journal=self.journal,
            lease=self.lease,
            deliveries=self.deliveries,
            dead=self.dead,
        )


class LhhtttStatistics(NamedTuple):
    """Counters of a server: every datagram is malformed, a command to the queue, or unhandled."""

    queue: QueueStatistics
    #: Datagrams, and what the kernel dropped of them.
    datagrams: DatagramStatistics
    #: Datagrams that are no frame; connections are closed for that.
    malformed: int
    #: Answers that the kernel did not take.
    unsent: int
    #: Connections by TCP and Unix sockets, of each server.
    streams: tuple[ServerStatistics, ...]
    #: Datagrams that had come at the end, and were not looked at in time.
    unhandled: int = 0


def _listen(options: ServerOptions) -> tuple[DatagramSocket, list[socket.socket]]:
    """Listen by UDP and, if it is asked for, by TCP at the same port.

    :raises StorageError: the port is in use.
    """
    attempts = 0
    while True:
        sock = DatagramSocket.bind(options.host, options.port)
        try:
            return sock, listen_tcp(options.host, sock.port) if options.tcp else []
        except StorageError:
            sock.close()
            attempts += 1
            # A port that is free for one may be taken for the other: any other will do.
            if options.port or attempts == _ATTEMPTS:
                raise


class LhhtttServer(Closable):
    """Serves one queue, from construction until `close`."""

    def __init__(self, options: ServerOptions, queue: CommandQueue | None = None) -> None:
        """Listen, and begin.

        :param queue: answers the commands; None makes one. It is closed with the server.

        :raises StorageError: an address is in use.
        :raises PenstockError: the journal cannot be opened.
        """
        self.options = options
        self._malformed = self._unsent = 0
        with contextlib.ExitStack() as undo:
            sock, tcp = _listen(options)
            undo.callback(sock.close)
            self._socket = sock
            self.port = sock.port
            listeners = [tcp] if tcp else []
            if options.unix is not None:
                listeners.append(_listen_at(options.unix))
                undo.callback(options.unix.unlink, missing_ok=True)
            for sockets in listeners:
                for each in sockets:
                    undo.callback(each.close)
            self.queue = MessageQueue(options.settings()) if queue is None else queue
            undo.callback(self.queue.close)
            self._datagrams = DatagramServer("lhhttt", sock, self._handle, log=log)
            limits = Limits(max_clients=options.max_clients)
            self._streams = [
                Server("lhhttt-stream", sockets, self._new_session, limits, log=log)
                for sockets in listeners
            ]
            undo.pop_all()
        self._warn_if_open()
        self._datagrams.start()
        for server in self._streams:
            server.start()

    def _warn_if_open(self) -> None:
        """Warn when other machines can connect: the protocol has no authentication."""
        if not is_loopback(str(self._socket.socket.getsockname()[0])):
            log.warning(
                "%s is open to other machines: anybody who can reach it can take and put messages, "
                "because the protocol has no passwords; a firewall can say who",
                self.address,
            )

    @property
    def address(self) -> str:
        """`host:port`, for display."""
        host = self.options.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    # --- datagrams ----------------------------------------------------------------------------

    def _handle(self, datagrams: Datagrams) -> None:
        commands, malformed = decode_all(datagrams.whole)
        self._malformed += malformed + len(datagrams.cut)
        replies, _ = self.queue.handle(commands, self._send, LARGEST_DATAGRAM)
        self._send(replies)

    def _send(self, replies: Sequence[tuple[bytes, Address]]) -> None:
        """Send replies; skip clients that cannot be reached."""
        left = list(replies)
        while left:
            try:
                taken = self._socket.send(left, _SENDING)
            except OSError as error:
                log.debug("an answer to %s is not sent: %s", left[0][1], error)
                taken = 0
            if not taken:
                self._unsent += 1
                taken = 1
            del left[:taken]

    # --- connections --------------------------------------------------------------------------

    def _new_session(self, connection: Connection) -> Session:
        return _QueueSession(connection, self.queue, self.options.max_message)

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> LhhtttStatistics:
        return LhhtttStatistics(
            self.queue.statistics(),
            self._datagrams.statistics(),
            self._malformed,
            self._unsent,
            tuple(server.statistics() for server in self._streams),
            self._datagrams.unhandled,
        )

    def close(self) -> None:
        """Stop after answering what has arrived. Idempotent."""
        for server in self._streams:
            server.close()
        self._datagrams.close()
        self.queue.close()
        if self.options.unix is not None:
            self.options.unix.unlink(missing_ok=True)


def _listen_at(path: Path) -> list[socket.socket]:
    """Listen at a path; replace a stale socket file.

    :raises StorageError: the path is another kind of file.
    """
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass
    return listen_unix(path)


class _QueueSession(Session):
    """A client that sends frames in a stream."""

    def __init__(self, connection: Connection, messages: CommandQueue, largest: int) -> None:
        super().__init__(connection)
        self._queue = messages
        self._largest = largest
        self._decoder = FrameDecoder(largest, self._refuse_long)
        self._buffer = memoryview(bytearray(_PIECE))
        #: Answers to requests that waited, which other threads bring.
        self._late: queue.SimpleQueue[Sequence[tuple[bytes, Address]]] = queue.SimpleQueue()

    def serve(self) -> bool:
        connection = self.connection
        while (count := connection.receive(self._buffer, _QUIET)) is not None:
            if not count:
                return False
            commands: list[tuple[bytes, Address]] = []
            fault = None
            try:
                for frame in self._decoder.feed(self._buffer[:count]):
                    commands.append((frame, None))  # noqa: PERF401 - kept when a later one is wrong
            except Malformed as error:
                fault = error
            if commands:
                connection.welcome()
                replies, waiting = self._queue.handle(
                    group(commands), self._late.put, self._largest
                )
                connection.send(*(reply for reply, _ in replies))
                if not self._wait_for(waiting):
                    return False
            if fault is not None:  # what came before it is answered
                raise fault
        return True

    def _refuse_long(self, head: bytes) -> bool:
        """Answer a request that is too long, so that its client sends less at once.

        False: it is no request that could be answered; the connection ends.
        """
        if (seq := seq_of_store(head)) is None:
            return False
        self.connection.welcome()
        text = format_limits(MOST_MESSAGES, self._largest - LARGEST_HEAD)
        self.connection.send(error_reply(seq, Code.TOO_LARGE, text))
        return True

    def _wait_for(self, waiting: int) -> bool:
        """Send `waiting` replies as they become ready; False if the client has left."""
        while waiting:
            try:
                answers = self._late.get(timeout=_LOOK)
            except queue.Empty:
                if self.connection.has_ended():
                    return False
                continue
            waiting -= len(answers)
            self.connection.send(*(answer for answer, _ in answers))
        return True

    def close(self) -> None:
        self._queue.forget(self._late.put)
