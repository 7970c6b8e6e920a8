"""How do payloads that are Arrow streams become rows?"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.decoding.decoder import Decoder, Parsed, Part, Refused, one_array, parse_all
from penstock.core.decoding.values import ValueChanged, cast_unchanged, check_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ArrowDecoder", "check_columns", "extents_of", "read_stream", "unfolded"]

_STREAM: Final = "an Arrow stream"
#: Types whose values each have their own bytes. In others, such as views and run-end encodings, a
#: few bytes can represent any number of values.
_VARIABLE: Final = ("string", "large_string", "binary", "large_binary")
_PLAIN: Final = (
    *("boolean", "integer", "floating", "decimal", "date", "timestamp", "time", "duration"),
    *("fixed_size_binary", *_VARIABLE),
)
_NESTED: Final = ("list", "large_list", "map", "struct")
#: The end-of-stream marker.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"

_DICTIONARY, _RECORDS = 2, 3
_INT64 = struct.Struct("<q")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_UINT16 = struct.Struct("<H")


class ArrowDecoder(Decoder):
    """Reads one stream per payload; each of its rows gets its message's columns."""

    format: ClassVar[str] = "arrow"

    def __init__(self, schema: pa.Schema, prefix: str, *, max_size: int, max_rows: int) -> None:
        super().__init__(schema, prefix)
        self._max_size = max_size
        self._max_rows = max_rows

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        def parse(start: int, end: int) -> Parsed:
            tables = [self._read(payloads[i].as_buffer()) for i in range(start, end)]
            counts = np.array([table.num_rows for table in tables], np.int64)
            return Parsed(pa.concat_tables(tables), counts)

        # Each payload is read separately: groups of one.
        lengths = np.ones(len(payloads), np.int64)
        columns, origin, failures = parse_all(lengths, parse, self._plain, at_once=1)
        return Part(columns, origin, failures)

    def _read(self, payload: pa.Buffer) -> pa.Table:
        try:
            table = read_stream(
                payload, self._plain.names, max_size=self._max_size, max_rows=self._max_rows
            )
            return pa.table(
                [self._column(table.column(field.name), field) for field in self._plain],
                schema=self._plain,
            )
        except (pa.ArrowException, ValueChanged, OSError, ValueError) as error:
            raise Refused(_STREAM + " of the schema", str(error)) from None

    def _column(self, chunks: pa.ChunkedArray, field: pa.Field) -> pa.Array:
        column = one_array(chunks)
        if pa.types.is_dictionary(column.type):
            # One large value that every row refers to.
            _check("bytes", unfolded(column), self._max_size)
            column = column.cast(column.type.value_type)
        column = cast_unchanged(column, field.type)
        check_times(column)
        return column


def read_stream(
    payload: pa.Buffer, names: Sequence[str] | None, *, max_size: int, max_rows: int
) -> pa.Table:
    """Read columns of one stream, after checking that it stays within the limits.

    :param names: the columns; None: all
    :raises Refused: it is no stream, too large, or has a column of an unsupported type.
    """
    if payload.size < len(_END) or bytes(payload[-len(_END) :]) != _END:
        raise Refused(_STREAM, "no end of a stream: it is something else, or was cut off")
    try:
        extent = _extent_of(payload)
        _check("bytes when unpacked", extent.size, max_size)
        _check("rows", extent.rows, max_rows)
        if extent.length != payload.size:
            raise Refused(_STREAM, f"{payload.size - extent.length:,} bytes behind its end")
        with pa.ipc.open_stream(payload) as reader:
            wanted = reader.schema.names if names is None else names
            check_columns(reader.schema, wanted)
            table = reader.read_all().select(wanted).combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Refused(_STREAM, str(error)) from None
    return table


def _check(what: str, found: int, most: int) -> None:
    if found > most:
        raise Refused(f"{_STREAM} of at most {most:,} {what}", f"{found:,}")


def check_columns(schema: pa.Schema, names: Sequence[str]) -> None:
    """Check that each value of these columns has its own bytes.

    :raises Refused: a column has no such type, or does not exist.
    """
    for name in names:
        index = schema.get_field_index(name)
        if index < 0:
            raise Refused(_STREAM, f"no column {name}, or more than one")
        kind = schema.field(index).type
        if pa.types.is_dictionary(kind):
            is_known = _is_any(kind.value_type, _PLAIN)
        else:
            is_known = pa.types.is_null(kind) or _is_plain(kind)
        if not is_known:
            raise Refused(_STREAM, f"column {name} of type {kind}")


