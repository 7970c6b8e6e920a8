"""How are the streams of a store sent to psi's importers, and to ours?"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from penstock.core.interfaces import Closable
from penstock.core.options import Duration, Options, parse_options
from penstock.core.quota import PsiQuota, TokenBucket, parse_quota
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.protocols.psi.exporter.session import ExporterStatistics, Sender, Session, Taken
from penstock.protocols.psi.exporter.streams import Exporter
from penstock.protocols.psi.exporter.transports import (
    StreamAcceptor,
    datagram_sender,
    open_acceptor,
    stream_sender,
)
from penstock.protocols.psi.handshake import (
    DEFAULT_PORT,
    ClientHelloDecoder,
    ServerHello,
    SessionIdDecoder,
    Transport,
    encode_burst,
)
from penstock.protocols.psi.metadata import frame_record
from penstock.protocols.psi.store.back_pressure import BackPressure
from penstock.protocols.psi.store.catalog import StoreStreams
from penstock.protocols.psi.store.lookup import open_or_make
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.wire import hear_one
from penstock.protocols.server import listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from uuid import UUID

    from penstock.core.quota import Quota
    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Address, DatagramSocket
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.metadata import Record

__all__ = ["ExporterOptions", "RemoteExporter"]

log = logging.getLogger(__name__)

_TRANSPORTS: Final = {"tcp": Transport.TCP, "udp": Transport.UDP, "pipe": Transport.NAMED_PIPES}
#: Seconds between checks whether a client has left.
_LOOK: Final = 0.1
#: Hosts for which the last message sent is remembered.
_MOST_HOSTS: Final = 1000
#: Seconds between the end of a data connection and the end of its meta connection.
_LAST_WORDS: Final = 0.1
#: Seconds within which the end of a data connection is noticed, before another replaces it.
_ENDING: Final = 1.0


class ExporterOptions(Options):
    """Where an exporter listens, and its limits."""

    host: str = "127.0.0.1"
    #: Of the meta connection; 0: any free port.
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    #: Of the data connections.
    transport: Literal["tcp", "udp", "pipe"] = "tcp"
    #: Of the data connections; 0: any free port. A fixed one can be opened in a firewall.
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: The data port that the hello names, where a router forwards another port to ours.
    told_data_port: Annotated[int | None, Field(ge=1, le=65535)] = None
    max_clients: Annotated[int, Field(ge=1, le=1000)] = 64
    #: Seconds for the hello, or the session id, to arrive.
    first_message: Annotated[Duration, Field(gt=0)] = 10.0
    #: Seconds without progress after which a client is disconnected.
    stalled: Annotated[Duration, Field(gt=0)] = 60.0
    #: End connections by a TCP reset: psi's importers notice no other end, and then reconnect.
    reset: bool = True
    #: Seconds between signs of life on the meta connection; 0: none.
    keep_alive: Duration = 5.0
    #: Messages that a client may lag before writers wait; None: half of a ring, no limit in a log.
    max_lag: Annotated[int | None, Field(ge=1)] = None
    #: Writers stop waiting for a client after this many seconds without progress.
    patience: Duration = 2.0


class RemoteExporter(Closable):
    """Sends the streams of a store to any number of clients.

    `store`: None creates one in memory; a path opens or creates one on disk, or opens psi's files
    to read them; a store or an exporter that is given is served, and stays open unless
    `owns_store`. A quota limits the bytes per second of all clients together; `smoothing_window` is
    its burst in seconds.
    """

    def __init__(
        self,
        store: StoreStreams | Exporter | Path | str | None = None,
        port: int | None = None,
        transport: str = "tcp",
        *,
        max_bytes_per_second: float | None = None,
        smoothing_window: float = 5.0,
        quota: Quota | str | None = None,
        name: str | None = None,
        subdirectory: bool | None = None,
        owns_store: bool = False,
        **options: object,
    ) -> None:
        """Listen; `options` are those of `ExporterOptions`.

        `name` names a store in the directory `store`; `subdirectory` creates a new one there,
        NAME.0000 and so on, as psi does. `owns_store`: closing also ends and closes a store that is
        given.

        `quota` instead of a rate: `1MB/s:5s`, or `psi:1MB/s` for psi's formula.

        :raises InvalidOption: an option is unknown, or its value is not valid.
        :raises StorageError: the address is not available.
        """
        given = {"transport": transport, "port": port} | options
        self.options = parse_options(URL.parse("psi://exporter", given), ExporterOptions)
        if quota is None and max_bytes_per_second is not None:
            quota = TokenBucket(max_bytes_per_second, smoothing_window)
        self._quota = parse_quota(quota) if isinstance(quota, str) else quota
        self.exporter, is_new = _exporter_of(store, name, subdirectory)
        #: Whether closing ends and closes the store.
        self.owns_store = owns_store or is_new
        self.store = self.exporter.store
        self._sessions: dict[UUID, Session] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._seen = 0
        #: By host, the number of the first message that was not sent there. `_began_at` is where
        #: the store ended at the start: clients may come from an exporter that ran before.
        self._sent_to: dict[str, int] = {}
        self._began_at = self.store.newest_seq() + 1 if self.store.is_writable else None
        self._past: Counter[str] = Counter()
        self._taken = Taken()
        #: By stream, the messages that went with the store; empty until it is closed.
        self._untaken: dict[int, int] = {}
        self._is_closed = False
        self._pressure = self._make_pressure()
        try:
            self._listen()
        except BaseException:
            if self.owns_store:
                self.store.close()
            raise

    def _make_pressure(self) -> BackPressure | None:
        max_lag, max_bytes = self.options.max_lag, None
        if self.store.is_volatile:
            slots, size = self.store.capacity()
            max_lag, max_bytes = max_lag or max(1, slots // 2), size // 2
        if max_lag is None or not self.store.is_writable:
            return None
        pressure = BackPressure(self.store, max_lag, max_bytes, self.options.patience)
        self.store.gates.append(pressure)
        return pressure

    def _listen(self) -> None:
        options = self.options
        meta = listen_tcp(options.host, options.port)
        try:
            self._data = open_acceptor(options, self._serve_data, self._serve_datagrams)
        except BaseException:
            for each in meta:
                each.close()
            raise
        self._meta = StreamAcceptor("psi-meta", meta, options, self._serve_meta)
        log.info("exporting %s at %s", self.store.name, self.address)

    @property
    def port(self) -> int:
        """The port of the meta connections."""
        return self._meta.server.port

    @property
    def address(self) -> str:
        """`host:port`, for people."""
        return f"{self.options.host}:{self.port}"

    @property
    def data_port(self) -> int | None:
        """The port of the data connections; None with a named pipe."""
        return self._data.port

    # --- the meta connection ----------------------------------------------------------------

    def _serve_meta(self, connection: Connection) -> None:
        hello = hear_one(connection, ClientHelloDecoder())
        if hello is None:
            return
        peer = connection.peer
        is_live = hello.start_ticks is None
        hello = hello.starting(time.time_ns())
        hello = hello.by_creation() if is_live else hello
        session = Session(hello, peer, self.store.newest_seq() + 1, self._sent_before(peer))
        # Registered before the client gets its id: its data connection may follow at once.
        with self._lock:
            self._seen += 1
            self._sessions[session.id] = session
        if self._pressure is not None:
            self._pressure.add(session)  # until its data connection is there
        try:
            connection.send(self._hello(session).to_bytes())
            self._tell(session, connection)
        finally:
            # The data connection ends first: the client then resumes after the messages it got.
            session.end()
            self._is_free(session)
            with self._lock:
                self._sessions.pop(session.id, None)
                self._settle(session.sender)
            if self._pressure is not None:
                self._pressure.discard(session)

    def _hello(self, session: Session) -> ServerHello:
        transport = _TRANSPORTS[self.options.transport]
        port = self.options.told_data_port or self.data_port
        return ServerHello(session.id, transport, port, self._data.pipe)

    def _tell(self, session: Session, connection: Connection) -> None:
        """Send the records of the catalog, and signs of life while there are none.

        A sign of life is the record of a stream that the client knows, without an intermission:
        after each intermission psi's importer opens one more data connection. It is a stream's
        record because psi's importer appends records of other kinds to its own catalog, of which it
        reads one extent at most.
        """
        keep_alive = self.options.keep_alive or None
        told_at = -math.inf  # the first at once: the importer then expects signs of life
        counts: dict[int, int] = {}
        while not session.is_over.is_set():
            records = self.store.records_after(session.records_sent, _LOOK)
            now = time.monotonic()
            if records:
                connection.send(encode_burst(records))
                session.announce(records)
            elif keep_alive is not None and now - told_at >= keep_alive:
                connection.send(b"".join(map(frame_record, self._signs(session, counts))))
                told_at = now
            if connection.has_left() or (self._is_closed and not records):
                return

    def _signs(self, session: Session, counts: dict[int, int]) -> list[Record]:
        """Return the streams with new messages, so that a client notices its lag.

        If there are none, it is one stream that the client knows.
        """
        known = [stream for stream in self.store.streams() if session.knows(stream.id)]
        news = [stream for stream in known if counts.get(stream.id) != stream.messages]
        counts.update((stream.id, stream.messages) for stream in news)
        news = [stream for stream in news if not stream.is_closed]
        return [self.store.metadata(stream.id) for stream in news or known[:1]]

    # --- the data connections ---------------------------------------------------------------

    def _serve_data(self, connection: Connection) -> None:
        id = hear_one(connection, SessionIdDecoder())
        session = None if id is None else self._sessions.get(id)
        if session is None:
            log.info("psi: %s has no session", connection.peer)
            return
        if not self._is_free(session):
            # psi's importer opens one more after each burst of metadata, and uses none of them.
            log.debug("psi: %s has its data connection already", connection.peer)
            return
        self._run(session, stream_sender(connection), connection.has_left)

    def _is_free(self, session: Session) -> bool:
        """Wait for a data connection that is ending; tell whether the session has none now."""
        deadline = time.monotonic() + _ENDING
        while (sender := session.sender) is not None and not sender.is_over:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK / 5)
        return True

    def _run(
        self,
        session: Session,
        send: Callable[[list[PsiMessage]], int],
        has_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        pressure = self._pressure

        def progress() -> None:
            if pressure is not None:
                pressure.progress()

        quota = self._quota
        if isinstance(quota, PsiQuota):
            quota = PsiQuota(quota.rate, quota.window)  # psi's formula is per client
        sender = Sender(session, self.store, send, self._taken, quota, progress, has_gone)
        with self._lock:
            if session.sender is not None and not session.sender.is_over:
                return  # another connection came first
            self._settle(session.sender)
            session.sender = sender
        if pressure is not None:
            pressure.add(sender)
            pressure.discard(session)
        try:
            sender.run(self._stop)
        finally:
            sender.is_over = True
            if pressure is not None:
                pressure.discard(sender)

    def _settle(self, sender: Sender | None) -> None:
        """Add the counts of a finished sender to the totals."""
        if sender is not None:
            self._past += sender.counts()
            sender.session.sender = None
            self._note_sent(sender)

    def _note_sent(self, sender: Sender) -> None:
        if sender.sent_end:
            host = _host(sender.session.peer)
            self._sent_to[host] = max(self._sent_to.pop(host, 0), sender.sent_end)
            if len(self._sent_to) > _MOST_HOSTS:
                del self._sent_to[next(iter(self._sent_to))]  # the host that was served longest ago

    def _sent_before(self, peer: str) -> int | None:
        """Return the number of the first message not sent to a client's host; None: unknown."""
        if self._began_at is None:
            return None
        with self._lock:
            for session in self._sessions.values():
                if session.sender is not None:
                    self._note_sent(session.sender)
            return self._sent_to.get(_host(peer), self._began_at)

    def _serve_datagrams(self, id: UUID, sock: DatagramSocket, address: Address) -> bool:
        session = self._sessions.get(id)
        if session is not None and session.sender is None:
            Worker(
                "psi-datagrams-client",
                lambda _: self._send_datagrams(session, sock, address),
                log=log,
            ).start()
        return session is not None

    def _send_datagrams(self, session: Session, sock: DatagramSocket, address: Address) -> None:
        try:
            self._run(session, datagram_sender(sock, address))
        except OSError as error:
            # By UDP the client does not notice: the end of its session makes it reconnect.
            log.info("psi: datagrams to %s fail: %s", session.peer, error)
            session.end()

    # --- the whole --------------------------------------------------------------------------

    def statistics(self) -> ExporterStatistics:
        """Return the counts so far."""
        with self._lock:
            sums = sum(
                (
                    session.sender.counts()
                    for session in self._sessions.values()
                    if session.sender is not None
                ),
                start=self._past,
            )
            return ExporterStatistics(
                len(self._sessions),
                self._seen,
                self._meta.denied + self._data.denied,
                self._meta.malformed + self._data.malformed,
                sums["messages"],
                sums["bytes"],
                sums["skipped"],
                sums["lost"],
                self._pressure.waited if self._pressure else 0.0,
                sum(self._untaken.values()),
            )

    def untaken(self, id: int) -> int:
        """Return how many messages of a stream no client got until the exporter was closed.

        0 before that, and of a store on the disk, which keeps them.
        """
        return self._untaken.get(id, 0)

    def drain(self, timeout: float) -> bool:
        """Wait until every client has all messages that it asked for; False after the timeout.

        Without clients, wait for one while there are messages in memory that nobody got.
        """
        deadline = time.monotonic() + timeout
        while True:
            end = self.store.newest_seq() + 1
            with self._lock:
                sessions = list(self._sessions.values())
            has_all = [
                session.records_sent >= len(self.store.records)
                and session.sender is not None
                and session.sender.is_placed
                and session.sender.next_seq >= end
                for session in sessions
            ]
            if all(has_all) if has_all else not self._left_in_memory():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def _left_in_memory(self) -> dict[int, int]:
        """Return the messages that no client got and that go with the store, by stream."""
        if not self.store.is_volatile:
            return {}
        left = {
            each.id: each.messages - self._taken.count(each.id) for each in self.store.streams()
        }
        return {id: count for id, count in left.items() if count > 0}

    def _tell_losses(self, *, is_drained: bool) -> None:
        """Log how many messages of a store in memory are lost because clients did not get them."""
        if self._untaken:
            log.warning(
                "%s is closed, and what nobody took is gone (messages: %s); linger= waits longer "
                "for somebody, store=DIRECTORY keeps them",
                self.address,
                f"{sum(self._untaken.values()):,}",
            )
        elif self.store.is_volatile and not is_drained:
            with self._lock:
                places = [session.sender or session for session in self._sessions.values()]
            end = self.store.newest_seq() + 1
            lacking = end - min((place.next_seq for place in places), default=end)
            log.warning(
                "%s is closed before all clients got everything: up to %s messages are gone; "
                "linger= waits longer",
                self.address,
                f"{lacking:,}",
            )

    def close(self, linger: float = 2.0) -> None:
        """Stop. An owned store is ended: clients are told, and get `linger` seconds for the rest.

        So long it also waits for somebody to come for messages in memory that nobody got.
        Idempotent.
        """
        if self._is_closed:
            return
        if self._pressure is not None:
            self._pressure.open()
        is_drained = True
        if self.owns_store:
            self.exporter.close()
            is_drained = self.drain(linger)
        self._stop.set()
        # The data connections end first: psi's importer reconnects when its meta connection ends,
        # and then asks for what follows the messages that it has taken.
        self._data.close()
        if self.owns_store:  # nobody gets more from here on
            self._untaken = self._left_in_memory()
            self._tell_losses(is_drained=is_drained)
        if self._sessions:
            time.sleep(_LAST_WORDS)
        self._is_closed = True
        self._meta.close()
        if self._pressure is not None:
            self.store.gates.remove(self._pressure)
        if self.owns_store:
            self.store.close()


def _host(peer: str) -> str:
    return peer.rpartition(":")[0]


def _exporter_of(
    store: StoreStreams | Exporter | Path | str | None, name: str | None, subdirectory: bool | None
) -> tuple[Exporter, bool]:
    """Return the exporter to use, and whether its store was opened here."""
    if isinstance(store, Exporter):
        return store, False
    if isinstance(store, StoreStreams):
        return Exporter(store), False
    if store is None:
        return Exporter(Store.volatile(name or "exporter")), True
    return Exporter(open_or_make(store, name, subdirectory=subdirectory)), True
