"""How does an importer receive on the two connections of a session?

Metadata comes by the meta connection; messages come by TCP, UDP or a named pipe.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from penstock.core.errors import ConnectionLost, Malformed, NotFound, PenstockError
from penstock.core.options import Duration, Options, Size
from penstock.core.worker import Worker
from penstock.protocols.connection import hang_up, tune
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.psi.chunks import Chunker, Unchunker
from penstock.protocols.psi.envelope import (
    MAX_PAYLOAD_BYTES,
    MessageDecoder,
    PsiMessage,
    decode_message,
)
from penstock.protocols.psi.handshake import (
    ClientHello,
    Intermission,
    MetaDecoder,
    ServerHello,
    Transport,
    encode_session_id,
    pipe_path,
)
from penstock.protocols.psi.metadata import RuntimeInfo, StreamMetadata
from penstock.protocols.psi.store.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.protocols.psi.chunks import UnchunkerStatistics
    from penstock.protocols.psi.handshake import MetaEvent
    from penstock.protocols.psi.importer.arrivals import Intake
    from penstock.protocols.psi.metadata import Record

__all__ = [
    "DataChannel",
    "DataReceiver",
    "DatagramChannel",
    "ImporterOptions",
    "MetaConnection",
    "StreamChannel",
    "fetch_stream",
    "open_channel",
]

log = logging.getLogger(__name__)

#: Seconds after which a call returns although nothing came.
_PATIENCE: Final = 0.1
_META_RECEIVED_AT_ONCE: Final = 65536
#: Seconds for an exporter to answer `fetch_stream`, at least.
_SHORTEST_HANDSHAKE: Final = 1.0
#: psi may close a data connection that is opened too soon: retry with the same session id.
_DATA_ATTEMPTS: Final = 8
_BETWEEN_ATTEMPTS: Final = 0.1
_DATA_RECEIVED_AT_ONCE: Final = 1 << 18
#: UDP may lose the session id: how often it is sent, and the seconds between.
_HELLOS: Final = 5
_BETWEEN_HELLOS: Final = 1.0
_TAKEN_AT_ONCE: Final = 256
#: Receives of fewer bytes than this, at shorter intervals (seconds), are batched by a short sleep.
_LITTLE: Final = 1 << 15
_OFTEN: Final = 0.002
_GATHERING: Final = 0.001


class ImporterOptions(Options):
    """Time limits of an importer, and its largest message."""

    #: Seconds to connect, and for each answer of the handshake.
    connect_timeout: Annotated[Duration, Field(gt=0)] = 5.0
    #: Seconds without a sign of life, of an exporter that gave some, until it is reconnected to.
    silence: Annotated[Duration, Field(gt=0)] = 15.0
    #: The longest back-off between attempts.
    longest_wait: Annotated[Duration, Field(gt=0)] = 5.0
    #: A larger message is refused.
    max_message: Annotated[Size, Field(ge=1, le=MAX_PAYLOAD_BYTES)] = MAX_PAYLOAD_BYTES
    #: The folder of .NET's named pipes outside of Windows.
    pipe_folder: str = "/tmp"  # noqa: S108 - .NET's own


class MetaConnection:
    """The connection on which an exporter announces its streams."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: ClientHello,
        options: ImporterOptions,
        *,
        expects_signs: bool = False,
    ) -> None:
        """Connect and send the hello at once: psi waits for it on its only thread.

        `expects_signs`: the exporter gave signs of life on earlier connections.

        :raises OSError: the exporter cannot be reached.
        """
        self._server = f"{host}:{port}"
        self._silence = options.silence
        # The handshake lasts until the first burst ends. After it, a time limit holds only for an
        # exporter that gave a sign of life: psi's own may be silent for hours.
        self._patience: float | None = options.connect_timeout
        self._socket = socket.create_connection((host, port), options.connect_timeout)
        try:
            tune(self._socket)
            self._socket.sendall(hello.to_bytes())
            self._socket.settimeout(_PATIENCE)
        except BaseException:
            self._socket.close()
            raise
        self._decoder = MetaDecoder()
        self._expects_signs = expects_signs
        self._burst: list[Record] = []
        self._bursts = 0
        #: By stream: when it was opened, and whether it is closed, from its latest record.
        self._told: dict[int, tuple[int, bool]] = {}
        #: The exporter gave a sign of life.
        self.has_sign = False

    def events(self, stop: threading.Event) -> Iterator[ServerHello | list[Record] | None]:
        """Yield the hello, then bursts of records, and None at intervals, until the end.

        :raises ConnectionLost: the exporter is silent for too long.
        :raises Malformed: the bytes are not psi's.
        :raises OSError: the connection broke.
        """
        heard_at = time.monotonic()
        while not stop.is_set():
            try:
                received = self._socket.recv(_META_RECEIVED_AT_ONCE)
            except TimeoutError:
                if self._patience is not None and time.monotonic() - heard_at > self._patience:
                    raise ConnectionLost(self._server, "it gives no sign of life") from None
                yield None
                continue
            if not received:
                return
            heard_at = time.monotonic()
            for event in self._decoder.feed(received):
                found = self._take(event)
                if found is not None:
                    yield found
            yield None

    def _take(self, event: MetaEvent) -> ServerHello | list[Record] | None:
        if isinstance(event, ServerHello):
            return event
        if not isinstance(event, Intermission):
            is_sign = bool(self._bursts) and self._is_sign(event)
            if isinstance(event, StreamMetadata):
                self._told[event.id] = event.opened_ns, event.is_closed
            if not self._bursts:
                self._burst.append(event)
                return None
            if is_sign:
                self.has_sign, self._patience = True, self._silence
            return [event]
        self._bursts += 1
        if self._bursts == 1:
            self._patience = self._silence if self._expects_signs else None
        burst, self._burst = self._burst, []
        return burst

    def _is_sign(self, record: Record) -> bool:
        """Tell whether a record is a sign of life: psi itself never repeats such a record."""
        if isinstance(record, StreamMetadata):
            return self._told.get(record.id) == (record.opened_ns, record.is_closed)
        return isinstance(record, RuntimeInfo)

    def close(self) -> None:
        hang_up(self._socket)


