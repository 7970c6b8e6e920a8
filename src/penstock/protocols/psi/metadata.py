"""What does psi record of its streams and types? (docs/specs/psi.md 3)

The same records are on the meta connection and in a store's catalog. The kind comes after the
fields that all kinds have. Bytes after a record are ignored: a store pads it, and later versions
may add fields.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.ticks import (
    MAX_NS,
    MIN_NS,
    NS_PER_TICK,
    DateTimeKind,
    ns_to_raw,
    raw_to_ns,
)
from penstock.protocols.psi.wire import INT32, Cursor, pack_text

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike

__all__ = [
    "INTERMISSION",
    "LATEST_VERSION",
    "SERIALIZATION_VERSION",
    "MetadataKind",
    "Record",
    "RuntimeInfo",
    "SchemaFlags",
    "SchemaMember",
    "StreamFlags",
    "StreamMetadata",
    "TypeSchema",
    "decode_record",
    "encode_record",
    "frame_record",
]

_WHAT: Final = "psi metadata"
#: Of `StreamMetadata`; older versions are converted.
LATEST_VERSION: Final = 2
SERIALIZATION_VERSION: Final = 2
#: The empty record that ends a burst on the meta connection.
INTERMISSION: Final = INT32.pack(0)

_PREFIX_END: Final = struct.Struct("<iHH")
_TIMES_2: Final = struct.Struct("<2Q")
_TIMES_4: Final = struct.Struct("<4Q")
_SUMS: Final = struct.Struct("<3q")
_AVERAGES: Final = struct.Struct("<2i")
_FLAGS: Final = struct.Struct("<I")
_TICKS_PER_MICROSECOND: Final = 10
#: The fewest bytes of a member (two empty texts and a truth), and of a polymorphic type.
_LEAST_MEMBER: Final = 9
_LEAST_TYPE: Final = 8
#: From this version on a schema ends with flags.
_SCHEMA_WITH_FLAGS: Final = 2
_INT64: Final = range(-(2**63), 2**63)


class MetadataKind(IntEnum):
    """Which record this is."""

    STREAM = 0
    RUNTIME = 1
    SCHEMA = 2


class StreamFlags(IntFlag):
    """Properties of a stream."""

    NOT_PERSISTED = 0x01
    CLOSED = 0x02
    #: Its payloads are large and stored in LargeData.
    INDEXED = 0x04
    #: Lists the types in it; only in version 0.
    POLYMORPHIC = 0x08


class SchemaFlags(IntFlag):
    """The kind of a type."""

    CLASS = 1
    STRUCT = 2
    DATA_CONTRACT = 4
    COLLECTION = 8


class RuntimeInfo(NamedTuple):
    """The writer: the first record, without which an importer misreads structured types."""

    name: str = "Microsoft.Psi, Version=0.19.100.1, Culture=neutral, PublicKeyToken=null"
    #: major << 16 | minor.
    version: int = 19
    serialization_version: int = SERIALIZATION_VERSION


class StreamMetadata(NamedTuple):
    """A stream, with its counts and times."""

    name: str
    #: The `source_id` of its messages.
    id: int
    #: With its assembly, as .NET has it.
    type_name: str
    flags: StreamFlags = StreamFlags(0)
    #: `MIN_NS` while the pipeline has not started.
    opened_ns: int = MIN_NS
    #: `MAX_NS` while it is open.
    closed_ns: int = MAX_NS
    message_count: int = 0
    #: Bytes of all messages.
    size_sum: int = 0
    #: The sum of creation minus originating time of all messages.
    latency_sum_ns: int = 0
    first_creation_ns: int = MIN_NS
    last_creation_ns: int = MIN_NS
    first_originating_ns: int = MIN_NS
    last_originating_ns: int = MIN_NS
    #: Type names by schema id, of old polymorphic streams.
    types: tuple[tuple[int, str], ...] = ()
    supplemental_type: str | None = None
    supplemental: bytes = b""
    serialization_version: int = SERIALIZATION_VERSION
    #: The version that it was read from.
    version: int = LATEST_VERSION

    @property
    def is_closed(self) -> bool:
        """No more messages come: the only sign of a stream's end in psi."""
        return StreamFlags.CLOSED in self.flags

    @property
    def is_indexed(self) -> bool:
        """In a store, its payloads are in LargeData."""
        return StreamFlags.INDEXED in self.flags


