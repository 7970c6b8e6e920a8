"""Which streams and types does an exporter or a store have, and how far has each stream come?

A `Catalog` is the latest record of each stream and type. `StreamBooks` count what was appended to a
stream since its record. `StoreStreams` is both for a whole store, ours or psi's, with the order of
all records for exporters.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import InvalidOption, Malformed, Unsupported
from penstock.protocols.psi.codecs import CodecLibrary, known_schemas, qualify
from penstock.protocols.psi.envelope import PsiMessage
from penstock.protocols.psi.errors import UnknownStream
from penstock.protocols.psi.metadata import (
    RuntimeInfo,
    StreamFlags,
    StreamMetadata,
    TypeSchema,
    decode_record,
    encode_record,
)
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.message import Message
    from penstock.core.position import Position
    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.metadata import Record
    from penstock.protocols.psi.store.back_pressure import Gate

__all__ = [
    "COUNTS",
    "MAX_CATALOG_BYTES",
    "MAX_RECORDS",
    "Catalog",
    "StoreStreams",
    "StreamBooks",
    "StreamInStore",
    "creation_attribute",
    "psi_message",
    "reopened",
    "to_tick",
    "uncounted",
]

#: Streams and types of one peer, at most: a limit for untrusted peers.
MAX_RECORDS: Final = 100_000
#: Bytes of all of them, at most.
MAX_CATALOG_BYTES: Final = 1 << 26
_NAMES_TOLD: Final = 8
_CREATION_SIZE = 8
#: The counts of a stream: attributes of `StreamBooks`.
_COUNTED = (
    "count",
    "last_sequence",
    "size_sum",
    "latency_sum_ns",
    "first_creation_ns",
    "last_creation_ns",
    "first_originating_ns",
    "last_originating_ns",
)
COUNTS = len(_COUNTED)
_READ_AT_ONCE = 4096


class Catalog:
    """The latest record of each stream and each type. Records repeat; the last one holds."""

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_CATALOG_BYTES,
    ) -> None:
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.runtime: RuntimeInfo | None = None
        #: By id, in the order of their first records.
        self.streams: dict[int, StreamMetadata] = {}
        #: By id.
        self.schemas: dict[int, TypeSchema] = {}
        self._ids: dict[str, int] = {}
        self._bytes = 0
        self._library: CodecLibrary | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> bool:
        """Take a record; tell whether it is a new stream.

        :raises Malformed: there are too many, or they are too large.
        """
        match record:
            case RuntimeInfo():
                self.runtime = record
                return False
            case StreamMetadata():
                return self._add_stream(record)
            case TypeSchema():
                before = self.schemas.get(record.id)
                if before != record:
                    self._check_room(before, record)
                    self.schemas[record.id] = record
                    self._library = None
                return False

    def _add_stream(self, stream: StreamMetadata) -> bool:
        before = self.streams.get(stream.id)
        self._check_room(before, stream)
        if before is not None and self._ids.get(before.name) == stream.id:
            del self._ids[before.name]
        if stream.types != (() if before is None else before.types):
            self._library = None
        self.streams[stream.id] = stream
        self._ids[stream.name] = stream.id
        return before is None

    def _check_room(
        self, before: StreamMetadata | TypeSchema | None, record: StreamMetadata | TypeSchema
    ) -> None:
        size = self._bytes + _size(record) - (0 if before is None else _size(before))
        if before is None and len(self.streams) + len(self.schemas) >= self.max_records:
            expected = f"at most {self.max_records:,}"
            raise Malformed("psi catalog", "records", expected, "another one")
        if size > self.max_bytes:
            raise Malformed("psi catalog", "bytes", f"at most {self.max_bytes:,}", size)
        self._bytes = size

    def codec(self, stream: StreamMetadata | int | str) -> Codec:
        """Return the codec of a stream's messages, from the schemas that are known now.

        :raises UnknownStream: there is no such stream.
        """
        if isinstance(stream, (int, str)):
            stream = self.stream(stream)
        return self.library.codec(stream.type_name)

    @property
    def library(self) -> CodecLibrary:
        """The codecs of all types; replaced when another schema comes."""
        if self._library is None:
            types = [pair for stream in self.streams.values() for pair in stream.types]
            self._library = CodecLibrary(self.schemas.values(), types)
        return self._library

    def stream(self, which: int | str) -> StreamMetadata:
        """Return a stream by its id or its name.

        :raises UnknownStream: no stream has this id or name.
        """
        id = self._ids.get(which) if isinstance(which, str) else which
        found = None if id is None else self.streams.get(id)
        if found is None:
            names = [repr(stream.name) for stream in self.streams.values()]
            more = [f"{len(names) - _NAMES_TOLD} more"] if len(names) > _NAMES_TOLD else []
            raise UnknownStream(which, ", ".join(names[:_NAMES_TOLD] + more))
        return found

    def is_complete(self) -> bool:
        """Tell whether every stream is closed."""
        return bool(self.streams) and all(stream.is_closed for stream in self.streams.values())


def _size(record: StreamMetadata | TypeSchema) -> int:
    """Return roughly the bytes that a record takes in memory."""
    size = len(record.name) + len(record.type_name)
    if isinstance(record, StreamMetadata):
        names = sum(len(name) for _, name in record.types)
        return size + len(record.supplemental) + len(record.supplemental_type or "") + names
    members = sum(len(member.name) + len(member.type_name) + 64 for member in record.members)
    return size + len(record.serializer_type_name or "") + members


def _with_parts(type_name: str, schemas: Iterable[TypeSchema] | None) -> list[TypeSchema]:
    """Return the schemas of a stream's types: those of .NET's own types in it, then those given.

    psi's pipeline ends at an object of a type that it was not told of.
    """
    given = {schema.id: schema for schema in schemas or ()}
    members = (member.type_name for schema in given.values() for member in schema.members)
    found: dict[int, TypeSchema] = {}
    for name in (*members, type_name):
        found.update((schema.id, schema) for schema in known_schemas(name))
    return [schema for id, schema in found.items() if id not in given] + list(given.values())


def psi_message(message: Message) -> PsiMessage:
    """Return a message of a store's queue as psi has it.

    Its type is the stream's id, its subtype the sequence number. The append time of a queue never
    goes back; where psi's creation time does, it is in the attributes.
    """
    attributes, creation_ns = message.attributes, message.created_ns
    if attributes is not None and len(attributes) == _CREATION_SIZE:
        creation_ns = int.from_bytes(attributes, "little", signed=True)
    return PsiMessage(message.type, message.subtype, message.time_ns, creation_ns, message.payload)


def creation_attribute(creation_ns: int, appended_ns: int) -> bytes | None:
    """Return the attributes of a message whose creation time is not its append time."""
    if creation_ns == appended_ns:
        return None
    return creation_ns.to_bytes(_CREATION_SIZE, "little", signed=True)


class StreamInStore(NamedTuple):
    """A stream for display: its messages, bytes and times."""

    name: str
    id: int
    type_name: str
    messages: int
    bytes: int
    is_closed: bool
    first_creation_ns: int | None
    last_creation_ns: int | None
    first_originating_ns: int | None
    last_originating_ns: int | None

    @classmethod
    def of(cls, stream: StreamMetadata) -> Self:
        """Return the stream of a record."""
        first_creation, last_creation, first_originating, last_originating = (
            None if moment == MIN_NS else moment
            for moment in (
                stream.first_creation_ns,
                stream.last_creation_ns,
                stream.first_originating_ns,
                stream.last_originating_ns,
            )
        )
        return cls(
            stream.name,
            stream.id,
            stream.type_name,
            stream.message_count,
            stream.size_sum,
            stream.is_closed,
            first_creation,
            last_creation,
            first_originating,
            last_originating,
        )


class StreamBooks:
    """One stream: its latest record, and the counts of what was appended since."""

    def __init__(self, announced: StreamMetadata) -> None:
        self.announced = announced
        self.count = announced.message_count
        #: The sequence number of the newest message; psi counts from 1.
        self.last_sequence = announced.message_count
        #: That of the first one, if this process appended it; it is not saved.
        self.first_sequence: int | None = None
        self.size_sum = announced.size_sum
        self.latency_sum_ns = announced.latency_sum_ns
        self.first_creation_ns = announced.first_creation_ns
        self.last_creation_ns = announced.last_creation_ns
        self.first_originating_ns = announced.first_originating_ns
        self.last_originating_ns = announced.last_originating_ns

    def add(self, message: PsiMessage) -> None:
        """Count a message that was appended."""
        _, sequence, originating_ns, creation_ns, payload = message
        if self.first_creation_ns == MIN_NS:
            self.first_creation_ns, self.first_originating_ns = creation_ns, originating_ns
        if not self.count:
            self.first_sequence = sequence
        self.count += 1
        self.last_sequence = sequence
        self.size_sum += len(payload)
        self.latency_sum_ns += creation_ns - originating_ns
        self.last_creation_ns = creation_ns
        self.last_originating_ns = originating_ns

    def counts(self) -> tuple[int, ...]:
        """Return the counts to save; see `restore`."""
        return tuple(getattr(self, name) for name in _COUNTED)

    def restore(self, counts: Sequence[int]) -> None:
        """Resume from saved counts."""
        for name, value in zip(_COUNTED, counts, strict=True):
            setattr(self, name, value)

    def metadata(self, *, closed_ns: int | None = None) -> StreamMetadata:
        """Return the record of now; `closed_ns` closes the stream."""
        now = self.announced._replace(
            message_count=self.count,
            size_sum=self.size_sum,
            latency_sum_ns=self.latency_sum_ns,
            first_creation_ns=self.first_creation_ns,
            last_creation_ns=self.last_creation_ns,
            first_originating_ns=self.first_originating_ns,
            last_originating_ns=self.last_originating_ns,
        )
        if closed_ns is None:
            return now
        return now._replace(flags=now.flags | StreamFlags.CLOSED, closed_ns=closed_ns)


def to_tick(time_ns: int) -> int:
    """Return a time rounded down to psi's ticks of 100 ns."""
    return time_ns // NS_PER_TICK * NS_PER_TICK


