"""Which streams are behind `jrtc+udp://host:port` and `jrtc+tcp://host:port`?

A reader of `jrtc+udp:` listens there, as a collector does; a writer sends there, as a forwarder
does. A writer of `jrtc+tcp:` sends to the input streams of a controller.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, InstanceOf

from penstock.core.batch import check_batch, count_headers
from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidOption,
    MessageTooLarge,
    PositionError,
    StorageError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.interfaces import LONGEST_SLEEP, BookedWriter, Reader
from penstock.core.message import Message
from penstock.core.options import Options, parse_options
from penstock.core.pending import Pending
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.core.stream_id import StreamId
from penstock.protocols.connection import is_readable
from penstock.protocols.datagrams import DatagramServer, DatagramSocket
from penstock.protocols.host_port import host_alone
from penstock.protocols.jrtc.wire import (
    DATA_PORT,
    GATEWAY_PORT,
    ID_SIZE,
    LARGEST_DATAGRAM,
    pack_frame,
    payload_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.position import PositionLike
    from penstock.core.url import URL
    from penstock.protocols.datagrams import Datagrams

__all__ = ["ControlWriter", "DatagramReader", "DatagramWriter", "JrtcEndpoint"]

log = logging.getLogger(__name__)

#: What the protocol has no place for.
_CANNOT_CARRY: Final = {
    "time_ns": "left out: a datagram has no time, and a reader gives that of its arrival",
    "type": "left out: a datagram has none",
    "subtype": "left out: a datagram has none",
    "attributes": "left out: a datagram has none",
}
#: Bytes that wait for a reader; beyond it the kernel keeps, and counts what it drops.
_MOST_WAITING: Final = 64 << 20
#: Seconds that a datagram, or a controller, may be waited for.
_SENDING: Final = 5.0
_LOOK: Final = 0.1
#: Bytes that are read at once.
_PIECE: Final = 1 << 16


def _request(value: object) -> object:
    return StreamId.parse(value) if isinstance(value, str) else value


class UrlOptions(Options):
    """Options of `jrtc+udp://host:port` and `jrtc+tcp://host:port`."""

    #: A reader gives the messages of streams that match this; a writer sends messages that have no
    #: stream as those of this one.
    stream: Annotated[InstanceOf[StreamId] | None, BeforeValidator(_request)] = None


class JrtcEndpoint(Endpoint):
    """Datagrams of jrt-controller's forwarder, and frames to its input streams."""

    can_be_reread = False

    def open_reader(self, url: URL, start: Position) -> Reader:
        if url.scheme != "jrtc+udp":
            hint = "a reader listens at jrtc+udp://host:port"
            raise Unsupported(f"{url.scheme}: cannot be read from ({url})", hint=hint)
        if start not in {Position.START, Position.END}:
            raise PositionError(f"{url}: datagrams come once, there is no {start}")
        host, port, options = _parse(url)
        return DatagramReader(url.text, DatagramSocket.bind(host, port), options.stream)

    def open_writer(self, url: URL) -> Writer:
        host, port, options = _parse(url)
        if url.scheme == "jrtc+tcp":
            return ControlWriter(url.text, host, port, options.stream)
        try:
            sock = DatagramSocket.connect(host, port)
        except OSError as error:
            raise StorageError("sending to", url.text, error) from error
        return DatagramWriter(url.text, sock, options.stream)

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return _CANNOT_CARRY

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, path="", port=_port(url))


def _port(url: URL) -> int:
    return url.port or (DATA_PORT if url.scheme == "jrtc+udp" else GATEWAY_PORT)


def _parse(url: URL) -> tuple[str, int, UrlOptions]:
    return *host_alone(url, _port(url)), parse_options(url, UrlOptions)