def fetch_stream(host: str, port: int, name: str, wait: float) -> StreamMetadata:
    """Return an exporter's metadata of a stream, without a data connection.

    psi's exporter serves one data connection at a time, and notices its end only when it next
    sends: a query must not take that place.

    :raises NotFound: the stream was not announced in time.
    :raises OSError: the exporter cannot be reached.
    """
    catalog = Catalog()
    deadline = time.monotonic() + wait
    options = ImporterOptions(connect_timeout=max(wait, _SHORTEST_HANDSHAKE))
    meta = MetaConnection(host, port, ClientHello(), options)
    try:
        has_all = False
        for event in meta.events(threading.Event()):
            if isinstance(event, list):
                has_all = True
                for record in event:
                    catalog.add(record)
            found = [stream for stream in catalog.streams.values() if stream.name == name]
            if found and has_all:
                return found[-1]
            if time.monotonic() >= deadline:
                break
    finally:
        meta.close()
    there = ", ".join(stream.name for stream in catalog.streams.values())
    raise NotFound(
        f"the exporter at {host}:{port} has no stream {name!r}",
        hint=f"there are: {there}" if there else "it has none yet; wait=1m waits for it",
    )


class DataReceiver:
    """Receives the messages of one session on a thread of its own."""

    def __init__(
        self,
        host: str,
        hello: ServerHello,
        options: ImporterOptions,
        intake: Intake,
        stop: threading.Event,
    ) -> None:
        """Connect to where the hello says, and hand messages to the intake until `stop`."""
        self.has_received = False
        #: What ended it before the exporter did.
        self.error: Exception | None = None
        self.datagrams_refused = self.datagrams_lost = 0
        self._host = host
        self._hello = hello
        self._options = options
        self._intake = intake
        self._stop = stop
        self._ended = threading.Event()
        self._channel: DataChannel | None = None
        self._worker = Worker("psi-import-data", self._run, log=log).start()

    @property
    def transport(self) -> Transport:
        return self._hello.transport

    @property
    def may_lose(self) -> bool:
        """Whether messages that do not come may be lost on their way."""
        channel = self._channel
        return isinstance(channel, DatagramChannel) and not channel.is_asking

    @property
    def is_over(self) -> bool:
        return not self._worker.is_alive

    def _run(self, worker: Worker) -> None:
        del worker  # it ends with the importer
        try:
            for _ in range(_DATA_ATTEMPTS):
                self._channel = open_channel(self._host, self._hello, self._options)
                try:
                    self._receive(self._channel)
                finally:
                    self._close(self._channel)
                if self.has_received or self._ended.is_set() or self._stop.is_set():
                    return
                self._stop.wait(_BETWEEN_ATTEMPTS)
        except (OSError, PenstockError) as error:
            self.error = error
            log.info("the data connection to %s: %s", self._host, error)
        except Exception as error:
            self.error = error
            log.exception("the data connection to %s", self._host)

    def _close(self, channel: DataChannel) -> None:
        channel.close()
        if isinstance(channel, DatagramChannel):
            books = channel.statistics()
            self.datagrams_refused += books.refused + channel.malformed
            self.datagrams_lost += books.lost

    def _receive(self, channel: DataChannel) -> None:
        while not self._stop.is_set():
            messages = channel.receive()
            if messages is None:
                return
            if messages:
                self.has_received = True
                self._intake.take_messages(messages)
            elif self._ended.is_set():
                return  # nothing is in flight

    def end(self, patience: float) -> None:
        """Receive what is in flight for up to `patience` seconds, and stop."""
        self._ended.set()
        if not self._worker.join(patience) and self._channel is not None:
            self._channel.close()
        # The next connection must not write to the store at the same time.
        self._worker.join()


