"""How do the streams of an exporter, psi's or ours, get here through broken connections?"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.errors import ConnectionLost, InvalidOption, NotFound, PenstockError, Unsupported
from penstock.core.interfaces import Closable
from penstock.core.options import parse_options
from penstock.core.position import Position
from penstock.core.retry import Backoff
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.psi.codecs.type_names import plain_name
from penstock.protocols.psi.errors import UnknownStream
from penstock.protocols.psi.handshake import DEFAULT_PORT, ClientHello, ServerHello, Transport
from penstock.protocols.psi.importer.arrivals import Arrivals, Intake
from penstock.protocols.psi.importer.connection import DataReceiver, ImporterOptions, MetaConnection
from penstock.protocols.psi.importer.streams import ImportedStream
from penstock.protocols.psi.store.lookup import open_or_make
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from penstock.protocols.psi.importer.arrivals import Gap
    from penstock.protocols.psi.metadata import StreamMetadata

__all__ = ["REPLAY_ALL", "ImporterStatistics", "RemoteImporter", "Replay", "unreachable"]

log = logging.getLogger(__name__)

#: All messages of the exporter, from the first one on.
REPLAY_ALL: Final = ClientHello.everything()
_Moment: TypeAlias = int | dt.datetime
#: An interval (start, end), only an end, or None: from the exporter's current time on.
Replay: TypeAlias = ClientHello | tuple[_Moment | None, _Moment | None] | _Moment | None
#: Seconds to receive what is in flight after the meta connection has ended.
_LAST_WORDS: Final = 2.0
#: Seconds without any message after which the likely reason is logged.
_UNSERVED: Final = 5.0
#: Connections without a sign of life after which none is expected any more: the exporter may have
#: been replaced by psi's own.
_SIGNS_FORGOTTEN: Final = 3


class ImporterStatistics(NamedTuple):
    """Counters of an importer. Each received message was stored, repeated, refused or unwanted."""

    #: Messages that were appended to the store.
    messages: int
    #: Messages that were redelivered after a reconnection, or out of order.
    repeated: int
    #: Messages of streams that were never announced, or too large for the store.
    refused: int
    #: Messages of streams that are not wanted.
    unwanted: int
    #: Messages whose payload is not of their stream's type; they are stored as they came.
    untrimmed: int
    #: Messages that did not come, by their sequence numbers.
    lost: int
    #: How often a stream was recreated, and counted from 1 again.
    restarts: int
    #: Connections, and attempts that failed or ended.
    connections: int
    failures: int
    #: UDP: malformed datagrams, and sets of chunks that were lost.
    datagrams_refused: int
    datagrams_lost: int
    #: The latest gaps, oldest first.
    gaps: tuple[Gap, ...]


class RemoteImporter(Closable):
    """Brings the streams of an exporter into a local store until it is closed.

    After an outage it reconnects and asks for what it may have missed. `store`: None creates one in
    memory; a path opens or creates one on disk, and resumes at its end; a store that is given, or
    that of another importer, is written to and stays open.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        replay: Replay = None,
        *,
        store: Store | RemoteImporter | Path | str | None = None,
        streams: Container[str] | None = None,
        name: str | None = None,
        subdirectory: bool | None = None,
        **options: object,
    ) -> None:
        """Start to connect; `streams`: the names of the streams to import, None: all.

        `name` names a store in the directory `store`; `subdirectory` creates a new one there.
        `options` are those of `ImporterOptions`.

        :raises InvalidOption: an option is unknown, or the interval is not valid.
        """
        self.host = host
        self.port = port
        self.options = parse_options(URL.parse("psi://importer", options), ImporterOptions)
        self.replay = _hello_of(replay)
        self.replay.to_bytes()  # raises if psi cannot take it
        self.store, self._owns_store = _store_of(store, name, subdirectory)
        self._arrivals = Arrivals(from_first=self.replay == REPLAY_ALL)
        for own in self.store.streams():
            if own.messages and own.last_creation_ns is not None:
                self._arrivals.resume(
                    own.name,
                    self.store.last_sequence(own.id),
                    own.last_originating_ns or MIN_NS,
                    own.last_creation_ns,
                )
        self._intake = Intake(self.store, self._arrivals, streams)
        self._connected = threading.Event()
        self._stop = threading.Event()
        self._connections = self._failures = 0
        self._datagrams_refused = self._datagrams_lost = 0
        #: Connections since the last sign of life; below 0: there was none yet.
        self._without_sign = -1
        self._is_explained = False
        #: Why the last connection ended or failed.
        self.last_error: Exception | None = None
        longest = self.options.longest_wait
        backoff = Backoff(initial=min(0.05, longest), maximum=longest)
        self._worker = Worker(f"psi-import-{port}", self._run, log=log, backoff=backoff).start()

    # --- for the program ----------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the exporter's streams are known and the data connection is open."""
        return self._connected.is_set()

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait for the connection; False after the timeout."""
        return self._connected.wait(timeout)

    def open_stream(
        self,
        name: str,
        type: str | None = None,
        *,
        timeout: float = 10.0,
        policy: DeliveryPolicy | str | None = None,
    ) -> ImportedStream:
        """Read a stream; wait until the exporter announces it.

        `policy`: a delivery policy between the store and the reader; without one all messages wait
        in the store.

        :raises NotFound: the exporter did not announce it in time.
        :raises InvalidOption: it has another type.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                stream = self.store.catalog.stream(name)
                break
            except UnknownStream:
                if time.monotonic() >= deadline or self._stop.is_set():
                    raise self._not_found(name) from None
            time.sleep(0.02)
        if type is not None and plain_name(stream.type_name) != plain_name(type):
            raise InvalidOption("type", type, f"the stream {name!r} is of {stream.type_name}")
        if isinstance(policy, str):
            policy = DeliveryPolicy.parse(policy)
        from_first = self._arrivals.from_first
        return ImportedStream(self.store, stream, from_first=from_first, policy=policy)

    def _not_found(self, name: str) -> PenstockError:
        where = f"{self.host}:{self.port}"
        if not self._connections:
            return unreachable(self.host, self.port, self.last_error)
        there = ", ".join(stream.name for stream in self._intake.remote.streams.values())
        return NotFound(
            f"the exporter at {where} has no stream {name!r}",
            hint=f"there are: {there}" if there else "it has none yet; wait=1m waits for it",
        )

    def why_nothing_came(self) -> str | None:
        """Return the likely reason why no message has arrived at all, or None.

        An exporter with signs of life is one of ours, which serves all clients at once.
        """
        if not self.connected or self._without_sign >= 0 or self._intake.has_received:
            return None
        return (
            "psi's own exporter serves one client at a time, and sees that one has left only when "
            "it next sends; is another one connected, or was a moment ago?"
        )

    def remote_stream(self, name: str) -> StreamMetadata:
        """Return the latest metadata that the exporter sent of a stream.

        :raises UnknownStream: it sent none.
        """
        return self._intake.remote.stream(name)

    def last_sequence(self, name: str) -> int:
        """Return the number of a stream's last message that came or is known to be missing."""
        return self._arrivals.last_sequence(name)

    def statistics(self) -> ImporterStatistics:
        """Return the counts so far."""
        arrivals = self._arrivals
        return ImporterStatistics(
            arrivals.taken,
            arrivals.repeated,
            self._intake.refused,
            self._intake.unwanted,
            self._intake.untrimmed,
            arrivals.lost,
            arrivals.restarts,
            self._connections,
            self._failures,
            self._datagrams_refused,
            self._datagrams_lost,
            arrivals.gaps(),
        )

    def close(self) -> None:
        """Disconnect, and close a store that was opened here. Idempotent."""
        self._stop.set()
        self._worker.stop(10)
        if self._owns_store:
            self.store.close()

    # --- connections --------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            before = self._arrivals.taken
            try:
                self._connect()
            except (OSError, PenstockError) as error:
                self.last_error = error
                log.info("the exporter at %s:%s: %s", self.host, self.port, error)
            except Exception as error:
                self.last_error = error
                log.exception("importing from %s:%s", self.host, self.port)
            self._connected.clear()
            self._failures += 1
            if self._arrivals.taken > before:
                worker.note_success()
            worker.back_off()

    def _hello(self) -> ClientHello:
        """Return the interval of what may have been missed."""
        resume_ns = self._arrivals.resume_ns
        if resume_ns is None:
            return self.replay.by_creation()
        wanted = self.replay.start_ns
        start_ns = resume_ns if wanted is None else max(resume_ns, wanted)
        hello = ClientHello.of(start_ns)._replace(end_ticks=self.replay.end_ticks)
        return hello.by_creation()

    def _connect(self) -> None:
        """Connect once, and receive until that connection ends."""
        meta = MetaConnection(
            self.host,
            self.port,
            self._hello(),
            self.options,
            expects_signs=0 <= self._without_sign < _SIGNS_FORGOTTEN,
        )
        self._intake.begin()
        hello: ServerHello | None = None
        data: DataReceiver | None = None
        try:
            for event in meta.events(self._stop):
                if isinstance(event, ServerHello):
                    hello = event
                elif event is not None:
                    self._intake.take_records(event)
                    if data is None:
                        assert hello is not None  # the first event
                        data = self._receive(hello)
                if data is not None and not self._check(meta, data):
                    return
        finally:
            if meta.has_sign:
                self._without_sign = 0
            elif self._without_sign >= 0:
                self._without_sign += 1
            meta.close()
            if data is not None:
                data.end(_LAST_WORDS)
                self._datagrams_refused += data.datagrams_refused
                self._datagrams_lost += data.datagrams_lost
                self._end_streams(data)

    def _receive(self, hello: ServerHello) -> DataReceiver:
        """Open the data connection, once the exporter's streams are known."""
        self._connections += 1
        self._intake.wake()
        data = DataReceiver(self.host, hello, self.options, self._intake, self._stop)
        self._connected.set()
        return data

    def _check(self, meta: MetaConnection, data: DataReceiver) -> bool:
        """Tell whether the data connection is still up.

        :raises ConnectionLost: it is half open, or ended by an error.
        """
        if data.is_over:
            if data.error is not None:
                raise data.error
            return False
        if meta.has_sign:
            self._without_sign = 0
        self._end_streams(data)
        self._explain_silence()
        if self._is_stuck(data):
            raise ConnectionLost(f"{self.host}:{self.port}", "messages stopped coming")
        return True

    def _explain_silence(self) -> None:
        if not self._is_explained and self._intake.silent_for > _UNSERVED:
            self._is_explained = True
            if (reason := self.why_nothing_came()) is not None and self.replay == REPLAY_ALL:
                log.warning("nothing comes from %s:%s: %s", self.host, self.port, reason)

    def _end_streams(self, data: DataReceiver) -> None:
        if not self._stop.is_set():
            self._intake.end_streams(self.replay, may_lose=data.may_lose)

    def _is_stuck(self, data: DataReceiver) -> bool:
        """Tell whether announced messages do not arrive: the connection is half open.

        By UDP some may be lost on their way; if none comes, the session id was.
        """
        is_by_udp = data.transport is Transport.UDP
        if self.replay.end_ns < MAX_NS or (is_by_udp and data.has_received):
            return False
        return (
            self._intake.silent_for > self.options.silence
            and (data.has_received or self.replay == REPLAY_ALL)
            and self._intake.is_behind()
        )


