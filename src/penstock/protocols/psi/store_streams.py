"""What is known of the streams of a store, and who hears of it?

The catalog is all that was ever told of the streams, in order: by a writer here, or by another
process that writes. What was appended since is in the books of each stream.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from penstock.core.errors import InvalidOption, Unsupported
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.codecs import known_schemas, qualify
from penstock.protocols.psi.metadata import StreamMetadata, decode_record, encode_record
from penstock.protocols.psi.store_books import StreamBooks, StreamInStore, reopened
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position
    from penstock.protocols.psi.metadata import Record, TypeSchema

__all__ = ["Gate", "StoreStreams"]

_READ_AT_ONCE = 4096


class Gate(Protocol):
    """Whoever may hold up all writers of a store, such as an exporter that cannot keep up."""

    def wait(self, messages: int, size: int) -> None:
        """Return when so many messages, of so many bytes together, may be appended."""
        ...


class StoreStreams(ABC):
    """The streams of a store, ours or psi's: all that an exporter needs. For any thread."""

    #: The oldest messages make room for new ones.
    is_volatile = False

    def __init__(self, name: str, *, writable: bool) -> None:
        self.name = name
        self.is_writable = writable
        #: Hold up whoever appends.
        self.gates: list[Gate] = []
        #: All that was ever told of its streams, in order.
        self.records: list[Record] = []
        self.catalog = Catalog()
        self._books: dict[int, StreamBooks] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_started = True
        self._catalog_writer: Writer | None = None
        self._catalog_reader: Reader | None = None

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

    # --- messages ---------------------------------------------------------------------------

    @abstractmethod
    def reader(self, start: Position) -> Reader:
        """Open a reader of the messages of all streams, in order; see `psi_message`."""

    @abstractmethod
    def newest_seq(self) -> int:
        """Return the number of the newest message; -1 where there is none, or it is not known."""

    @abstractmethod
    def capacity(self) -> tuple[int, int]:
        """Return the messages and bytes that a ring holds; of a log, those of a segment."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice is fine."""
