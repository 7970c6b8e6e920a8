"""How are the streams of a store sent to psi's importers, and to ours?"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.core.closing import Closable
from penstock.core.options import parse_options
from penstock.core.quota import PsiQuota, TokenBucket, parse_quota
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.protocols.psi.decoding import hear_one
from penstock.protocols.psi.exporter_doors import StreamDoor, open_door
from penstock.protocols.psi.exporter_pressure import BackPressure
from penstock.protocols.psi.exporter_sessions import (
    ExporterStatistics,
    Sender,
    Session,
    datagram_sender,
    stream_sender,
)
from penstock.protocols.psi.exporter_streams import Exporter
from penstock.protocols.psi.handshake import (
    ClientHelloDecoder,
    ServerHello,
    SessionIdDecoder,
    Transport,
)
from penstock.protocols.psi.meta_channel import encode_burst
from penstock.protocols.psi.metadata import frame_record
from penstock.protocols.psi.options import ExporterOptions
from penstock.protocols.psi.store_opening import open_or_make
from penstock.protocols.psi.store_set import Store
from penstock.protocols.psi.store_streams import StoreStreams
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

__all__ = ["ExporterStatistics", "RemoteExporter"]

log = logging.getLogger(__name__)

_TRANSPORTS: Final = {"tcp": Transport.TCP, "udp": Transport.UDP, "pipe": Transport.NAMED_PIPES}
#: How often (seconds) a client is looked at, whether it has left.
_LOOK: Final = 0.1
#: Hosts of which it is remembered what was sent there.
_MOST_HOSTS: Final = 1000
#: Between the end of a data connection and that of its meta connection (seconds).
_LAST_WORDS: Final = 0.1
#: A data connection that ends is noticed by then (seconds), before another takes its place.
_ENDING: Final = 1.0


class RemoteExporter(Closable):
    """Sends the streams of a store to any number of clients at once.

    `store`: none makes one in memory; a path opens or makes a persisted one, or opens one of psi's
    own to be read; an existing store or exporter is served as it is, and stays open. A quota (bytes
    per second, of all clients together) holds the rate, with what `smoothing_window` seconds saved
    up.
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
        **options: object,
    ) -> None:
        """Listen at once; `options` are those of `ExporterOptions`.

        `name` is that of a store in the directory `store`; `subdirectory` makes a new one there,
        NAME.0000 and so on, as psi does.

        `quota` in place of a rate: `1MB/s:5s`, or `psi:1MB/s` for psi's own formula.

        :raises InvalidOption: an option is unknown, or its value does not fit.
        :raises StorageError: the address cannot be had.
        """
        given = {"transport": transport, "port": port} | options
        self.options = parse_options(URL.parse("psi://exporter", given), ExporterOptions)
        if quota is None and max_bytes_per_second is not None:
            quota = TokenBucket(max_bytes_per_second, smoothing_window)
        self._quota = parse_quota(quota) if isinstance(quota, str) else quota
        #: Whether closing ends and closes the store.
        self.exporter, self.owns_store = _exporter_of(store, name, subdirectory)
        self.store = self.exporter.store
        self._sessions: dict[UUID, Session] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._seen = 0
        #: By host, the first message that no client there was sent; and where the store ended when
        #: this exporter began: clients come from one that was here before.
        self._sent_to: dict[str, int] = {}
        self._began_at = self.store.newest_seq() + 1 if self.store.is_writable else None
        self._past: Counter[str] = Counter()
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
            self._door = open_door(options, self._serve_data, self._serve_datagrams)
        except BaseException:
            for each in meta:
                each.close()
            raise
        self._meta = StreamDoor("psi-meta", meta, options, self._serve_meta)
        log.info("exporting %s at %s", self.store.name, self.address)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._meta.server.port

    @property
    def address(self) -> str:
        """`host:port`, for people."""
        return f"{self.options.host}:{self.port}"

    @property
    def data_port(self) -> int | None:
        """The port of the data connections; None of a named pipe."""
        return self._door.port

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
        # Known before the client hears of it: it may come with its data connection at once.
        with self._lock:
            self._seen += 1
            self._sessions[session.id] = session
        if self._pressure is not None:
            self._pressure.add(session)  # until its data connection is there
        try:
            connection.send(self._hello(session).to_bytes())
            self._tell(session, connection)
        finally:
            # The messages end first: what the client comes again for is behind those it has taken.
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
        return ServerHello(session.id, transport, port, self._door.pipe)

    def _tell(self, session: Session, connection: Connection) -> None:
        """Send what is told of streams, and signs of life while nothing is.

        A sign is the record of a stream that the client knows, with no intermission behind it: for
        that psi's importer would open one more data connection each time. It is one of a stream
        because psi appends each record of another kind to its catalog, of which it can read no more
        than one extent.
        """
        keep_alive = self.options.keep_alive or None
        told_at = -math.inf  # the first at once, so that it is known that there are signs
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
        """Return the streams with more messages than before, so that a client sees it is behind.

        If there are none, it is any that the client knows.
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
            # psi's importer opens one more with each burst of metadata, and needs none of them.
            log.debug("psi: %s has its data connection already", connection.peer)
            return
        self._run(session, stream_sender(connection), connection.has_left)

    def _is_free(self, session: Session) -> bool:
        """Tell whether a session has no data connection, or one that is just ending."""
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
            quota = PsiQuota(quota.rate, quota.window)  # psi looks at each client by itself
        sender = Sender(session, self.store, send, quota, progress, has_gone)
        with self._lock:
            if session.sender is not None and not session.sender.is_over:
                return  # another connection was quicker
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
        """Add the counts of a sender that is over to those of the past."""
        if sender is not None:
            self._past += sender.counts()
            sender.session.sender = None
            self._note_sent(sender)

    def _note_sent(self, sender: Sender) -> None:
        if sender.messages:
            host = _host(sender.session.peer)
            self._sent_to[host] = max(self._sent_to.pop(host, 0), sender.next_seq)
            if len(self._sent_to) > _MOST_HOSTS:
                del self._sent_to[next(iter(self._sent_to))]  # who has not been here for longest

    def _sent_before(self, peer: str) -> int | None:
        """Return from where on nothing was sent to a client's host; None: that is not known."""
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
            # With datagrams the client would not notice: it has to come again, and ask again.
            log.info("psi: %s can no more be sent to: %s", session.peer, error)
            session.end()

    # --- the whole --------------------------------------------------------------------------

    def statistics(self) -> ExporterStatistics:
        """Return what was sent so far."""
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
                self._meta.denied + self._door.denied,
                self._meta.malformed + self._door.malformed,
                sums["messages"],
                sums["bytes"],
                sums["skipped"],
                sums["lost"],
                self._pressure.waited if self._pressure else 0.0,
            )

    def drain(self, timeout: float) -> bool:
        """Wait until every client has what it is due; False when the time is over."""
        deadline = time.monotonic() + timeout
        while True:
            end = self.store.newest_seq() + 1
            with self._lock:
                sessions = list(self._sessions.values())
            if all(
                session.records_sent >= len(self.store.records)
                and session.sender is not None
                and session.sender.is_placed
                and session.sender.next_seq >= end
                for session in sessions
            ):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def _say_what_goes(self, *, is_drained: bool) -> None:
        """Say what is gone with a store in memory, and nobody or not everybody got."""
        messages = self.store.newest_seq() + 1
        if not self.store.is_volatile or not messages:
            return
        if not self._seen:
            log.warning(
                "%s is closed before anybody came: %s messages are gone with it; store=DIRECTORY "
                "keeps them",
                self.address,
                f"{messages:,}",
            )
        elif not is_drained:
            with self._lock:
                places = [session.sender or session for session in self._sessions.values()]
            lacking = messages - min((place.next_seq for place in places), default=messages)
            log.warning(
                "%s is closed before all clients got everything: up to %s messages are gone; "
                "linger= waits longer",
                self.address,
                f"{lacking:,}",
            )

    def close(self, linger: float = 2.0) -> None:
        """Stop. A store of its own is ended: clients hear it, and have so long to get the rest.

        Closing twice is fine.
        """
        if self._is_closed:
            return
        if self._pressure is not None:
            self._pressure.open()
        if self.owns_store:
            self.exporter.close()
            self._say_what_goes(is_drained=self.drain(linger))
        self._stop.set()
        # The messages first: psi's importer comes again when its meta connection ends, and asks for
        # what is behind those that it has taken by then.
        self._door.close()
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
    """Return the exporter to use, and whether its store is ours to close."""
    if isinstance(store, Exporter):
        return store, False
    if isinstance(store, StoreStreams):
        return Exporter(store), False
    if store is None:
        return Exporter(Store.volatile(name or "exporter")), True
    return Exporter(open_or_make(store, name, subdirectory=subdirectory)), True