class SchemaMember(NamedTuple):
    """One field of a type."""

    name: str
    type_name: str
    required: bool = True


class TypeSchema(NamedTuple):
    """The serialized form of a type: its members, in order."""

    #: The contract's name, of which the id is a hash.
    name: str
    id: int
    type_name: str
    members: tuple[SchemaMember, ...] = ()
    #: 0 for a type without members, whose flags are not on the wire.
    flags: SchemaFlags = SchemaFlags(0)
    serializer_type_name: str | None = None
    version: int = 2
    serialization_version: int = SERIALIZATION_VERSION


Record: TypeAlias = RuntimeInfo | StreamMetadata | TypeSchema


def decode_record(data: BytesLike) -> Record:
    """Decode a record.

    :raises Malformed: it is truncated, a length is not valid, or its kind or version is unknown.
    """
    cursor = Cursor(data, _WHAT)
    name = cursor.text("name")
    id = cursor.int32("id")
    type_name = cursor.optional_text("type name")
    version = cursor.int32("version")
    serializer = cursor.optional_text("serializer type name")
    at = cursor.step(_PREFIX_END.size, "kind")
    serialization_version, flags, kind = _PREFIX_END.unpack_from(cursor.data, at)
    if kind == MetadataKind.RUNTIME:
        return RuntimeInfo(name, version, serialization_version)
    if kind not in {MetadataKind.STREAM, MetadataKind.SCHEMA}:
        raise Malformed(_WHAT, "kind", "0, 1 or 2", kind)
    if type_name is None:
        raise Malformed(_WHAT, "type name", "a text", "none")
    if kind == MetadataKind.STREAM:
        head = StreamMetadata(name, id, type_name, StreamFlags(flags))
        return _stream(cursor, head._replace(serialization_version=serialization_version), version)
    members, schema_flags = _members(cursor, version)
    return TypeSchema(
        name, id, type_name, members, schema_flags, serializer, version, serialization_version
    )


def _members(cursor: Cursor, version: int) -> tuple[tuple[SchemaMember, ...], SchemaFlags]:
    count = cursor.count(_LEAST_MEMBER, "member count")
    members = tuple(
        SchemaMember(
            cursor.text("member name"), cursor.text("member type"), cursor.bool("member required")
        )
        for _ in range(count)
    )
    # psi's reader stops at a member count of 0 and does not read the flags, so that its exporter
    # does not send them; in a store's catalog they are there.
    if not count or version < _SCHEMA_WITH_FLAGS:
        return members, SchemaFlags(0)
    return members, SchemaFlags(cursor.uint32("schema flags"))


def _stream(cursor: Cursor, head: StreamMetadata, version: int) -> StreamMetadata:
    if not 0 <= version <= LATEST_VERSION:
        raise Malformed(_WHAT, "stream metadata version", f"0 to {LATEST_VERSION}", version)
    opened, closed = _TIMES_2.unpack_from(cursor.data, cursor.step(_TIMES_2.size, "times"))
    is_new = version == LATEST_VERSION
    size_sum = latency = 0
    if is_new:
        at = cursor.step(_SUMS.size, "sums")
        count, size_sum, latency = _SUMS.unpack_from(cursor.data, at)
    else:
        count = cursor.int32("message count")
    at = cursor.step(_TIMES_4.size, "times of messages")
    times = [raw_to_ns(raw) for raw in _TIMES_4.unpack_from(cursor.data, at)]
    if not is_new:
        at = cursor.step(_AVERAGES.size, "averages")
        average_size, average_latency = _AVERAGES.unpack_from(cursor.data, at)
        size_sum = average_size * count
        latency = average_latency * _TICKS_PER_MICROSECOND * count
    if count < 0:
        raise Malformed(_WHAT, "message count", "0 or more", count)
    types: tuple[tuple[int, str], ...] = ()
    if StreamFlags.POLYMORPHIC in head.flags:
        number = cursor.count(_LEAST_TYPE, "type count")
        types = tuple(
            (cursor.int32("schema id"), cursor.text("type of schema id")) for _ in range(number)
        )
    supplemental_type, supplemental = None, b""
    if version > 0:
        supplemental_type = cursor.optional_text("supplemental type name")
        supplemental = cursor.bytes("supplemental metadata")
    return head._replace(
        opened_ns=raw_to_ns(opened),
        closed_ns=raw_to_ns(closed),
        message_count=count,
        size_sum=size_sum,
        latency_sum_ns=latency * NS_PER_TICK,
        first_creation_ns=times[0],
        last_creation_ns=times[1],
        first_originating_ns=times[2],
        last_originating_ns=times[3],
        types=types,
        supplemental_type=supplemental_type,
        supplemental=supplemental,
        version=version,
    )