class DataChannel(ABC):
    """Receives messages of an exporter."""

    #: Bytes received.
    bytes: int = 0

    @abstractmethod
    def receive(self) -> list[PsiMessage] | None:
        """Return the messages that came, none after a short wait; None at the end.

        :raises Malformed: the bytes are not psi's.
        :raises OSError: the connection broke.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it; a thread in `receive` returns."""


class StreamChannel(DataChannel):
    """A TCP connection, or a named pipe."""

    def __init__(self, sock: socket.socket, hello: ServerHello, max_message: int) -> None:
        self._socket = sock
        self._decoder = MessageDecoder(max_message)
        self._came_at = 0.0
        #: Receives are small and frequent.
        self._is_dripping = False
        sock.sendall(encode_session_id(hello.session))
        sock.settimeout(_PATIENCE)

    def receive(self) -> list[PsiMessage] | None:
        if self._decoder.fault is not None:
            raise self._decoder.fault
        if self._is_dripping:
            # psi writes each message by itself; waking up for each would slow psi down.
            time.sleep(_GATHERING)
        try:
            data = self._socket.recv(_DATA_RECEIVED_AT_ONCE)
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
    """Receives datagrams, and counts the lost ones."""

    def __init__(self, sock: DatagramSocket, hello: ServerHello, max_message: int) -> None:
        self._socket = sock
        self._hello = hello
        self._max_message = max_message
        self._unchunker = Unchunker(max_message)
        #: Malformed datagrams.
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

    @property
    def is_asking(self) -> bool:
        """Whether nothing came yet, and the session id is sent again."""
        return not self.bytes and (self._hellos < _HELLOS or time.monotonic() < self._next_hello)

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
    """Open the data connection that the exporter's hello names.

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