class DatagramReader(Reader):
    """Reads the datagrams that forwarders send here, with their stream ids.

    A thread receives them also while nobody reads. Datagrams that the kernel drops, and those that
    come while the reader is being closed, count as lost; malformed ones count as filtered.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = _CANNOT_CARRY
    _longest_pause = LONGEST_SLEEP

    def __init__(self, url: str, sock: DatagramSocket, request: StreamId | None = None) -> None:
        super().__init__(url)
        self.port = sock.port
        self._request = request
        #: The reader takes the lock alone: a signal between two calls of a condition would keep it.
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._arrived: Pending[Message] = Pending()
        #: Bytes of the datagrams that came, and of those that were read.
        self._came = self._read = 0
        self._seq = self._messages = self._bytes = self._filtered = 0
        self._is_closed = False
        self._server = DatagramServer("jrtc-reader", sock, self._handle, log=log).start()

    def _handle(self, datagrams: Datagrams) -> None:
        now = time.time_ns()
        with self._news:
            while self._came - self._read > _MOST_WAITING and not self._is_closed:
                self._news.wait(_LOOK)
            self._filtered += len(datagrams.cut)
            arrived: list[Message] = []
            for data, _ in datagrams.whole:
                stream = StreamId(data[:ID_SIZE]) if len(data) >= ID_SIZE else None
                if stream is None or not self._is_wanted(stream):
                    self._filtered += 1
                    continue
                message = Message(self._seq, now, now, 0, 0, stream, None, data[ID_SIZE:])
                self._seq += 1
                self._came += len(data)
                arrived.append(message)
            self._arrived.extend(arrived)
            self._news.notify_all()

    def _is_wanted(self, stream: StreamId) -> bool:
        return self._request is None or stream.matches(self._request)

    def _take(self, limit: int) -> list[Message]:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
        with self._lock:
            self._news.notify_all()  # of the room that the last call made
        taken = self._arrived.first(limit)
        count, size = len(taken), _size(taken)
        self._arrived.drop(count)
        # No call from here on: whoever is interrupted before gets them at the next read.
        self._read += size + ID_SIZE * count
        self._messages += count
        self._bytes += size
        return taken

    def _untake(self, messages: list[Message]) -> None:
        count, size = len(messages), _size(messages)
        self._arrived.put_back(messages)
        self._read -= size + ID_SIZE * count
        self._messages -= count
        self._bytes -= size

    def _pause(self, seconds: float) -> None:
        with self._lock:
            if not self._arrived:
                self._news.wait(seconds)

    def available(self) -> Iterator[Message]:
        for _ in range(len(self._arrived)):
            yield from self._take(1)

    def seek(self, position: PositionLike) -> None:
        raise PositionError(f"{self.url}: datagrams come once, there is no {position}")

    def newest_seq(self) -> int | None:
        return self._seq - 1 if self._seq else None

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._server.statistics().dropped + self._server.unhandled,
            filtered=self._filtered,
            restarts=0,
            next_seq=self._messages,
            backlog=len(self._arrived),
            losses=(),
        )

    def close(self) -> None:
        self._is_closed = True
        self._server.close()


def _size(messages: Sequence[Message]) -> int:
    return sum([len(message.payload) for message in messages])


class _MessageWriter(BookedWriter):
    """Common part of the writers: each message has a stream, its own or the URL's."""

    cannot_carry: ClassVar[Mapping[str, str]] = _CANNOT_CARRY

    def __init__(self, url: str, stream: StreamId | None) -> None:
        super().__init__(url)
        self._stream = stream

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        del time_ns, created_ns
        self._check_open()
        stream = self._stream if stream is None else stream
        if stream is None:
            self._refused += 1
            raise self._without_stream()
        self._headers_dropped += bool(type or subtype or attributes)
        self._send(stream, bytes(payload))
        return self._messages - 1

    @abstractmethod
    def _send(self, stream: StreamId, payload: bytes) -> None:
        """Send one message, and count it."""

    def _without_stream(self) -> InvalidOption:
        hint = "give the URL one: ?stream=ID"
        return InvalidOption("stream", None, "a message says no stream", hint=hint)