def encode_record(record: Record, *, in_catalog: bool = False) -> bytes:
    """Return the bytes of a record in the latest version.

    `in_catalog`: as in a store's catalog, where a schema without members has its flags, too.

    :raises InvalidOption: a number does not fit.
    """
    try:
        match record:
            case RuntimeInfo():
                return _prefix(record.name, 0, None, record.version, None, record, 0, 1)
            case StreamMetadata():
                return _encode_stream(record)
            case TypeSchema():
                return _encode_schema(record, in_catalog=in_catalog)
    except struct.error as error:
        raise InvalidOption("metadata", record.name, str(error)) from None


def frame_record(record: Record) -> bytes:
    """Return a record with its length before it, for the meta connection."""
    body = encode_record(record)
    return INT32.pack(len(body)) + body


def _prefix(
    name: str,
    id: int,
    type_name: str | None,
    version: int,
    serializer: str | None,
    record: Record,
    flags: int,
    kind: int,
) -> bytes:
    return b"".join(
        (
            pack_text(name),
            INT32.pack(id),
            pack_text(type_name),
            INT32.pack(version),
            pack_text(serializer),
            _PREFIX_END.pack(record.serialization_version, flags, kind),
        )
    )


def _encode_stream(stream: StreamMetadata) -> bytes:
    flags = stream.flags
    latency = stream.latency_sum_ns // NS_PER_TICK
    if stream.size_sum not in _INT64 or latency not in _INT64:
        raise InvalidOption("metadata", stream.name, "its sums do not fit in 64 bits")
    # In psi the times of the pipeline have no kind, those of messages are UTC.
    opened, closed = (
        ns_to_raw(time_ns, DateTimeKind.UNSPECIFIED)
        for time_ns in (stream.opened_ns, stream.closed_ns)
    )
    times = (
        stream.first_creation_ns,
        stream.last_creation_ns,
        stream.first_originating_ns,
        stream.last_originating_ns,
    )
    parts = [
        _prefix(stream.name, stream.id, stream.type_name, LATEST_VERSION, None, stream, flags, 0),
        _TIMES_2.pack(opened, closed),
        _SUMS.pack(stream.message_count, stream.size_sum, latency),
        _TIMES_4.pack(*map(ns_to_raw, times)),
    ]
    if StreamFlags.POLYMORPHIC in flags:
        parts.append(INT32.pack(len(stream.types)))
        parts += [INT32.pack(id) + pack_text(type_name) for id, type_name in stream.types]
    parts += [
        pack_text(stream.supplemental_type),
        INT32.pack(len(stream.supplemental)),
        stream.supplemental,
    ]
    return b"".join(parts)


def _encode_schema(schema: TypeSchema, *, in_catalog: bool) -> bytes:
    prefix = _prefix(
        schema.name,
        schema.id,
        schema.type_name,
        schema.version,
        schema.serializer_type_name,
        schema,
        0,
        MetadataKind.SCHEMA,
    )
    members = b"".join(
        pack_text(member.name) + pack_text(member.type_name) + bytes([member.required])
        for member in schema.members
    )
    has_flags = schema.version >= _SCHEMA_WITH_FLAGS and (bool(schema.members) or in_catalog)
    flags = _FLAGS.pack(schema.flags) if has_flags else b""
    return prefix + INT32.pack(len(schema.members)) + members + flags
