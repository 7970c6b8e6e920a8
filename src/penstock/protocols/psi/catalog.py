"""Which streams and types does an exporter or a store have by now?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed
from penstock.protocols.psi.codecs import CodecLibrary
from penstock.protocols.psi.errors import UnknownStream
from penstock.protocols.psi.metadata import RuntimeInfo, StreamMetadata, TypeSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.metadata import Record

__all__ = ["MAX_CATALOG_BYTES", "MAX_RECORDS", "Catalog"]

#: Different streams and types of one peer, at most, so that it cannot fill our memory.
MAX_RECORDS: Final = 100_000
#: The same in bytes, of what is kept of them.
MAX_CATALOG_BYTES: Final = 1 << 26

_NAMES_TOLD: Final = 8


class Catalog:
    """The latest word on each stream and each type. Records repeat; the last one holds."""

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
        #: By id, in the order in which they came first.
        self.streams: dict[int, StreamMetadata] = {}
        #: By id.
        self.schemas: dict[int, TypeSchema] = {}
        self._ids: dict[str, int] = {}
        self._bytes = 0
        self._library: CodecLibrary | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> bool:
        """Take a record; tell whether it is a stream that was not there.

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
        """Return the codec of a stream's messages, by what is known of its type by now.

        :raises UnknownStream: there is no such stream.
        """
        if isinstance(stream, (int, str)):
            stream = self.stream(stream)
        return self.library.codec(stream.type_name)

    @property
    def library(self) -> CodecLibrary:
        """The codecs of all types; another one when a schema has come since."""
        if self._library is None:
            types = [pair for stream in self.streams.values() for pair in stream.types]
            self._library = CodecLibrary(self.schemas.values(), types)
        return self._library

    def stream(self, which: int | str) -> StreamMetadata:
        """Return a stream by its id or its name.

        :raises UnknownStream: there is none.
        """
        id = self._ids.get(which) if isinstance(which, str) else which
        found = None if id is None else self.streams.get(id)
        if found is None:
            names = [repr(stream.name) for stream in self.streams.values()]
            more = [f"{len(names) - _NAMES_TOLD} more"] if len(names) > _NAMES_TOLD else []
            raise UnknownStream(which, ", ".join(names[:_NAMES_TOLD] + more))
        return found

    def is_complete(self) -> bool:
        """Tell whether every stream is closed, so that nothing more comes."""
        return bool(self.streams) and all(stream.is_closed for stream in self.streams.values())


def _size(record: StreamMetadata | TypeSchema) -> int:
    """Return the bytes that a record takes, near enough to limit them."""
    size = len(record.name) + len(record.type_name)
    if isinstance(record, StreamMetadata):
        names = sum(len(name) for _, name in record.types)
        return size + len(record.supplemental) + len(record.supplemental_type or "") + names
    members = sum(len(member.name) + len(member.type_name) + 64 for member in record.members)
    return size + len(record.serializer_type_name or "") + members