class DatagramWriter(_MessageWriter):
    """Sends a datagram for each message, as a forwarder does."""

    def __init__(self, url: str, sock: DatagramSocket, stream: StreamId | None) -> None:
        super().__init__(url, stream)
        self._socket = sock

    def _send(self, stream: StreamId, payload: bytes) -> None:
        heads = pa.array([stream], pa.binary(ID_SIZE))
        self._send_all(heads, pa.array([payload], pa.binary()))

    def write_batch(self, batch: Batch) -> int | None:
        self._check_open()
        check_batch(batch)
        streams = batch.column("stream")
        if streams.null_count:
            if self._stream is None:
                self._refused += batch.num_rows
                raise self._without_stream()
            streams = streams.fill_null(pa.scalar(bytes(self._stream), pa.binary(ID_SIZE)))
        self._headers_dropped += count_headers(batch, "attributes")
        self._send_all(streams, batch.column("payload"))
        return self._messages - 1 if self._messages else None

    def _send_all(self, streams: pa.Array, payloads: pa.Array) -> None:
        """Send in order, up to the first that does not fit; the rest counts as refused."""
        before = self._messages
        try:
            self._send_fitting(streams, payloads)
        except BaseException:
            self._refused += len(payloads) - (self._messages - before)
            raise

    def _send_fitting(self, streams: pa.Array, payloads: pa.Array) -> None:
        sizes, largest = payload_sizes(payloads), LARGEST_DATAGRAM - ID_SIZE
        fitting = int(np.append(np.flatnonzero(sizes > largest), len(payloads))[0])
        sent = 0
        while sent < fitting:
            rows = sent, fitting - sent
            try:
                taken = self._socket.send_columns(
                    streams.slice(*rows), payloads.slice(*rows), None, _SENDING
                )
            except ConnectionRefusedError:  # nobody heard an earlier one; this says so once
                continue
            except OSError as error:
                raise ConnectionLost(self.url, error.strerror or str(error)) from error
            if not taken:
                raise WriteTimeout(f"{self.url}: the kernel has no room for a datagram")
            self._count_sent(taken, int(sizes[sent : sent + taken].sum()))
            sent += taken
        if fitting < len(payloads):
            hint = "a datagram is never cut in two"
            raise MessageTooLarge(int(sizes[fitting]), largest, hint=hint)

    def close(self) -> None:
        self._is_closed = True
        self._socket.close()


class ControlWriter(_MessageWriter):
    """Sends messages to input streams of a controller over TCP, and connects again when it broke.

    There are no replies: what the controller had not read when it went away is not noticed.
    """

    def __init__(self, url: str, host: str, port: int, stream: StreamId | None) -> None:
        """Connect.

        :raises ConnectionLost: nothing listens there.
        """
        super().__init__(url, stream)
        self._address = (host, port)
        self._socket: socket.socket | None = None
        try:
            self._connected()
        except OSError as error:
            raise ConnectionLost(url, error.strerror or str(error)) from error

    def _send(self, stream: StreamId, payload: bytes) -> None:
        try:
            frame = pack_frame(stream, payload)
        except MessageTooLarge:
            self._refused += 1
            raise
        try:
            self._connected().sendall(frame)
        except BaseException as error:
            self._disconnect()  # part of the frame may be sent, also if a signal interrupted it
            self._refused += 1
            if isinstance(error, OSError):
                raise ConnectionLost(self.url, error.strerror or str(error)) from error
            raise
        self._count_sent(1, len(payload))

    def _connected(self) -> socket.socket:
        """Return a connection that the controller has not ended: the kernel would take a frame."""
        while self._socket is not None and is_readable(self._socket):
            said = b""
            with contextlib.suppress(ConnectionError):  # it was reset, as by a controller's death
                said = self._socket.recv(_PIECE)  # what it says nobody expects
            if not said:
                self._disconnect()
        if self._socket is None:
            self._socket = socket.create_connection(self._address, _SENDING)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._is_closed = True
        self._disconnect()
