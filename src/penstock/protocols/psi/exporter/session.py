"""How does an exporter send one of its clients the messages of its replay interval?

Each client has its own interval, position in the store and thread, so that a slow client does not
delay the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID, uuid4

from penstock.core.errors import Closed
from penstock.core.position import Position
from penstock.core.quota import PsiQuota
from penstock.protocols.psi.metadata import StreamMetadata
from penstock.protocols.psi.store.catalog import psi_message
from penstock.protocols.psi.ticks import MIN_NS
from penstock.queue.groups.settled import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.core.quota import Quota
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.handshake import ClientHello
    from penstock.protocols.psi.metadata import Record
    from penstock.protocols.psi.store.catalog import StoreStreams

__all__ = ["ExporterStatistics", "Sender", "Session", "Taken"]

#: Seconds between checks whether the client is still there.
_LOOK: Final = 0.2
_MOST_AT_ONCE: Final = 512
#: Bytes read from the store, and written to a socket, at once.
_BYTES_AT_ONCE: Final = 1 << 20
_PIECE: Final = 1 << 16
#: Seconds that a message waits for the announcement of its stream.
_ANNOUNCEMENT: Final = 30.0
#: What is counted for each client.
_COUNTED: Final = ("messages", "bytes", "skipped", "lost")


class ExporterStatistics(NamedTuple):
    """Counters of an exporter. Each message that a client requested was sent, or is lost."""

    #: Clients with a session now, and since the start.
    clients: int
    clients_seen: int
    #: Connections refused because there were too many, or for their bytes.
    denied: int
    malformed: int
    #: Messages sent to all clients, and their bytes with headers.
    messages: int
    bytes: int
    #: Messages outside of a client's interval.
    skipped: int
    #: Messages that were overwritten before they were sent.
    lost: int
    #: Seconds that writers of the store waited for clients.
    waited: float
    #: Messages of a store in memory that no client got until it was closed.
    untaken: int


class Taken:
    """Which messages of each stream at least one client got. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By stream, the ranges (first, end) of sequence numbers, in order and disjoint.
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, messages: Iterable[PsiMessage]) -> None:
        """Note that a client got these messages."""
        sequences: dict[int, list[int]] = {}
        for message in messages:
            sequences.setdefault(message.source_id, []).append(message.sequence_id)
        with self._lock:
            for id, numbers in sequences.items():
                self._ranges[id] = _merged(self._ranges.get(id, []), runs_of(numbers))

    def count(self, id: int) -> int:
        """Return the number of messages of a stream that somebody got."""
        with self._lock:
            return sum(end - first for first, end in self._ranges.get(id, ()))