def unfolded(chunk: pa.DictionaryArray) -> int:
    """Return the size of a dictionary array once decoded, in bytes."""
    kind = chunk.type.value_type
    if _is_any(kind, _VARIABLE):
        lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
        return int(pc.sum(lengths).as_py() or 0)
    return len(chunk) * int(kind.bit_width) // 8


@lru_cache(maxsize=256)  # the same few of every payload
def _is_plain(kind: pa.DataType) -> bool:
    if _is_any(kind, _NESTED):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    return _is_any(kind, _PLAIN)


def _is_any(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


# --- sizes -----------------------------------------------------------------------------------
#
# The size of a stream in memory is computed from its headers, before it is read: a compressed
# buffer declares its own uncompressed size, and Arrow trusts it. The few fields needed are read
# from the flatbuffers of Arrow's `Message.fbs`, which Arrow has verified.


class _Extent(NamedTuple):
    """The size of a stream."""

    rows: int
    #: Uncompressed bytes of all buffers.
    size: int
    #: Bytes of the payload that belong to the stream.
    length: int


def _extent_of(payload: bytes) -> _Extent:
    """Sum up the sizes of a stream's messages.

    :raises pa.ArrowInvalid: it is not a stream, or has offsets out of range.
    """
    source = pa.BufferReader(payload)
    rows = size = 0
    for length, unpacked, is_dictionary in extents_of(source):
        rows += 0 if is_dictionary else length
        size += unpacked
    return _Extent(rows, size, source.tell())


def extents_of(source: pa.NativeFile) -> Iterator[tuple[int, int, bool]]:
    """Yield for each batch its rows, its uncompressed bytes, and whether it is a dictionary.

    :raises pa.ArrowInvalid: it is not a stream, or has offsets out of range.
    """
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            found = _records(bytes(message.metadata))
            if found is not None:
                table, is_dictionary = found
                yield (*_measure(table, message.body), is_dictionary)
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"a header points to nowhere: {error}") from None


class _Table:
    """A flatbuffer table: fields by number."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self._at = at
        self._fields = at - _INT32.unpack_from(data, at)[0]

    def place(self, number: int) -> int | None:
        """Return the position of a field, or None if it is absent."""
        size = _UINT16.unpack_from(self.data, self._fields)[0]
        entry = 4 + 2 * number
        if entry + 2 > size:
            return None
        offset = _UINT16.unpack_from(self.data, self._fields + entry)[0]
        return self._at + offset if offset else None

    def follow(self, number: int) -> int | None:
        """Return the position that a field refers to."""
        place = self.place(number)
        return None if place is None else place + _UINT32.unpack_from(self.data, place)[0]


def _records(metadata: bytes) -> tuple[_Table, bool] | None:
    message = _Table(metadata, _UINT32.unpack_from(metadata, 0)[0])
    kind, header = message.place(1), message.follow(2)
    if kind is None or header is None or metadata[kind] not in {_DICTIONARY, _RECORDS}:
        return None
    table = _Table(metadata, header)
    if metadata[kind] == _RECORDS:
        return table, False
    inner = table.follow(1)
    return None if inner is None else (_Table(metadata, inner), True)


def _measure(table: _Table, body: pa.Buffer | None) -> tuple[int, int]:
    """Return the rows of a record batch, and its uncompressed bytes."""
    place = table.place(0)
    rows = 0 if place is None else _INT64.unpack_from(table.data, place)[0]
    if rows < 0:
        raise pa.ArrowInvalid(f"a batch of {rows} rows")
    buffers = table.follow(2)
    if buffers is None or body is None:
        return rows, 0
    raw = memoryview(body)
    is_packed = table.place(3) is not None
    count = _UINT32.unpack_from(table.data, buffers)[0]
    size = 0
    for number in range(count):
        entry = buffers + 4 + 16 * number
        offset = _INT64.unpack_from(table.data, entry)[0]
        length = _INT64.unpack_from(table.data, entry + 8)[0]
        if offset < 0 or length < 0 or offset + length > len(raw):
            raise pa.ArrowInvalid("a buffer lies outside of its message")
        unpacked = length
        if is_packed and length:
            # -1: this buffer is not compressed, though others are.
            unpacked = max(length, _INT64.unpack_from(raw, offset)[0])
        size += unpacked
    return rows, size
