"""How is a named set of streams kept, written to and read again?

All streams of a store share one queue, so that their order is kept, as psi keeps it; the catalog
beside it tells of each stream. What psi stores itself is read by `PsiStoreReader`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    InvalidOption,
    MessageTooLarge,
    NotFound,
    Unsupported,
)
from penstock.core.position import Position
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.codecs import known_schemas, qualify
from penstock.protocols.psi.envelope import CLOSING_SEQUENCE_ID, MAX_PAYLOAD_BYTES, PsiMessage
from penstock.protocols.psi.metadata import (
    RuntimeInfo,
    StreamMetadata,
    decode_record,
    encode_record,
)
from penstock.protocols.psi.store_books import (
    StreamBooks,
    StreamInStore,
    creation_attribute,
    psi_message,
    reopened,
    to_tick,
    uncounted,
)
from penstock.protocols.psi.store_places import Place, new_place, temporary_place
from penstock.protocols.psi.ticks import MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from penstock.core.interfaces import BytesLike, Reader, Writer
    from penstock.protocols.psi.metadata import Record, TypeSchema

__all__ = ["Gate", "Store"]

#: A catalog is small: segments of a log that take little.
_CATALOG_OPTIONS: Final = {"segment": 4 << 20, "segment_slots": 4096, "sync": "batch"}
_READ_AT_ONCE: Final = 4096
#: What is appended without a look at the gates is at most this part of a ring.
_PARTS: Final = 8


class Gate(Protocol):
    """Whoever may hold up all writers of a store, such as an exporter that cannot keep up."""

    def wait(self, messages: int, size: int) -> None:
        """Return when so many messages, of so many bytes together, may be appended."""
        ...


class Store:
    """A named set of streams. Any thread may append and add streams.

    One process writes; others may open it to read at the same time. Use `create`, `open` or
    `volatile`.
    """

    def __init__(self, place: Place, *, writable: bool, volatile: bool, temporary: bool) -> None:
        self.place = place
        self.is_volatile = volatile
        self.is_writable = writable
        self._is_temporary = temporary
        #: All that was ever told of its streams, in order.
        self.records: list[Record] = []
        self.catalog = Catalog()
        #: Hold up whoever appends.
        self.gates: list[Gate] = []
        #: Messages whose originating time was not behind the one before, and was moved there.
        self.times_moved = 0
        self._books: dict[int, StreamBooks] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._capacity: tuple[int, int] | None = None
        self._is_started = True
        self._is_closed = False
        self._last_ns = MIN_NS
        self._writer: Writer | None = None
        self._catalog_writer: Writer | None = None
        self._catalog_reader: Reader | None = None

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
        store._open_to_write()
        store._tell(runtime or RuntimeInfo())
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
        store._catalog_reader = open_reader(place.catalog_url)
        store.refresh()
        if writable:
            store._catalog_reader.close()
            store._catalog_reader = None
            store._open_to_write()
            store._count_again()
        return store

    def _open_to_write(self) -> None:
        self._writer = open_writer(self.place.data_url(volatile=self.is_volatile))
        self._catalog_writer = open_writer(self.place.catalog_url, **_CATALOG_OPTIONS)

    def _count_again(self) -> None:
        """Learn from the messages how far the streams have come."""
        told = {id: books.announced for id, books in self._books.items()}
        self._books = {id: StreamBooks(uncounted(announced)) for id, announced in told.items()}
        with self.reader() as reader:
            while messages := reader.read_many(_READ_AT_ONCE):
                for message in messages:
                    self._last_ns = max(self._last_ns, message.created_ns)
                    books = self._books.get(message.type)
                    if books is not None:
                        books.add(psi_message(message))
        for id, books in self._books.items():
            books.count = max(books.count, told[id].message_count)
            books.last_sequence = max(books.last_sequence, told[id].message_count)

    # --- streams ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.place.name

    def start(self, time_ns: int | None = None) -> None:
        """Tell that streams which were added before are open now, as a pipeline that starts."""
        with self._changed:
            self._is_started = True
            opened_ns = time.time_ns() if time_ns is None else time_ns
            for books in self._books.values():
                if books.announced.opened_ns == MIN_NS:
                    self._tell(books.announced._replace(opened_ns=opened_ns))

    def add_stream(
        self,
        name: str,
        type_name: str,
        *,
        id: int | None = None,
        schemas: Iterable[TypeSchema] | None = None,
    ) -> StreamMetadata:
        """Add a stream, or go on with the one that is there; connected clients hear of it.

        `type_name` is a name of .NET or of C#: `float`, `string`, `byte[]`. `schemas`: of types
        that .NET does not have itself.

        :raises InvalidOption: there is one of that name or id with another type.
        """
        type_name = qualify(type_name)
        with self._changed:
            found = next((b for b in self._books.values() if b.announced.name == name), None)
            if found is not None:
                if qualify(found.announced.type_name) != type_name:
                    raise InvalidOption("type", type_name, f"the stream {name!r} has another type")
                if found.announced.is_closed:
                    self._tell(reopened(found.metadata()))
                return found.announced
            if id is not None and id in self._books:
                raise InvalidOption("id", id, "another stream of the store has it")
            for schema in known_schemas(type_name) if schemas is None else schemas:
                if self.catalog.schemas.get(schema.id) != schema:
                    self._tell(schema)
            opened_ns = time.time_ns() if self._is_started else MIN_NS
            stream = StreamMetadata(
                name,
                max(self._books, default=-1) + 1 if id is None else id,
                type_name,
                opened_ns=opened_ns,
            )
            self._tell(stream)
            return stream

    def tell(self, record: Record) -> None:
        """Add a record that came from elsewhere, such as a type's schema."""
        with self._changed:
            self._tell(record)

    def end_stream(self, which: int | str, *, closed_ns: int | None = None) -> None:
        """Tell everybody that no more messages of a stream come. A second time is fine."""
        with self._changed:
            books = self._books[self.catalog.stream(which).id]
            if not books.announced.is_closed:
                self._tell(
                    books.metadata(closed_ns=time.time_ns() if closed_ns is None else closed_ns)
                )

    def end_streams(self) -> None:
        """Tell that of all streams."""
        with self._changed:
            for id in list(self._books):
                self.end_stream(id)

    def _tell(self, record: Record) -> None:
        if self._catalog_writer is None:
            raise Unsupported(
                f"the store {self.name} was opened to be read", hint="open it writable=True"
            )
        self._catalog_writer.write(encode_record(record, in_catalog=True))
        self._take_in(record)

    def _take_in(self, record: Record) -> None:
        with self._changed:
            self.catalog.add(record)
            self.records.append(record)
            if isinstance(record, StreamMetadata):
                books = self._books.get(record.id)
                if books is None:
                    self._books[record.id] = StreamBooks(record)
                else:
                    books.announced = record
                    if not self.is_writable:
                        self._books[record.id] = StreamBooks(record)
            self._changed.notify_all()

    def refresh(self) -> None:
        """Take in what another process that writes has told since."""
        with self._changed:
            if self._catalog_reader is not None:
                for message in self._catalog_reader.read_many(_READ_AT_ONCE):
                    self._take_in(decode_record(message.payload))

    def records_after(self, index: int, timeout: float) -> list[Record]:
        """Return what was told after so many records; wait for some."""
        with self._changed:
            self.refresh()
            if len(self.records) <= index:
                self._changed.wait(timeout)
                self.refresh()
            return self.records[index:]

    def metadata(self, id: int) -> StreamMetadata:
        """Return what is to be told of a stream now, with its counts."""
        with self._lock:
            books = self._books[id]
            return books.announced if books.announced.is_closed else books.metadata()

    def last_sequence(self, id: int) -> int:
        """Return the number of a stream's newest message; 0 if there is none."""
        with self._lock:
            return self._books[id].last_sequence

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
            self.catalog.stream(id)
            books = self._books[id]
            if books.announced.is_closed:
                raise Closed(
                    f"the stream {books.announced.name!r} was ended", hint="add it again first"
                )
            if books.last_sequence + 1 >= CLOSING_SEQUENCE_ID:
                raise Unsupported("psi cannot count more messages", hint="begin another stream")
            now_ns = to_tick(time.time_ns() if creation_ns is None else creation_ns)
            moment = to_tick(now_ns if originating_ns is None else originating_ns)
            if books.last_originating_ns != MIN_NS and moment <= books.last_originating_ns:
                moment = books.last_originating_ns + NS_PER_TICK
                self.times_moved += 1
            # The clock may go back; psi seeks by this time.
            now_ns = max(now_ns, to_tick(self._last_ns)) if creation_ns is None else now_ns
            message = PsiMessage(id, books.last_sequence + 1, moment, now_ns, bytes(payload))
            self._append(message, books)
            return message

    def append_messages(self, messages: Sequence[PsiMessage]) -> None:
        """Append messages as they came from elsewhere, with their numbers and times."""
        for part in self._parts(messages) if self.gates else (messages,):
            for gate in self.gates:
                gate.wait(len(part), sum(len(message.payload) for message in part))
            with self._lock:
                for message in part:
                    self._append(message, self._books[message.source_id])

    def _parts(self, messages: Sequence[PsiMessage]) -> Iterator[Sequence[PsiMessage]]:
        """Yield so few messages at a time that a gate can hold them up before a ring is full."""
        slots, size = self.capacity()
        first = held = 0
        for index, message in enumerate(messages):
            held += len(message.payload)
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

    def capacity(self) -> tuple[int, int]:
        """Return the messages and bytes that a ring holds; of a log, those of a segment."""
        if self._capacity is None:
            info = describe(self.place.data_url(volatile=self.is_volatile))
            self._capacity = info.slots, info.buffer_size
        return self._capacity

    # --- for people -------------------------------------------------------------------------

    def streams(self) -> list[StreamInStore]:
        """Return all streams, in the order in which they were added."""
        self.refresh()
        with self._lock:
            told = [(self.metadata(id)) for id in self._books]
        return [StreamInStore.of(stream) for stream in told]

    def time_range(self) -> tuple[int, int] | None:
        """Return the first and the last creation time of all streams; None of an empty store."""
        found = [
            (stream.first_creation_ns, stream.last_creation_ns)
            for stream in self.streams()
            if stream.first_creation_ns is not None and stream.last_creation_ns is not None
        ]
        if not found:
            return None
        return min(first for first, _ in found), max(last for _, last in found)

    def flush(self) -> None:
        """Hand over to the disk what was appended."""
        with self._lock:
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Give everything back; one in memory is gone then. Closing twice is fine."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for part in (self._writer, self._catalog_writer, self._catalog_reader):
                if part is not None:
                    with contextlib.suppress(Closed):
                        part.close()
            self._writer = self._catalog_writer = self._catalog_reader = None
            self._changed.notify_all()
        if self._is_temporary:
            self.place.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