def unreachable(host: str, port: int, error: Exception | None) -> ConnectionLost:
    """Return the error for an exporter that does not answer."""
    where = f"{host}:{port}"
    return ConnectionLost(
        where,
        "no answer" if error is None else why_unreachable(error, host, port),
        hint="is a psi RemoteExporter running there? `penstock cp SOURCE "
        f"psi://{where}/NAME` is one; wait=1m waits longer",
    )


def _ns(moment: _Moment | None, otherwise: int) -> int:
    if moment is None:
        return otherwise
    return Position.time(moment).value


def _hello_of(replay: Replay) -> ClientHello:
    if replay is None or isinstance(replay, ClientHello):
        return replay if replay is not None else ClientHello()
    if isinstance(replay, tuple):
        start, end = replay
        return ClientHello.of(_ns(start, MIN_NS), _ns(end, MAX_NS))
    return ClientHello.of(None, _ns(replay, MAX_NS))


def _store_of(
    store: Store | RemoteImporter | Path | str | None, name: str | None, subdirectory: bool | None
) -> tuple[Store, bool]:
    """Return the store to write to, and whether it was opened here."""
    if isinstance(store, RemoteImporter):
        return store.store, False
    if isinstance(store, Store):
        return store, False
    if store is None:
        return Store.volatile(name or "importer"), True
    opened = open_or_make(store, name, subdirectory=subdirectory)
    if isinstance(opened, Store):
        return opened, True
    opened.close()
    raise Unsupported(f"{store} has files of psi, which are only read", hint="give another path")