def _merged(some: list[tuple[int, int]], more: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges (first, end), in order and disjoint."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(some + more):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((first, end))
    return merged


class Session:
    """One client, from its hello until its meta connection ends."""

    def __init__(
        self, hello: ClientHello, peer: str, next_seq: int, sent_before: int | None = None
    ) -> None:
        """`next_seq` is where the store ended when the client connected.

        `sent_before`: the first message that was not sent to the client's host before.
        """
        self.id: UUID = uuid4()
        self.hello = hello
        self.sent_before = sent_before
        self.peer = peer
        #: Writers wait for a client from its hello on, before its data connection is open.
        self.next_seq = next_seq
        self.progress_at = time.monotonic()
        self.is_over = threading.Event()
        self.sender: Sender | None = None
        #: Records of the store's catalog that were sent.
        self.records_sent = 0
        self._announced: set[int] = set()
        self._has_news = threading.Condition()

    def announce(self, records: Iterable[Record]) -> None:
        """Note that these records were sent."""
        with self._has_news:
            for record in records:
                self.records_sent += 1
                if isinstance(record, StreamMetadata):
                    self._announced.add(record.id)
            self._has_news.notify_all()

    def knows(self, id: int) -> bool:
        """Tell whether a stream was announced to the client."""
        return id in self._announced

    def wait_for_announcement(self, id: int) -> bool:
        """Wait until the stream is announced; False if the client left, or after a time limit."""
        if id in self._announced:
            return True
        deadline = time.monotonic() + _ANNOUNCEMENT
        with self._has_news:
            while id not in self._announced:
                if self.is_over.is_set() or time.monotonic() > deadline:
                    return False
                self._has_news.wait(_LOOK)
        return True

    def end(self) -> None:
        """End the session."""
        self.is_over.set()
        with self._has_news:
            self._has_news.notify_all()


class Sender:
    """Sends a client the messages of its interval, and counts them."""

    def __init__(
        self,
        session: Session,
        store: StoreStreams,
        send: Callable[[list[PsiMessage]], int],
        taken: Taken,
        quota: Quota | None,
        on_progress: Callable[[], None],
        has_gone: Callable[[], bool],
    ) -> None:
        self.session = session
        self._store = store
        self._send = send
        self._taken = taken
        self._quota = quota
        self._on_progress = on_progress
        self._has_gone = has_gone
        #: Messages sent, their bytes with headers, and messages outside of the interval.
        self.messages = self.bytes = self.skipped = 0
        #: Messages that were overwritten before they were sent.
        self.lost = 0
        #: The next message's number in the store's queue; until `is_placed`, where the store ended
        #: when the client connected.
        self.next_seq = session.next_seq
        self.is_placed = False
        #: The end of what was put on the connection, in the store's queue; 0: nothing was. It moves
        #: by pieces, where `next_seq` moves by all that was read at once.
        self.sent_end = 0
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
        """Return the number in the store's queue of the first message that psi's importer lacks.

        A reconnecting importer of psi names the originating time of its last message, while replay
        goes by creation time, which may be much later. Without this number it would get messages
        twice, which ends its pipeline.
        """
        resumed_ns = self.session.hello.resumed_ns
        if resumed_ns is None:
            return 0
        sent_before = self.session.sent_before
        received = 0
        with self._store.reader(place) as reader:
            while not stop.is_set() and (found := reader.read_many(_MOST_AT_ONCE)):
                for message in found:
                    if sent_before is not None and message.seq >= sent_before:
                        return received
                    if message.time_ns == resumed_ns:
                        received = message.seq + 1
        return received

    def _pass_over(self, reader: Reader, end: int, stop: threading.Event) -> None:
        """Skip the messages before a number in the store's queue."""
        while not stop.is_set() and (left := end - (reader.statistics().next_seq or 0)) > 0:
            found = reader.read_many(min(left, _MOST_AT_ONCE))
            if not found:
                return
            # More than was asked for, if some were overwritten meanwhile.
            rest = [message for message in found if message.seq >= end]
            if rest:
                reader.seek(rest[0].seq)
            self.skipped += len(found) - len(rest)
            self.next_seq = rest[0].seq if rest else found[-1].seq + 1
            self.progress_at = time.monotonic()

    def _run(self, reader: Reader, stop: threading.Event) -> None:
        limit = 1
        over = self.session.is_over
        while not (over.is_set() or stop.is_set()):
            found = reader.read_many(limit, _LOOK)
            books = reader.statistics()
            self.lost = books.lost
            if over.is_set():
                return
            if found:
                size = sum(message.size for message in found)
                if not self._pass_on(found, stop):
                    return
                # Fewer of large messages, so that one read stays below `_BYTES_AT_ONCE`.
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

    def _pass_on(self, found: Sequence[Message], stop: threading.Event) -> bool:
        """Send the messages in the client's interval; False if not all of them could be sent."""
        covers = self.session.hello.covers
        messages = [(message.seq + 1, psi_message(message)) for message in found]
        wanted = [(end, message) for end, message in messages if covers(message.creation_ns)]
        self.skipped += len(messages) - len(wanted)
        known: set[int] = set()
        batch: list[PsiMessage] = []
        size = end = 0
        most = _PIECE if self._quota is None else min(_PIECE, self._quota.at_once)
        for end, message in wanted:
            if message.source_id not in known:
                if not self.session.wait_for_announcement(message.source_id):
                    # It does not read its meta connection: it has to reconnect.
                    self.session.end()
                    return False
                known.add(message.source_id)
            batch.append(message)
            size += len(message.payload) + 28
            if size >= most:
                if not self._give(batch, size, end, stop):
                    return False
                batch, size = [], 0
        return not batch or self._give(batch, size, end, stop)

    def _give(self, batch: list[PsiMessage], size: int, end: int, stop: threading.Event) -> bool:
        """Send messages, the last of them before `end`; False if the end came while they waited."""
        if self._quota is not None:
            if isinstance(self._quota, PsiQuota):
                # It counts the bytes that psi stores: envelope, and payload padded to 4 bytes.
                size = sum(24 + len(m.payload) + -len(m.payload) % 4 for m in batch)
            delay = self._quota.delay(size, batch[-1].originating_ns)
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0:
                if self.session.is_over.is_set() or stop.wait(min(left, _LOOK)):
                    return False
                self.progress_at = time.monotonic()  # the quota waits, not the client
        self.sent_end = end  # before it is sent: the client may get it and the call still fail
        self.bytes += self._send(batch)
        self.messages += len(batch)
        self._taken.add(batch)
        self.progress_at = time.monotonic()
        return True
