"""What does an exporter do for one of its clients?

Each has its own interval, its own place in the store and its own thread, so that a client that is
slow, or stops, holds up nobody else.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID, uuid4

from penstock.core.errors import Closed
from penstock.core.position import Position
from penstock.core.quota import PsiQuota, TokenBucket
from penstock.protocols.psi.chunks import Chunker
from penstock.protocols.psi.envelope import encode_message, encode_messages
from penstock.protocols.psi.metadata import StreamMetadata
from penstock.protocols.psi.store_books import psi_message
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.interfaces import Reader
    from penstock.core.quota import Quota
    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Address, DatagramSocket
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.handshake import ClientHello
    from penstock.protocols.psi.metadata import Record
    from penstock.protocols.psi.store_streams import StoreStreams

__all__ = ["ExporterStatistics", "Sender", "Session", "datagram_sender", "stream_sender"]

#: While nothing comes, look this often (seconds) whether the client is still there.
_PATIENCE: Final = 0.2
_MOST_AT_ONCE: Final = 512
#: Bytes read from the store, and given to a socket, at once.
_BYTES_AT_ONCE: Final = 1 << 20
_PIECE: Final = 1 << 16
#: A message is not sent before its stream was announced; if that cannot be, wait so long.
_ANNOUNCEMENT: Final = 30.0
#: Bytes a second that datagrams are sent at, with what may go in one burst: the receiver has no way
#: to slow us down. A small one costs it as much as one of that size.
_DATAGRAM_RATE: Final = 40_000_000
_BURST: Final = 1 << 16
_SMALL_DATAGRAM: Final = 1024
#: What is to be sent waits so long (seconds) at most for room in the kernel.
_FULL: Final = 1.0
#: Shorter sleeps (seconds) are not worth it; what is due is not forgotten.
_SHORTEST_SLEEP: Final = 0.001
#: What is counted for each client.
_COUNTED: Final = ("messages", "bytes", "skipped", "lost")


class ExporterStatistics(NamedTuple):
    """Books of an exporter. What a client was due was sent, or forgotten before its turn."""

    #: Clients with a session now, and since the start.
    clients: int
    clients_seen: int
    #: Connections turned away because there were too many, or for what they sent.
    denied: int
    malformed: int
    #: Messages sent to all clients, and their bytes with headers.
    messages: int
    bytes: int
    #: Messages that were passed over because they are outside of a client's interval.
    skipped: int
    #: Messages that the store had forgotten before a client's turn came.
    lost: int
    #: Seconds that writers of the store had to wait for clients.
    waited: float


class Session:
    """One client, from its hello until its meta connection ends."""

    def __init__(
        self, hello: ClientHello, peer: str, next_seq: int, sent_before: int | None = None
    ) -> None:
        """`next_seq` is where the store ended when the client came.

        `sent_before`: nothing from there on can have been sent to the client already.
        """
        self.id: UUID = uuid4()
        self.hello = hello
        self.sent_before = sent_before
        self.peer = peer
        #: Writers wait for a client from its hello on, although its messages take a moment more.
        self.next_seq = next_seq
        self.progress_at = time.monotonic()
        self.is_over = threading.Event()
        self.sender: Sender | None = None
        #: Records of the store's catalog that were sent.
        self.records_sent = 0
        self._announced: set[int] = set()
        self._has_news = threading.Condition()

    def announce(self, records: Iterable[Record]) -> None:
        """Note that the client was told of these."""
        with self._has_news:
            for record in records:
                self.records_sent += 1
                if isinstance(record, StreamMetadata):
                    self._announced.add(record.id)
            self._has_news.notify_all()

    def knows(self, id: int) -> bool:
        """Tell whether the client was told of a stream."""
        return id in self._announced

    def wait_for_announcement(self, id: int) -> bool:
        """Return when the client knows the stream; False if it left before."""
        if id in self._announced:
            return True
        deadline = time.monotonic() + _ANNOUNCEMENT
        with self._has_news:
            while id not in self._announced:
                if self.is_over.is_set() or time.monotonic() > deadline:
                    return False
                self._has_news.wait(_PATIENCE)
        return True

    def end(self) -> None:
        """Note that the client has left."""
        self.is_over.set()
        with self._has_news:
            self._has_news.notify_all()


class Sender:
    """Sends a client the messages of its interval, and the counts of what became of them."""

    def __init__(
        self,
        session: Session,
        store: StoreStreams,
        send: Callable[[list[PsiMessage]], int],
        quota: Quota | None,
        on_progress: Callable[[], None],
        has_gone: Callable[[], bool],
    ) -> None:
        self.session = session
        self._store = store
        self._send = send
        self._quota = quota
        self._on_progress = on_progress
        self._has_gone = has_gone
        #: Messages sent, their bytes with headers, and those outside of the interval.
        self.messages = self.bytes = self.skipped = 0
        #: Messages that the store had forgotten before their turn came.
        self.lost = 0
        #: Number in the store's queue of the next message, or where it ended when the client came.
        self.next_seq = session.next_seq
        #: Whether it is the former.
        self.is_placed = False
        self.is_over = False
        self.progress_at = time.monotonic()

    def counts(self) -> Counter[str]:
        """Return the counts, by their names in `ExporterStatistics`."""
        return Counter({name: getattr(self, name) for name in _COUNTED})

    def run(self, stop: threading.Event) -> None:
        """Send until the client leaves or the exporter stops."""
        hello = self.session.hello
        start_ns = hello.start_ns
        everything = start_ns is None or start_ns == MIN_NS
        place = Position.START if everything else Position.time(start_ns or 0)
        try:
            passed = self._received_before(place, stop)
            with self._store.reader(place) as reader:
                self._pass_over(reader, passed, stop)
                self._run(reader, stop)
        except Closed:
            return  # the store was closed

    def _received_before(self, place: Position, stop: threading.Event) -> int:
        """Return how many messages behind a place psi's importer has already.

        When it comes again, it names the originating time of the last message that it got, whose
        creation may be much later: all that was sent up to that message would come a second time,
        and end its pipeline.
        """
        resumed_ns = self.session.hello.resumed_ns
        if resumed_ns is None:
            return 0
        sent_before = self.session.sent_before
        read = received = 0
        with self._store.reader(place) as reader:
            while not stop.is_set() and (found := reader.read_many(_MOST_AT_ONCE)):
                for message in found:
                    if sent_before is not None and message.seq >= sent_before:
                        return received
                    read += 1
                    if message.time_ns == resumed_ns:
                        received = read
        return received

    def _pass_over(self, reader: Reader, count: int, stop: threading.Event) -> None:
        while count > 0 and not stop.is_set():
            found = reader.read_many(min(count, _MOST_AT_ONCE))
            if not found:
                return
            count -= len(found)
            self.skipped += len(found)
            self.next_seq, self.progress_at = found[-1].seq + 1, time.monotonic()

    def _run(self, reader: Reader, stop: threading.Event) -> None:
        limit = 1
        over = self.session.is_over
        while not (over.is_set() or stop.is_set()):
            found = reader.read_many(limit, _PATIENCE)
            books = reader.statistics()
            self.lost = books.lost
            if over.is_set():
                return
            if found:
                size = sum(message.size for message in found)
                if not self._pass_on([psi_message(message) for message in found], stop):
                    # It takes nothing on its meta connection: it has to come again, and ask again.
                    self.session.end()
                    return
                # As many as fit: large messages are read one by one.
                average = max(1, size // len(found))
                limit = max(1, min(_MOST_AT_ONCE, limit * 4, _BYTES_AT_ONCE // average))
                self.next_seq, self.is_placed = found[-1].seq + 1, True
                self.progress_at = time.monotonic()
                self._on_progress()
            else:
                self.progress_at = time.monotonic()
                if not self.is_placed and books.next_seq is not None:
                    self.next_seq, self.is_placed = books.next_seq, True
                if self._has_gone():
                    return

    def _pass_on(self, messages: list[PsiMessage], stop: threading.Event) -> bool:
        """Send what is in the client's interval; False if it was not told of a stream."""
        covers = self.session.hello.covers
        wanted = [message for message in messages if covers(message.creation_ns)]
        self.skipped += len(messages) - len(wanted)
        known: set[int] = set()
        batch: list[PsiMessage] = []
        size = 0
        most = _PIECE if self._quota is None else min(_PIECE, self._quota.at_once)
        for message in wanted:
            if message.source_id not in known:
                if not self.session.wait_for_announcement(message.source_id):
                    return False
                known.add(message.source_id)
            batch.append(message)
            size += len(message.payload) + 28
            if size >= most:
                self._give(batch, size, stop)
                batch, size = [], 0
        if batch:
            self._give(batch, size, stop)
        return True

    def _give(self, batch: list[PsiMessage], size: int, stop: threading.Event) -> None:
        if self._quota is not None:
            if isinstance(self._quota, PsiQuota):
                # It counts what psi stores: the envelope, and the payload in words of 4 bytes.
                size = sum(24 + len(m.payload) + -len(m.payload) % 4 for m in batch)
            delay = self._quota.delay(size, batch[-1].originating_ns)
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0:
                if self.session.is_over.is_set() or stop.wait(min(left, _PATIENCE)):
                    return
                self.progress_at = time.monotonic()  # it is us who wait, not the client
        self.bytes += self._send(batch)
        self.messages += len(batch)
        self.progress_at = time.monotonic()


def stream_sender(connection: Connection) -> Callable[[list[PsiMessage]], int]:
    """Return what sends messages by TCP or a named pipe."""

    def send(messages: list[PsiMessage]) -> int:
        data = encode_messages(messages)
        connection.send(data)
        return len(data)

    return send


def datagram_sender(sock: DatagramSocket, address: Address) -> Callable[[list[PsiMessage]], int]:
    """Return what sends messages by UDP to a client."""
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
