"""How are the messages of a named set of streams kept, written and read again?

All streams of a store share one queue, so that their order is kept, as psi keeps it; the catalog
beside it tells of each stream. What psi stores itself is read by `PsiStoreReader`.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from penstock.core.closing import Closable
from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.position import Position
from penstock.protocols.psi.envelope import CLOSING_SEQUENCE_ID, MAX_PAYLOAD_BYTES, PsiMessage
from penstock.protocols.psi.metadata import RuntimeInfo
from penstock.protocols.psi.store_books import (
    StreamBooks,
    creation_attribute,
    psi_message,
    to_tick,
    uncounted,
)
from penstock.protocols.psi.store_counts import KEEP_EVERY, KeptCounts, keep_counts, load_counts
from penstock.protocols.psi.store_places import Place, new_place, temporary_place
from penstock.protocols.psi.store_streams import StoreStreams
from penstock.protocols.psi.ticks import MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.interfaces import BytesLike, Reader, Writer

__all__ = ["Store"]

_T = TypeVar("_T", bound="Sequence[Any]")

#: A catalog is small: segments of a log that take little.
_CATALOG_OPTIONS: Final = {"segment": 4 << 20, "segment_slots": 4096, "sync": "batch"}
_READ_AT_ONCE: Final = 4096
#: What is appended without a look at the gates is at most this part of a ring.
_PARTS: Final = 8


class Store(StoreStreams, Closable):
    """A named set of streams. Any thread may append and add streams.

    One process writes; others may open it to read at the same time. Use `create`, `open` or
    `volatile`.
    """

    def __init__(self, place: Place, *, writable: bool, volatile: bool, temporary: bool) -> None:
        super().__init__(place.name, writable=writable)
        self.place = place
        self.is_volatile = volatile
        self._is_temporary = temporary
        #: Messages whose originating time was not behind the one before, and was moved there.
        self.times_moved = 0
        self._capacity: tuple[int, int] | None = None
        self._is_closed = False
        self._last_ns = MIN_NS
        self._writer: Writer | None = None
        #: Messages until the counts are kept again.
        self._until_kept = KEEP_EVERY

    # --- making and opening -----------------------------------------------------------------

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str,
        *,
        subdirectory: bool = False,
        volatile: bool = False,
        runtime: RuntimeInfo | None = None,
        started: bool = True,
        **options: object,
    ) -> Self:
        """Make a store; `options` are those of the log, or of the ring, that holds its messages.

        `started=False`: streams are announced without the time of their opening until `start`.

        :raises AlreadyExists: there is one.
        :raises StorageError: the operating system refuses.
        """
        place = new_place(root, name, subdirectory=subdirectory)
        if place.exists:
            raise AlreadyExists(
                f"there is a store at {place.folder}", hint="open it, or choose another name"
            )
        return cls._make(place, volatile, runtime, options, started=started)

    @classmethod
    def volatile(
        cls,
        name: str = "store",
        *,
        runtime: RuntimeInfo | None = None,
        started: bool = True,
        **options: object,
    ) -> Self:
        """Make a store in memory that ends with this process; the oldest messages make room."""
        place = temporary_place(name)
        try:
            return cls._make(
                place,
                True,
                runtime,
                {"sparse": True} | options,
                started=started,
                temporary=True,
            )
        except BaseException:
            place.remove()
            raise

    @classmethod
    def _make(
        cls,
        place: Place,
        volatile: bool,
        runtime: RuntimeInfo | None,
        options: dict[str, object],
        *,
        started: bool,
        temporary: bool = False,
    ) -> Self:
        place.make()
        open_writer(place.data_url(volatile=volatile), **options).close()
        store = cls(place, writable=True, volatile=volatile, temporary=temporary)
        store._is_started = started
        with contextlib.ExitStack() as undo:
            undo.callback(store._let_go)
            store._open_to_write()
            store._tell(runtime or RuntimeInfo())
            undo.pop_all()
        return store

    @classmethod
    def open(cls, folder: Path | str, *, writable: bool = False) -> Self:
        """Open a store that is there. To write, what is in it is counted first.

        :raises NotFound: there is none.
        :raises LockTimeout: another process writes to it.
        """
        place = Place(Path(folder))
        if not place.exists:
            raise NotFound(
                f"there is no store at {folder}",
                hint="a store of psi's own is read by penstock psi-store",
            )
        store = cls(place, writable=writable, volatile=place.is_volatile, temporary=False)
        with contextlib.ExitStack() as undo:
            undo.callback(store._let_go)
            store._catalog_reader = open_reader(place.catalog_url)
            store.refresh()
            if writable:
                store._catalog_reader.close()
                store._catalog_reader = None
                store._open_to_write()
                store._count_again()
            undo.pop_all()
        return store

    def _open_to_write(self) -> None:
        self._writer = open_writer(self.place.data_url(volatile=self.is_volatile))
        self._catalog_writer = open_writer(self.place.catalog_url, **_CATALOG_OPTIONS)

    def _count_again(self) -> None:
        """Learn how far the streams have come: from what was kept, and the messages behind it."""
        told = {id: books.announced for id, books in self._books.items()}
        self._books = {id: StreamBooks(uncounted(announced)) for id, announced in told.items()}
        with self.reader() as reader:
            kept = load_counts(self.place.folder, reader.bounds())
            if kept is not None and all(id in told for id in kept.streams):
                self._last_ns = kept.last_ns
                for id, counts in kept.streams.items():
                    self._books[id].restore(counts)
                reader.seek(kept.next)
            while messages := reader.read_many(_READ_AT_ONCE):
                for message in messages:
                    self._last_ns = max(self._last_ns, message.created_ns)
                    books = self._books.get(message.type)
                    if books is not None:
                        books.add(psi_message(message))
        for id, books in self._books.items():
            books.count = max(books.count, told[id].message_count)
            books.last_sequence = max(books.last_sequence, told[id].message_count)
        self._keep_counts()

    def _keep_counts(self) -> None:
        """Keep how far the streams have come, so that opening need not read everything."""
        if self._writer is None or self._is_temporary:
            return
        self._until_kept = KEEP_EVERY
        with self.reader() as reader:
            bounds = reader.bounds()
        streams = {id: books.counts() for id, books in self._books.items()}
        keep_counts(self.place.folder, KeptCounts(bounds.epoch, bounds.end, self._last_ns, streams))

    # --- messages ---------------------------------------------------------------------------

    def append(
        self,
        id: int,
        payload: BytesLike,
        originating_ns: int | None = None,
        creation_ns: int | None = None,
    ) -> PsiMessage:
        """Append a message of ours, with the next number of its stream, and return it.

        psi's streams go forward: an originating time that is not behind the one before is moved
        there, and counted in `times_moved`.

        :raises MessageTooLarge: psi, or the ring, cannot hold it.
        :raises UnknownStream: there is no such stream.
        :raises Closed: the stream was ended, or the store closed.
        """
        for gate in self.gates:
            gate.wait(1, len(payload))
        with self._lock:
            books = self._open_books(id)
            message = self._next_message(books, payload, originating_ns, creation_ns)
            self._append(message, books)
            return message

    def append_many(self, id: int, posts: Sequence[tuple[bytes, int | None]]) -> None:
        """Append messages of ours, each a payload and its originating time, as `append` does.

        :raises MessageTooLarge: psi, or the ring, cannot hold one; those before it are appended.
        """
        for part in self._parts(posts, payload_at=0) if self.gates else (posts,):
            for gate in self.gates:
                gate.wait(len(part), sum(len(payload) for payload, _ in part))
            with self._lock:
                books = self._open_books(id)
                for payload, originating_ns in part:
                    self._append(self._next_message(books, payload, originating_ns, None), books)

    def _open_books(self, id: int) -> StreamBooks:
        self.catalog.stream(id)
        books = self._books[id]
        if books.announced.is_closed:
            raise Closed(
                f"the stream {books.announced.name!r} was ended", hint="add it again first"
            )
        return books

    def _next_message(
        self,
        books: StreamBooks,
        payload: BytesLike,
        originating_ns: int | None,
        creation_ns: int | None,
    ) -> PsiMessage:
        if books.last_sequence + 1 >= CLOSING_SEQUENCE_ID:
            raise Unsupported("psi cannot count more messages", hint="begin another stream")
        now_ns = to_tick(time.time_ns() if creation_ns is None else creation_ns)
        moment = to_tick(now_ns if originating_ns is None else originating_ns)
        if books.last_originating_ns != MIN_NS and moment <= books.last_originating_ns:
            moment = books.last_originating_ns + NS_PER_TICK
            self.times_moved += 1
        # The clock may go back; psi seeks by this time.
        now_ns = max(now_ns, to_tick(self._last_ns)) if creation_ns is None else now_ns
        sequence = books.last_sequence + 1
        return PsiMessage(books.announced.id, sequence, moment, now_ns, bytes(payload))

    def append_messages(
        self, messages: Sequence[PsiMessage], done: list[PsiMessage] | None = None
    ) -> None:
        """Append messages as they came from elsewhere, with their numbers and times.

        `done` gets those that were appended, also when it raises.
        """
        for part in self._parts(messages) if self.gates else (messages,):
            for gate in self.gates:
                gate.wait(len(part), sum(len(message.payload) for message in part))
            with self._lock:
                for message in part:
                    self._append(message, self._books[message.source_id])
                    if done is not None:
                        done.append(message)

    def _parts(self, messages: Sequence[_T], payload_at: int = -1) -> Iterator[Sequence[_T]]:
        """Yield so few messages at a time that a gate can hold them up before a ring is full."""
        slots, size = self.capacity()
        first = held = 0
        for index, message in enumerate(messages):
            held += len(message[payload_at])
            if (index + 1 - first) * _PARTS >= slots or held * _PARTS >= size:
                yield messages[first : index + 1]
                first, held = index + 1, 0
        if first < len(messages):
            yield messages[first:]

    def _append(self, message: PsiMessage, books: StreamBooks) -> None:
        if self._writer is None:
            raise Closed(f"the store {self.name} is not open to be written")
        id, sequence, originating_ns, creation_ns, payload = message
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(len(payload), MAX_PAYLOAD_BYTES)
        appended_ns = max(creation_ns, self._last_ns)
        self._writer.write(
            payload,
            id,
            sequence,
            originating_ns,
            appended_ns,
            None,
            creation_attribute(creation_ns, appended_ns),
        )
        self._last_ns = appended_ns
        books.add(message)
        self._until_kept -= 1
        if self._until_kept <= 0:
            with contextlib.suppress(PenstockError):  # then opening takes longer
                self._keep_counts()

    def reader(
        self, start: Position = Position.START, *, id: int | None = None, **options: object
    ) -> Reader:
        """Open a reader of all messages, or of those of one stream; see `psi_message`."""
        url = self.place.data_url(volatile=self.is_volatile)
        return open_reader(url, start, type=id, **options)

    def newest_seq(self) -> int:
        """Return the number in the queue of the newest message; -1 if there was none yet."""
        with self._lock:
            seq = None if self._writer is None else self._writer.statistics().last_seq
        return -1 if seq is None else seq

    def reached(self, id: int) -> tuple[int, int, int | None]:
        """Return where the queue ends, and the numbers of a stream's last and first message."""
        with self._lock:
            books = self._books[id]
            return self.newest_seq() + 1, books.last_sequence, books.first_sequence

    def capacity(self) -> tuple[int, int]:
        """Return the messages and bytes that a ring holds; of a log, those of a segment."""
        if self._capacity is None:
            info = describe(self.place.data_url(volatile=self.is_volatile))
            self._capacity = info.slots, info.buffer_size
        return self._capacity

    def flush(self) -> None:
        """Hand over to the disk what was appended."""
        with self._lock:
            if self._writer is not None:
                self._writer.flush()
                self._keep_counts()

    def close(self) -> None:
        """Give everything back; one in memory is gone then. Closing twice is fine."""
        with self._changed:
            if self._is_closed:
                return
            with contextlib.suppress(PenstockError):  # then opening takes longer
                self._keep_counts()
            self._let_go()

    def _let_go(self) -> None:
        """Close all parts, also when one cannot be synced."""
        with self._changed, contextlib.ExitStack() as closing:
            self._is_closed = True
            self._changed.notify_all()
            if self._is_temporary:
                closing.callback(self.place.remove)
            for part in (self._catalog_reader, self._catalog_writer, self._writer):
                if part is not None:
                    closing.callback(part.close)
            self._writer = self._catalog_writer = self._catalog_reader = None