def uncounted(stream: StreamMetadata) -> StreamMetadata:
    """Return the record of a stream without messages."""
    return stream._replace(
        message_count=0,
        size_sum=0,
        latency_sum_ns=0,
        first_creation_ns=MIN_NS,
        last_creation_ns=MIN_NS,
        first_originating_ns=MIN_NS,
        last_originating_ns=MIN_NS,
    )


def reopened(stream: StreamMetadata) -> StreamMetadata:
    """Return the record of a closed stream that is open again."""
    return stream._replace(flags=stream.flags & ~StreamFlags.CLOSED, closed_ns=MAX_NS)


class StoreStreams(ABC):
    """The streams of a store, ours or psi's, as an exporter needs them. For any thread."""

    #: The oldest messages are overwritten.
    is_volatile = False

    def __init__(self, name: str, *, writable: bool, started: bool = True) -> None:
        self.name = name
        self.is_writable = writable
        #: Writers pass all of them before they append.
        self.gates: list[Gate] = []
        #: All records, in order.
        self.records: list[Record] = []
        self.catalog = Catalog()
        self._books: dict[int, StreamBooks] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_started = started
        self._catalog_writer: Writer | None = None
        self._catalog_reader: Reader | None = None

    def start(self, time_ns: int | None = None) -> None:
        """Announce that the streams added so far are open, as psi does when a pipeline starts."""
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
        """Add a stream, or reopen the one of that name; connected clients are told.

        `type_name` is a name of .NET or of C#: `float`, `string`, `byte[]`. `schemas`: those of
        types that .NET does not have.

        :raises InvalidOption: there is one of that name or id with another type.
        """
        stream = StreamMetadata(name, 0, qualify(type_name))
        return self._add(stream, id, _with_parts(type_name, schemas))

    def add_copy(self, stream: StreamMetadata, *, id: int | None = None) -> StreamMetadata:
        """Add a copy of a peer's stream, or reopen the one of that name; clients are told.

        Its type has the peer's name, which may be that of a data contract, and its supplemental
        metadata is kept. The schemas are told apart.

        :raises InvalidOption: there is one of that name or id with another type.
        """
        kept = StreamMetadata(
            stream.name,
            0,
            stream.type_name,
            supplemental_type=stream.supplemental_type,
            supplemental=stream.supplemental,
        )
        return self._add(kept, id, ())

    def _add(
        self, stream: StreamMetadata, id: int | None, schemas: Iterable[TypeSchema]
    ) -> StreamMetadata:
        name, type_name = stream.name, stream.type_name
        with self._changed:
            found = next((b for b in self._books.values() if b.announced.name == name), None)
            if found is not None:
                before = found.announced.type_name
                if before != type_name and qualify(before) != qualify(type_name):
                    raise InvalidOption("type", type_name, f"the stream {name!r} has another type")
                now = found.metadata()._replace(
                    supplemental_type=stream.supplemental_type or found.announced.supplemental_type,
                    supplemental=stream.supplemental or found.announced.supplemental,
                )
                if found.announced.is_closed:
                    self._tell(reopened(now))
                elif now.supplemental != found.announced.supplemental:
                    self._tell(now)
                return found.announced
            if id is not None and id in self._books:
                raise InvalidOption("id", id, "another stream of the store has it")
            for schema in schemas:
                if self.catalog.schemas.get(schema.id) != schema:
                    self._tell(schema)
            opened_ns = time.time_ns() if self._is_started else MIN_NS
            next_id = max(self._books, default=-1) + 1
            added = stream._replace(id=next_id if id is None else id, opened_ns=opened_ns)
            self._tell(added)
            return added

    def tell(self, record: Record) -> None:
        """Add a record of another process, such as a type's schema."""
        with self._changed:
            self._tell(record)

    def end_stream(self, which: int | str, *, closed_ns: int | None = None) -> None:
        """Close a stream; clients are told. Idempotent."""
        with self._changed:
            books = self._books[self.catalog.stream(which).id]
            if not books.announced.is_closed:
                self._tell(
                    books.metadata(closed_ns=time.time_ns() if closed_ns is None else closed_ns)
                )

    def end_streams(self) -> None:
        """Close all streams."""
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
        """Take the records that another process has written since."""
        with self._changed:
            reader = self._catalog_reader
            while reader is not None and (found := reader.read_many(_READ_AT_ONCE)):
                for message in found:
                    self._take_in(decode_record(message.payload))

    def records_after(self, index: int, timeout: float) -> list[Record]:
        """Return the records from an index on; wait for the first one."""
        with self._changed:
            self.refresh()
            if len(self.records) <= index:
                self._changed.wait(timeout)
                self.refresh()
            return self.records[index:]

    def metadata(self, id: int) -> StreamMetadata:
        """Return the record of a stream, with its counts of now."""
        with self._lock:
            books = self._books[id]
            return books.announced if books.announced.is_closed else books.metadata()

    def last_sequence(self, id: int) -> int:
        """Return the sequence number of a stream's newest message; 0 if it has none."""
        with self._lock:
            return self._books[id].last_sequence

    def streams(self) -> list[StreamInStore]:
        """Return all streams, in the order in which they were added."""
        self.refresh()
        with self._lock:
            return [StreamInStore.of(self.metadata(id)) for id in self._books]

    def time_range(self) -> tuple[int, int] | None:
        """Return the first and the last creation time of all streams; None without messages."""
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
        """Return the number of the newest message; -1: no messages, or unknown."""

    @abstractmethod
    def capacity(self) -> tuple[int, int]:
        """Return the messages and bytes that a ring, or a segment of a log, holds."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. Idempotent."""
