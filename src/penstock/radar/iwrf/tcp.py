"""How do pulses come over the network? `iwrf+tcp://host:port`.

Packets back to back. A writer is a server, as LROSE's TsFmq2Tcp is, and sends to all clients; a
reader is a client. A late client gets the metadata first. A client that does not read blocks the
writer for a while and is then disconnected.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from pydantic import Field

from penstock.core.errors import (
    ConnectionLost,
    Malformed,
    PositionError,
    WriteTimeout,
)
from penstock.core.options import Duration, Options
from penstock.core.position import Position
from penstock.protocols.connection import is_readable, tune
from penstock.protocols.server import Limits, Server, Session, listen_tcp
from penstock.radar.iwrf.framing import frame
from penstock.radar.iwrf.messages import (
    PacketReader,
    PacketWriter,
    Reminder,
    batch_of,
    packets_of,
)
from penstock.radar.iwrf.packets import Kind, make, read, time_ns_of

if TYPE_CHECKING:
    from penstock.core.batch import Batch
    from penstock.core.position import PositionLike
    from penstock.core.statistics import WriterStatistics
    from penstock.protocols.connection import Connection

__all__ = ["IwrfTcpReader", "IwrfTcpWriter", "TcpOptions"]

log = logging.getLogger(__name__)

_CHUNK: Final = 1 << 20
#: Bytes that wait for one client at most.
_WAITING: Final = 16 << 20
#: A session looks this often (seconds) whether its client has left.
_LOOK: Final = 0.1


class TcpOptions(Options):
    """Options of `iwrf+tcp://host:port`."""

    #: A connection may take so long; and who takes nothing for so long is cut off.
    timeout: Annotated[Duration, Field(gt=0)] = 30.0
    #: Reader: deliver only packets of this kind.
    type: int | None = None
    #: Writer: wait so long for somebody to connect before it is an error.
    wait: Annotated[Duration, Field(ge=0)] = 3600.0
    #: Writer: sync words and metadata after so long; 0: never.
    repeat: Annotated[Duration, Field(ge=0)] = 1.0
    clients: Annotated[int, Field(ge=1, le=1000)] = 16


class IwrfTcpReader(PacketReader):
    """Receives packets from a server. Not replayable."""

    def __init__(self, url: str, host: str, port: int, options: TcpOptions) -> None:
        super().__init__(url, options.type)
        self._address = (host, port)
        self._options = options
        self._rest = np.empty(0, np.uint8)
        self._has_ended = self._end_was_raised = False
        self._socket = self._connected()

    def _connected(self) -> socket.socket:
        try:
            sock = socket.create_connection(self._address, self._options.timeout)
        except OSError as error:
            raise ConnectionLost(self._server, str(error), hint="is it running?") from error
        tune(sock)
        return sock

    @property
    def _server(self) -> str:
        return "{}:{}".format(*self._address)

    # --- reading ------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return super()._has_news() or self._has_ended  # the next read raises, or reconnects

    def _take_batch(self, limit: int) -> Batch:
        """Return what has come.

        :raises ConnectionLost: the server has gone; the next call reconnects.
        """
        self._check_open()
        if self._end_was_raised:
            self._socket.close()
            self._socket = self._connected()
            self._has_ended = self._end_was_raised = False
        batch = super()._take_batch(limit)
        if self._has_ended and not batch.num_rows:
            self._end_was_raised = True
            raise ConnectionLost(self._server, "it has ended the connection")
        return batch

    def _pause(self, seconds: float) -> None:
        is_readable(self._socket, seconds)

    def _fill(self) -> bool:
        while not self._has_ended and is_readable(self._socket):
            try:
                data = self._socket.recv(_CHUNK)
            except OSError as error:
                log.info("%s: %s", self.url, error)
                data = b""
            self._has_ended = not data
            some = np.concatenate((self._rest, np.frombuffer(data, np.uint8)))
            found = frame(some, is_end=self._has_ended)
            self._note_skipped(found)
            self._rest = some[found.end :].copy()
            if found.runs:
                self._ready = batch_of(some, found.runs, self._next, time.time_ns())
                self._next += self._ready.num_rows
                return True
        return False

    def seek(self, position: PositionLike) -> None:
        if Position.of(position) not in {Position.START, Position.END}:
            raise PositionError(f"{self.url}: packets come as they are sent, not from {position}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._socket.close()


# --- writing --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """A message on its way, the same for all clients."""

    data: bytes
    #: Clients for which the kernel does not have it yet.
    clients: int = 0
    is_taken: bool = False


class _Outlet(Session):
    """One client and its send queue."""

    def __init__(self, connection: Connection, hub: _Hub) -> None:
        super().__init__(connection)
        self._hub = hub
        self.waiting: deque[_Piece] = deque()
        self.bytes = 0
        #: What the kernel may not have yet.
        self.sending: list[_Piece] = []

    def serve(self) -> bool:
        self.connection.welcome()
        self._hub.add(self)
        while (some := self._hub.next_for(self)) is not None:
            if some:
                self.connection.send(*some)
            elif self.connection.has_left():
                break
        return False

    def close(self) -> None:
        self._hub.discard(self)


class _Hub:
    """The fan-out to all clients."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.outlets: set[_Outlet] = set()
        self._is_over = False
        #: Messages that every client left behind.
        self.untaken = 0
        #: What a client is told first: the metadata so far.
        self.greeting = b""

    def add(self, outlet: _Outlet) -> None:
        with self.changed:
            if self.greeting:
                outlet.waiting.append(_Piece(self.greeting, 1, is_taken=True))  # it is no message
                outlet.bytes += len(self.greeting)
            self.outlets.add(outlet)
            self.changed.notify_all()

    def discard(self, outlet: _Outlet) -> None:
        with self.changed:
            self.outlets.discard(outlet)
            for piece in (*outlet.sending, *outlet.waiting):
                piece.clients -= 1
                self.untaken += not piece.clients and not piece.is_taken
            outlet.sending = []
            outlet.waiting.clear()
            self.changed.notify_all()

    def next_for(self, outlet: _Outlet) -> list[bytes] | None:
        """Return the next bytes for a client; empty after a moment, None at the end.

        Those of the call before are sent.
        """
        with self.changed:
            if outlet.sending:
                for piece in outlet.sending:
                    piece.clients -= 1
                    piece.is_taken = True
                outlet.sending = []
                self.changed.notify_all()
            if not outlet.waiting and not self._is_over:
                self.changed.wait(_LOOK)
            outlet.sending = [*outlet.waiting]
            outlet.waiting.clear()
            outlet.bytes = 0
            self.changed.notify_all()
            some = [piece.data for piece in outlet.sending]
            return None if not some and self._is_over else some

    def put(self, data: bytes, patience: float) -> int:
        """Queue bytes for all clients, when the slowest has room; return the number of clients."""
        deadline = time.monotonic() + patience
        with self.changed:
            while any(each.bytes > _WAITING for each in self.outlets):
                if not self.changed.wait(max(0.0, min(_LOOK, deadline - time.monotonic()))):
                    if time.monotonic() < deadline:
                        continue
                    for each in [each for each in self.outlets if each.bytes > _WAITING]:
                        log.warning("%s takes nothing, and is cut off", each.connection.peer)
                        each.connection.cut("it takes nothing")
                        self.discard(each)
            piece = _Piece(data, len(self.outlets))
            for each in self.outlets:
                each.waiting.append(piece)
                each.bytes += len(data)
            self.changed.notify_all()
            return len(self.outlets)

    def await_client(self, patience: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: bool(self.outlets), patience)

    def drain(self, patience: float) -> bool:
        """Wait until the kernel has everything for all clients."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not any(each.waiting or each.sending for each in self.outlets), patience
            )

    def end(self) -> None:
        with self.changed:
            self._is_over = True
            self.changed.notify_all()


class IwrfTcpWriter(PacketWriter):
    """Sends packets to all clients; it waits for the first client."""

    def __init__(self, url: str, host: str, port: int, options: TcpOptions) -> None:
        super().__init__(url)
        self._options = options
        self._hub = _Hub()
        self._reminder = Reminder(options.repeat)
        self._server = Server(
            "iwrf-tcp",
            listen_tcp(host, port),
            lambda connection: _Outlet(connection, self._hub),
            Limits(max_clients=options.clients, stalled=options.timeout),
            log=log,
            speaks_first=True,
        ).start()
        #: Where it listens.
        self.port = self._server.port

    def _write(self, payloads: list[bytes]) -> None:
        self._check_open()
        for payload in payloads:
            try:
                packets = packets_of(payload)
            except Malformed:
                self._refused += 1
                raise
            pieces: list[bytes] = []
            for kind, packet in packets:
                if kind == Kind.PULSE:
                    time_ns = int(time_ns_of(read(packet))[0])
                    if self._reminder.is_due(time_ns):
                        again = self._reminder.packets(time_ns, sync=True)
                        pieces += [each for _, each in again]
                self._reminder.note(kind, packet)
                pieces.append(packet)
            self._send(b"".join(pieces))
            self._messages += 1
            self._bytes += len(payload)
            self._last_seq = self._messages - 1

    def _send(self, data: bytes) -> None:
        began = time.monotonic()
        while True:
            if not self._hub.await_client(self._options.wait):
                self._refused += 1
                raise WriteTimeout(
                    f"{self.url}: nobody has connected for {self._options.wait:g} s",
                    hint="start the reader, or give wait=TIME",
                )
            if self._hub.put(data, self._options.timeout):
                break
        self._waited += time.monotonic() - began
        self._hub.greeting = make(Kind.SYNC) + self._reminder.state.to_bytes()

    def statistics(self) -> WriterStatistics:
        return super().statistics()._replace(untaken=self._hub.untaken)

    def flush(self) -> None:
        """Wait until everything is handed to the kernel for all clients."""
        if not self._hub.drain(self._options.timeout):
            raise WriteTimeout(
                f"{self.url}: a client has not taken everything for {self._options.timeout:g} s"
            )

    def close(self) -> None:
        """Send what is queued, and stop. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._hub.drain(self._options.timeout):
            log.warning("%s: a client has not taken everything, and is cut off", self.url)
        self._hub.end()
        self._server.stop()
