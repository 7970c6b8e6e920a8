"""How do an exporter's messages reach its clients: by TCP, a named pipe or UDP?"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from penstock.core.errors import Malformed
from penstock.core.quota import TokenBucket
from penstock.protocols.datagrams import DatagramServer, DatagramSocket
from penstock.protocols.psi.chunks import Chunker, decode_chunk
from penstock.protocols.psi.envelope import encode_message, encode_messages
from penstock.protocols.psi.handshake import decode_session_id, pipe_path
from penstock.protocols.server import (
    Conversation,
    End,
    Limits,
    Server,
    listen_tcp,
    listen_unix,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Address, Datagrams
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.exporter.server import ExporterOptions

__all__ = ["Acceptor", "StreamAcceptor", "datagram_sender", "open_acceptor", "stream_sender"]

log = logging.getLogger(__name__)

#: Seconds that clients get to take what is being sent when it closes.
_GRACE: Final = 1.0
#: Bytes per second of datagrams, and bytes in one burst: a receiver cannot slow a sender down. A
#: smaller datagram counts as one of 1,024 bytes, because it costs the receiver as much.
_DATAGRAM_RATE: Final = 40_000_000
_BURST: Final = 1 << 16
_SMALL_DATAGRAM: Final = 1024
#: Seconds that a datagram waits for room in the kernel, at most.
_FULL: Final = 1.0
#: Shorter sleeps (seconds) are left out; what is due adds up to a longer one.
_SHORTEST_SLEEP: Final = 0.001


class Acceptor(ABC):
    """Accepts clients at a port or a pipe."""

    def __init__(self, port: int | None = None, pipe: str | None = None) -> None:
        #: What the hello tells clients: a port, or the name of a pipe.
        self.port = port
        self.pipe = pipe

    @property
    @abstractmethod
    def denied(self) -> int:
        """Connections refused because there were too many."""

    @property
    @abstractmethod
    def malformed(self) -> int:
        """Connections and datagrams refused for their bytes."""

    @abstractmethod
    def close(self) -> None:
        """Stop to accept, and close the connections."""


class StreamAcceptor(Acceptor):
    """Accepts connections at a TCP port or a named pipe."""

    def __init__(
        self,
        name: str,
        sockets: Sequence[socket.socket],
        options: ExporterOptions,
        serve: Callable[[Connection], None],
        pipe: str | None = None,
    ) -> None:
        """`serve` runs for each connection; the connection ends when it returns."""
        limits = Limits(
            max_clients=options.max_clients,
            first_message=options.first_message,
            stalled=options.stalled,
        )
        self.server = Server(
            name,
            sockets,
            lambda connection: Conversation(connection, serve),
            limits,
            log=log,
            reset=options.reset,
        ).start()
        super().__init__(None if pipe is not None else self.server.port, pipe)

    @property
    def denied(self) -> int:
        return sum(self.server.statistics().refused.values())

    @property
    def malformed(self) -> int:
        return self.server.statistics().ended[End.MALFORMED]

    def close(self) -> None:
        self.server.stop(_GRACE)
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                _pipe_file(self.pipe).unlink()


class _DatagramAcceptor(Acceptor):
    """Takes session ids at a UDP port."""

    def __init__(
        self,
        options: ExporterOptions,
        serve: Callable[[UUID, DatagramSocket, Address], bool],
    ) -> None:
        """`serve` gets each session id, and tells whether there is such a session."""
        self._serve = serve
        self._refused = 0
        sock = DatagramSocket.bind(options.host, options.data_port)
        self._server = DatagramServer("psi-datagrams", sock, self._handle, log=log).start()
        super().__init__(self._server.port)

    def _handle(self, datagrams: Datagrams) -> None:
        self._refused += len(datagrams.cut)
        for payload, address in datagrams.whole:
            try:
                id = decode_session_id(decode_chunk(payload).payload)
            except Malformed:
                self._refused += 1
                continue
            self._refused += not self._serve(id, self._server.socket, address)

    @property
    def denied(self) -> int:
        return 0

    @property
    def malformed(self) -> int:
        return self._refused

    def close(self) -> None:
        self._server.close()


def open_acceptor(
    options: ExporterOptions,
    serve_connection: Callable[[Connection], None],
    serve_datagram: Callable[[UUID, DatagramSocket, Address], bool],
) -> Acceptor:
    """Open the acceptor of the transport that the options name.

    :raises StorageError: the address is not available.
    """
    if options.transport == "udp":
        return _DatagramAcceptor(options, serve_datagram)
    if options.transport == "pipe":
        pipe = str(uuid4())
        sockets = listen_unix(_pipe_file(pipe))
        return StreamAcceptor("psi-data", sockets, options, serve_connection, pipe)
    sockets = listen_tcp(options.host, options.data_port)
    return StreamAcceptor("psi-data", sockets, options, serve_connection)


def _pipe_file(pipe: str) -> Path:
    return Path(pipe_path(pipe, tempfile.gettempdir()))


def stream_sender(connection: Connection) -> Callable[[list[PsiMessage]], int]:
    """Return a function that sends messages on a TCP connection or a named pipe."""

    def send(messages: list[PsiMessage]) -> int:
        data = encode_messages(messages)
        connection.send(data)
        return len(data)

    return send


def datagram_sender(sock: DatagramSocket, address: Address) -> Callable[[list[PsiMessage]], int]:
    """Return a function that sends messages to a client in datagrams."""
    chunker = Chunker()
    pace = TokenBucket(_DATAGRAM_RATE, _BURST / _DATAGRAM_RATE)

    def give(datagrams: list[bytes]) -> None:
        taken = sock.send([(each, address) for each in datagrams], _FULL)
        if taken < len(datagrams):
            raise TimeoutError(f"the kernel has no room for datagrams for {_FULL:g} s")

    def send(messages: list[PsiMessage]) -> int:
        size = cost = 0
        ready: list[bytes] = []
        for message in messages:
            data = encode_message(message)
            size += len(data)
            for datagram in chunker.split(data):
                ready.append(datagram)
                cost += max(_SMALL_DATAGRAM, len(datagram))
                if cost < _BURST // 2:
                    continue
                give(ready)
                due = pace.delay(cost)
                ready, cost = [], 0
                if due > _SHORTEST_SLEEP:
                    time.sleep(due)
        give(ready)
        pace.delay(cost)
        return size

    return send
