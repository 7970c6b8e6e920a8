"""How do commands from outside reach the input streams of this machine?

In the framing of outgoing messages: the 16 bytes of a stream id and a protobuf message, as a
datagram or over TCP with a length prefix. Only streams on an allow-list can be reached.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from penstock.core.errors import Malformed, NotFound, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.overflow import QueueFull
from penstock.core.url import is_loopback
from penstock.protocols.connection import peer_name
from penstock.protocols.datagrams import DatagramServer, DatagramSocket
from penstock.protocols.jrtc.wire import FrameDecoder, unpack
from penstock.protocols.server import Limits, Server, Session, listen_tcp
from penstock.queue.streams import InputStream

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from penstock.core.stream_id import StreamId
    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Datagrams, DatagramStatistics
    from penstock.protocols.jrtc.schemas import Schema, Schemas
    from penstock.protocols.server import ServerStatistics
    from penstock.queue.wide.writer import WideWriter

__all__ = ["ControlServer", "ControlStatistics", "Refusal"]

log = logging.getLogger(__name__)

#: Seconds that a stream may be full before a command for it is refused.
_PATIENCE: Final = 1.0
#: Seconds between two looks whether there is room.
_LOOK: Final = 0.005
#: Input streams that are open at the same time.
_MOST_OPEN: Final = 256
#: Bytes of a connection that are read at once, and seconds that a quiet one keeps its thread.
_PIECE: Final = 1 << 16
_QUIET: Final = 1.0


class Refusal(StrEnum):
    """Why a command was refused."""

    #: It is shorter than an id.
    MALFORMED = "malformed"
    #: The allow-list does not have its stream.
    FORBIDDEN = "forbidden"
    #: There is no such input stream.
    UNKNOWN = "unknown stream"
    #: It is not what its stream carries.
    UNDECODABLE = "undecodable"
    #: The stream is full, and nobody reads it.
    FULL = "full"
    #: The stream could not be written to; the log says why.
    FAILED = "failed"


class ControlStatistics(NamedTuple):
    """Counters: every command is delivered, refused or unhandled. There are no replies."""

    delivered: int
    refused: dict[Refusal, int]
    #: Datagrams that had come at the end, and were not looked at in time.
    unhandled: int
    #: What came by UDP; None: nothing can.
    datagrams: DatagramStatistics | None
    #: What came by TCP; None: nothing can.
    connections: ServerStatistics | None


@dataclass(slots=True)
class _Open:
    """An open input stream."""

    writer: WideWriter
    lock: Lock
    #: Whether the last command found no room.
    is_full: bool = False

    def write(self, payload: bytes, sender: bytes, patience: float) -> None:
        """Append a command; wait up to `patience` seconds for room.

        :raises QueueFull: there is none.
        :raises PenstockError: the command is not stored.
        """
        deadline = time.monotonic() + patience
        while not self._try(payload, sender, is_last=time.monotonic() >= deadline):
            time.sleep(_LOOK)

    def _try(self, payload: bytes, sender: bytes, *, is_last: bool) -> bool:
        with self.lock:
            before = self.writer.statistics().messages
            try:
                self.writer.write(payload, attributes=sender)
            except QueueFull:
                if not is_last:
                    return False
                self.is_full = True
                raise
            except PenstockError:
                if self.writer.statistics().messages == before:
                    raise
                # else the stream was removed just behind it
            self.is_full = False
            return True

    def close(self) -> None:
        with self.lock:  # who is writing finishes
            self.writer.close()


class ControlServer(Closable):
    """Receives commands, from construction until `close`."""

    def __init__(
        self,
        allow: Sequence[StreamId],
        schemas: Schemas,
        *,
        host: str = "127.0.0.1",
        tcp_port: int | None = None,
        udp_port: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        max_clients: int = 64,
    ) -> None:
        """Listen and start; port 0 takes any free port.

        :param allow: requests that match the allowed streams
        :param directory: where streams are; by default that of this user
        :raises StorageError: an address is in use.
        """
        self._allow = tuple(allow)
        self._schemas = schemas
        self._directory = directory
        self._lock = Lock()
        self._open: OrderedDict[StreamId, _Open] = OrderedDict()
        self._delivered = 0
        self._refused: Counter[Refusal] = Counter()
        self._udp: DatagramServer | None = None
        self._tcp: Server | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if udp_port is not None:
                sock = DatagramSocket.bind(host, udp_port)
                self._udp = DatagramServer("jrtc-control", sock, self._handle, log=log).start()
            if tcp_port is not None:
                self._tcp = Server(
                    "jrtc-control-tcp",
                    listen_tcp(host, tcp_port),
                    lambda connection: _FrameSession(connection, self),
                    Limits(max_clients=max_clients),
                    log=log,
                ).start()
            undo.pop_all()
        if not is_loopback(host):
            log.warning("%s lets other machines send commands: the protocol has no passwords", host)

    @property
    def udp_port(self) -> int | None:
        return None if self._udp is None else self._udp.port

    @property
    def tcp_port(self) -> int | None:
        return None if self._tcp is None else self._tcp.port

    # --- commands -----------------------------------------------------------------------------

    def _handle(self, datagrams: Datagrams) -> None:
        for data, peer in datagrams.whole:
            try:
                stream, payload = unpack(data)
            except Malformed as error:
                self.refuse(Refusal.MALFORMED, error)
            else:
                self.deliver(stream, payload, peer_name(peer), may_wait=False)
        for _ in datagrams.cut:
            self.refuse(Refusal.MALFORMED, "a datagram was cut")

    def deliver(
        self, stream: StreamId, payload: bytes, peer: str, *, may_wait: bool = True
    ) -> None:
        """Write a command to its stream. Refused commands are counted and logged.

        :param may_wait: wait up to 1 s for room in a full stream; if False, wait only once per
            full stream: other commands are queued behind this one
        """
        if not stream.is_concrete or not any(stream.matches(each) for each in self._allow):
            self.refuse(Refusal.FORBIDDEN, f"{peer} may not write to {stream}")
            return
        schema = self._schemas.find(stream)
        if schema is None and self._schemas.is_broken(stream):
            self.refuse(Refusal.UNDECODABLE, f"{peer} to {stream}: its message is gone")
            return
        if schema is not None:
            try:
                payload = _checked(schema, payload)
            except Malformed as error:
                self.refuse(Refusal.UNDECODABLE, f"{peer} to {stream}: {error}")
                return
        try:
            self._write(stream, payload, peer, may_wait=may_wait)
        except NotFound as error:
            self.refuse(Refusal.UNKNOWN, error)
        except QueueFull as error:
            self.refuse(Refusal.FULL, error)
        except PenstockError as error:
            self.refuse(Refusal.FAILED, error)
        else:
            with self._lock:
                self._delivered += 1

    def refuse(self, why: Refusal, what: object) -> None:
        with self._lock:
            self._refused[why] += 1
        log.info("a command is refused: %s", what)

    def _write(self, stream: StreamId, payload: bytes, peer: str, *, may_wait: bool) -> None:
        found, is_new = self._writer(stream)
        try:
            is_waited_for = may_wait or not found.is_full
            found.write(payload, peer.encode(), _PATIENCE if is_waited_for else 0.0)
        except QueueFull:
            raise
        except PenstockError:
            self._drop(stream, found)
            if is_new:
                raise
            # It may be another stream of that name by now.
            self._write(stream, payload, peer, may_wait=may_wait)

    def _writer(self, stream: StreamId) -> tuple[_Open, bool]:
        """Return the writer of a stream, and whether it was just opened."""
        with self._lock:
            found = self._open.get(stream)
            if found is not None:
                return found, False
            while len(self._open) >= _MOST_OPEN:
                _, oldest = self._open.popitem(last=False)
                oldest.close()
            # It waits outside of the stream's lock, where others can write as soon as they may.
            writer = InputStream.open(
                stream, directory=self._directory, policy="fail", timeout=_PATIENCE
            )
            found = self._open[stream] = _Open(writer, Lock())
            return found, True

    def _drop(self, stream: StreamId, found: _Open) -> None:
        with self._lock:
            if self._open.get(stream) is found:
                del self._open[stream]
        found.close()

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> ControlStatistics:
        with self._lock:
            refused = {why: self._refused[why] for why in Refusal}
            delivered = self._delivered
        return ControlStatistics(
            delivered,
            refused,
            0 if self._udp is None else self._udp.unhandled,
            None if self._udp is None else self._udp.statistics(),
            None if self._tcp is None else self._tcp.statistics(),
        )

    def close(self) -> None:
        """Stop after delivering what has arrived. Idempotent."""
        if self._tcp is not None:
            self._tcp.close()
        if self._udp is not None:
            self._udp.close()
        with self._lock:
            for each in self._open.values():
                each.close()
            self._open.clear()


def _checked(schema: Schema, payload: bytes) -> bytes:
    """Return a message in the form that its stream carries.

    :raises Malformed: it does not match the stream's schema.
    """
    if schema.codec is None:
        schema.parse(payload)
        return payload
    rows, failures = schema.codec.deserialise(pa.array([payload], pa.binary()))
    if failures:
        raise Malformed("command", schema.message, failures[0].expected, failures[0].found)
    return rows.tobytes()


class _FrameSession(Session):
    """A client that sends frames."""

    def __init__(self, connection: Connection, server: ControlServer) -> None:
        super().__init__(connection)
        self._server = server
        self._decoder = FrameDecoder()
        self._buffer = memoryview(bytearray(_PIECE))

    def serve(self) -> bool:
        while (count := self.connection.receive(self._buffer, _QUIET)) is not None:
            if not count:
                if not self._decoder.is_empty:
                    self._server.refuse(Refusal.MALFORMED, "a frame was not finished")
                return False
            try:
                for stream, payload in self._decoder.feed(bytes(self._buffer[:count])):
                    self.connection.welcome()
                    self._server.deliver(stream, payload, self.connection.peer)
            except Malformed as error:
                self._server.refuse(Refusal.MALFORMED, error)
                raise
        return True
