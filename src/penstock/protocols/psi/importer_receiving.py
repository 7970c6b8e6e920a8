"""What does an importer hear on the two connections of a session?"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import ConnectionLost, Malformed, NotFound, PenstockError
from penstock.core.worker import Worker
from penstock.protocols.connection import hang_up, tune
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.handshake import ClientHello, ServerHello
from penstock.protocols.psi.importer_channels import DatagramChannel, open_channel
from penstock.protocols.psi.meta_channel import Intermission, MetaDecoder
from penstock.protocols.psi.metadata import RuntimeInfo, StreamMetadata
from penstock.protocols.psi.options import ImporterOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.protocols.psi.importer_channels import DataChannel
    from penstock.protocols.psi.importer_intake import Intake
    from penstock.protocols.psi.meta_channel import MetaEvent
    from penstock.protocols.psi.metadata import Record

__all__ = ["DataThread", "MetaConnection", "fetch_stream"]

log = logging.getLogger(__name__)

#: While nothing comes, a caller gets control back this often (seconds).
_LOOK: Final = 0.1
_RECEIVED_AT_ONCE: Final = 65536
#: Whoever is only asked gets so long (seconds) to answer, at least.
_SHORTEST_HANDSHAKE: Final = 1.0
#: psi may close a data connection that comes too soon: it is tried again with the same id.
_DATA_ATTEMPTS: Final = 8
_BETWEEN_ATTEMPTS: Final = 0.1


class MetaConnection:
    """The connection by which an exporter tells of its streams."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: ClientHello,
        options: ImporterOptions,
        *,
        expects_signs: bool = False,
    ) -> None:
        """Connect and say at once what is wanted: psi waits for it on its only thread.

        `expects_signs`: the exporter gave signs of life on earlier connections.

        :raises OSError: nobody is there.
        """
        self._server = f"{host}:{port}"
        self._silence = options.silence
        # Until the first burst is over it is the handshake; then only those who said once that
        # they are alive are held to it: psi itself says nothing for hours.
        self._patience: float | None = options.connect_timeout
        self._socket = socket.create_connection((host, port), options.connect_timeout)
        try:
            tune(self._socket)
            self._socket.sendall(hello.to_bytes())
            self._socket.settimeout(_LOOK)
        except BaseException:
            self._socket.close()
            raise
        self._decoder = MetaDecoder()
        self._expects_signs = expects_signs
        self._burst: list[Record] = []
        self._bursts = 0
        #: When each stream was opened, and whether it is closed, as was told last.
        self._told: dict[int, tuple[int, bool]] = {}
        #: The exporter said that it is alive.
        self.has_sign = False

    def events(self, stop: threading.Event) -> Iterator[ServerHello | list[Record] | None]:
        """Yield the hello, then each burst of records, and None now and then; ends with it.

        :raises ConnectionLost: it gives no sign of life.
        :raises Malformed: it is no psi.
        :raises OSError: it broke.
        """
        heard_at = time.monotonic()
        while not stop.is_set():
            try:
                received = self._socket.recv(_RECEIVED_AT_ONCE)
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
        """Tell whether a record is one that psi never tells again: that somebody is alive."""
        if isinstance(record, StreamMetadata):
            return self._told.get(record.id) == (record.opened_ns, record.is_closed)
        return isinstance(record, RuntimeInfo)

    def close(self) -> None:
        hang_up(self._socket)


def fetch_stream(host: str, port: int, name: str, wait: float) -> StreamMetadata:
    """Ask an exporter what it tells of a stream, without a data connection.

    psi's own exporter serves one of these at a time, and notices that it has ended only when it
    sends: whoever only wants to know must not take it.

    :raises NotFound: the stream did not appear in time.
    :raises OSError: nobody is there.
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


class DataThread:
    """Receives the messages of one connection."""

    def __init__(
        self, host: str, options: ImporterOptions, intake: Intake, stop: threading.Event
    ) -> None:
        self.hello: ServerHello | None = None
        self.has_received = False
        #: What ended it before the exporter did.
        self.error: Exception | None = None
        self.datagrams_refused = self.datagrams_lost = 0
        self._host = host
        self._options = options
        self._intake = intake
        self._stop = stop
        self._ended = threading.Event()
        self._worker: Worker | None = None
        self._channel: DataChannel | None = None

    @property
    def is_started(self) -> bool:
        return self._worker is not None

    @property
    def is_over(self) -> bool:
        return self._worker is not None and not self._worker.is_alive

    def start(self) -> None:
        """Connect, and receive.

        :raises Malformed: the exporter has not said where.
        """
        if self.hello is None:
            raise Malformed("psi meta connection", "first record", "a hello", "an intermission")
        self._worker = Worker("psi-import-data", self._run, log=log).start()

    def _run(self, worker: Worker) -> None:
        del worker  # it ends with the importer
        assert self.hello is not None
        try:
            for _ in range(_DATA_ATTEMPTS):
                self._channel = open_channel(self._host, self.hello, self._options)
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
                return  # no more is on its way

    def end(self, patience: float) -> None:
        """Take what is still on its way, while it comes, and stop."""
        self._ended.set()
        if self._worker is None:
            return
        if not self._worker.join(patience) and self._channel is not None:
            self._channel.close()
        # The next connection must not write to the store at the same time.
        self._worker.join()
