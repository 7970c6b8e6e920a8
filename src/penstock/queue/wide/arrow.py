"""How are messages of a wide queue converted to an Arrow batch, and back?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, ORIGIN_SCHEMA, Batch, check_batch, numbers_of
from penstock.core.errors import MessageTooLarge
from penstock.queue.wide.layout import SLOT, Record, SlotFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.queue.wide._ring import RingReader
    from penstock.queue.wide.file import QueueFile

__all__ = [
    "EMPTY_BATCH",
    "VIEW_SCHEMA",
    "Rows",
    "Run",
    "append_times",
    "copied_run",
    "dtype_of",
    "first_in_time",
    "lent_run",
    "origin_times",
    "rows_of",
    "slots_of",
    "source_times",
]

#: A structured numpy array.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"

_FORMATS: Final = {"Q": "<u8", "q": "<i8", "I": "<u4", "i": "<i4", "8Q": "(4,2)<u8", "16s": "V16"}


def dtype_of(record: Record) -> np.dtype[np.void]:
    """Return the numpy dtype of a record of the file."""
    return np.dtype(
        {
            "names": list(record.fields),
            "formats": [_FORMATS[field.format] for field in record.fields.values()],
            "offsets": [field.offset for field in record.fields.values()],
            "itemsize": record.size,
        }
    )


_SLOT: Final = dtype_of(SLOT)

#: Most payload bytes of a batch: offsets of Arrow's `binary` have 31 bits.
_MOST_BYTES: Final = 2**31 - 1

#: As `BATCH_SCHEMA`, with payloads as views of the queue's memory.
VIEW_SCHEMA: Final = BATCH_SCHEMA.set(
    BATCH_SCHEMA.get_field_index("payload"), pa.field("payload", pa.binary_view(), nullable=False)
)
#: Made of nulls, because `pa.array` imports pandas if installed.
EMPTY_BATCH: Final = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in BATCH_SCHEMA], schema=BATCH_SCHEMA
)

_HAS_BLOCK: Final = int(SlotFlag.STREAM | SlotFlag.ATTRIBUTES)
_IS_COPY: Final = SlotFlag.ORIGIN.value
#: Bytes of a stream id, at the start of a block, and of `origin_ns`, at its end.
_STREAM: Final = 16
_ORIGIN: Final = 8
_FEWEST_NULLS: Final = 4096

#: An Arrow view holds up to 12 bytes inline; longer values are in a buffer.
_INLINE: Final = 12
#: A view's offset has 31 bits, so the queue is mapped as windows that overlap by half.
_WINDOW: Final = 1 << 30
#: Times compared at once.
_TIMES_AT_ONCE: Final = 1 << 16

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Run(NamedTuple):
    """Consecutive messages, as a batch."""

    batch: Batch
    #: Count of messages before the filter.
    count: int  # type: ignore[assignment]
    #: Payload bytes in the batch.
    size: int


class _Numbers(NamedTuple):
    """The numeric columns of a run, its payload offsets and bytes, and the union of flags."""

    columns: list[pa.Array]
    offsets: pa.Buffer
    size: int
    flags: int


def slots_of(file: QueueFile) -> Rows:
    """Return the slot table of a queue, as a view."""
    return np.frombuffer(file.mapping, _SLOT, file.geometry.slots, file.geometry.slots_offset)


def append_times(file: QueueFile, first: int, end: int) -> NDArray[np.int64]:
    """Return `created_ns` of the messages from `first` to `end` - 1."""
    slots = slots_of(file)
    times: NDArray[np.int64] = slots["created_ns"][np.arange(first, end) & (len(slots) - 1)]
    return times


def source_times(file: QueueFile, first: int, end: int) -> NDArray[np.int64]:
    """Return `time_ns` of the messages from `first` to `end` - 1."""
    slots = slots_of(file)
    times: NDArray[np.int64] = slots["time_ns"][np.arange(first, end) & (len(slots) - 1)]
    return times


def origin_times(file: QueueFile, first: int, end: int) -> NDArray[np.int64]:
    """Return `origin_ns` of the messages from `first` to `end` - 1."""
    table = slots_of(file)
    at = np.arange(first, end) & (len(table) - 1)
    if not (table["flags"][at] & _IS_COPY).any():
        times: NDArray[np.int64] = table["created_ns"][at]
        return times
    return _origins(file, table[at])


def _origins(file: QueueFile, slots: Rows) -> NDArray[np.int64]:
    """Return `origin_ns` of the messages: from the block of a copy, else `created_ns`."""
    geometry = file.geometry
    words = np.frombuffer(file.mapping, "<i8", geometry.file_size // 8)
    begin = slots["position"] % geometry.buffer_size + geometry.buffer_offset
    # A slot in work, or damaged, may contain any offset.
    at = np.minimum((begin + slots["block"] - _ORIGIN) // 8, len(words) - 1)
    is_copy = (slots["flags"] & _IS_COPY) != 0
    return np.where(is_copy, words[at.astype(np.int64)], slots["created_ns"])


def first_in_time(
    times: Callable[[QueueFile, int, int], NDArray[np.int64]],
    file: QueueFile,
    messages: tuple[int, int],
    start_ns: int,
    end_ns: int,
) -> int | None:
    """Return the first of `messages` (first, end) from `start_ns` to before `end_ns`, or None."""
    first, end = messages
    while first < end:
        behind = min(first + _TIMES_AT_ONCE, end)
        found = times(file, first, behind)
        is_wanted = np.flatnonzero((found >= start_ns) & (found < end_ns))
        if len(is_wanted):
            return first + int(is_wanted[0])
        first = behind
    return None


def copied_run(
    reader: RingReader, file: QueueFile, first: int, limit: int, schema: pa.Schema = BATCH_SCHEMA
) -> Run | int:
    """Copy up to `limit` messages from `first` on into one batch.

    Return the number of the first bad message instead, if there is one. The caller checks that the
    writer did not overwrite them meanwhile.
    """
    numbers = _numbers(reader, file, first, limit)
    if numbers is None:
        return first
    count = len(numbers.columns[0])
    payloads = pa.allocate_buffer(numbers.size)
    if (bad := reader._payloads(first, count, payloads)) is not None:  # noqa: SLF001
        return bad
    is_copied = schema is ORIGIN_SCHEMA and numbers.flags & _IS_COPY
    needed = numbers.flags & _HAS_BLOCK or is_copied
    slots = _slots(file, first, count) if needed else None
    if reader._oldest > first:  # noqa: SLF001
        return first  # the slots may be overwritten, with arbitrary offsets
    buffers = [None, numbers.offsets, payloads]
    columns = [
        *numbers.columns,
        *_block_columns(file, count, slots),
        pa.Array.from_buffers(pa.binary(), count, buffers),
    ]
    if schema is ORIGIN_SCHEMA:
        appended = numbers.columns[2]
        columns.append(_int64s(_origins(file, slots)) if slots is not None else appended)
    return Run(pa.RecordBatch.from_arrays(columns, schema=schema), count, numbers.size)


def lent_run(
    reader: RingReader, file: QueueFile, first: int, limit: int, type: int | None
) -> Run | int:
    """Return a batch of views of up to `limit` messages from `first` on, filtered by `type`.

    Return the number of the first bad message instead, if there is one.
    """
    numbers = _numbers(reader, file, first, limit)
    if numbers is None:
        return first
    count = len(numbers.columns[0])
    bad = reader._payloads(first, count, bytearray())  # noqa: SLF001
    if bad is not None:
        return bad
    slots = _slots(file, first, count)
    if reader._oldest > first:  # noqa: SLF001
        return first  # as above
    blocks = slots if numbers.flags & _HAS_BLOCK else None
    columns = [*numbers.columns, *_block_columns(file, count, blocks)]
    if type is not None:
        wanted = slots["type"] == type
        slots = slots[wanted]
        columns = [column.filter(pa.array(wanted)) for column in columns]
    batch = pa.RecordBatch.from_arrays([*columns, _views(file, slots)], schema=VIEW_SCHEMA)
    return Run(batch, count, int(slots["length"].sum()))


def _numbers(reader: RingReader, file: QueueFile, first: int, limit: int) -> _Numbers | None:
    """Return the numeric columns of up to `limit` messages; None: the first message is bad.

    :raises MessageTooLarge: the first message is too large for a column.
    """
    room = pa.allocate_buffer(36 * limit + 4)
    count, size, flags = reader._columns(first, limit, _MOST_BYTES, room)  # noqa: SLF001
    if count == 0:
        slot = _slots(file, first, 1)[0]
        size = int(slot["length"])
        is_large = _MOST_BYTES < size <= file.geometry.buffer_size
        if is_large and reader._payloads(first, 1, bytearray()) is None:  # noqa: SLF001
            raise MessageTooLarge(size, _MOST_BYTES, hint="read() takes messages of any size")
        return None

    def column(kind: pa.DataType, start: int) -> pa.Array:
        return pa.Array.from_buffers(kind, count, [None, room.slice(start)])

    columns = [
        column(pa.int64(), 0),
        column(pa.int64(), 8 * limit),
        column(pa.int64(), 16 * limit),
        column(pa.int32(), 24 * limit),
        column(pa.int32(), 28 * limit),
    ]
    return _Numbers(columns, room.slice(32 * limit), size, flags)


def _slots(file: QueueFile, first: int, count: int) -> Rows:
    """Copy the slots of messages. The caller checks whether they were overwritten."""
    table = slots_of(file)
    start = first & (len(table) - 1)
    slots = table[start : start + count]
    rest = count - len(slots)
    return np.concatenate([slots, table[:rest]]) if rest else slots.copy()


def _block_columns(file: QueueFile, count: int, slots: Rows | None) -> list[pa.Array]:
    """Return the columns `stream` and `attributes`; `slots` is None if no message has a block."""
    own = file.header.stream
    own_stream = None if own is None else bytes(own)
    if slots is None:
        return [_one_stream(count, own_stream), _nulls(count, pa.binary())]
    memory = np.frombuffer(file.mapping, np.uint8)
    geometry = file.geometry
    start = (slots["position"] % geometry.buffer_size).astype(np.int64) + geometry.buffer_offset
    return [_streams(memory, slots, start, own_stream), _attributes(memory, slots, start)]


def _streams(memory: _Array, slots: Rows, start: _Array, own_stream: bytes | None) -> pa.Array:
    kind, count = pa.binary(16), len(slots)
    has = (slots["flags"] & SlotFlag.STREAM.value) != 0
    ids = np.frombuffer((own_stream or bytes(16)) * count, np.uint8).reshape(count, 16).copy()
    ids[has] = memory[start[has, None] + np.arange(16)]
    valid = None if own_stream is not None or has.all() else _bits(has)
    return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(ids)])


def _attributes(memory: _Array, slots: Rows, start: _Array) -> pa.Array:
    flags = slots["flags"]
    has = (flags & SlotFlag.ATTRIBUTES.value) != 0
    begin = start + np.where(flags & SlotFlag.STREAM.value, 16, 0)
    lengths = np.where(has, slots["attributes"], 0).astype(np.int64)
    offsets = np.zeros(len(slots) + 1, np.int32)
    offsets[1:] = np.cumsum(lengths)
    # Source index of each byte: its index in the column, plus the shift of its message.
    data = memory[np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)]
    valid = None if has.all() else _bits(has)
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(slots), buffers)


def _one_stream(count: int, stream: bytes | None) -> pa.Array:
    kind = pa.binary(16)
    if stream is None:
        return _nulls(count, kind)
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(stream * count)])


def _nulls(count: int, kind: pa.DataType) -> pa.Array:
    """Return a column of nulls: a slice of one shared by all batches."""
    known = _known_nulls.get(kind)
    if known is None or len(known) < count:
        known = _known_nulls[kind] = pa.nulls(max(count, _FEWEST_NULLS), kind)
    return known.slice(0, count)


_known_nulls: dict[pa.DataType, pa.Array] = {}


def _views(file: QueueFile, slots: Rows) -> pa.Array:
    geometry = file.geometry
    start = slots["position"] % geometry.buffer_size + slots["block"] + geometry.buffer_offset
    whole = pa.py_buffer(file.mapping)
    windows = [
        whole.slice(at, min(2 * _WINDOW - 1, geometry.file_size - at))
        for at in range(0, geometry.file_size, _WINDOW)
    ]
    views = np.zeros((len(slots), 4), np.int32)
    views[:, 0] = slots["length"]
    views[:, 2] = start // _WINDOW
    views[:, 3] = start % _WINDOW
    memory = np.frombuffer(file.mapping, np.uint8)
    raw = views.view(np.uint8)
    short = slots["length"] <= _INLINE
    for row in np.flatnonzero(short):
        at, length = int(start[row]), int(slots["length"][row])
        raw[row, 4:] = 0
        raw[row, 4 : 4 + length] = memory[at : at + length]
    first = start[~short].astype(np.int64)
    for i in range(4):  # a long view starts with the first four bytes of its value
        raw[~short, 4 + i] = memory[first + i]
    return pa.Array.from_buffers(
        pa.binary_view(), len(slots), [None, pa.py_buffer(views), *windows]
    )


def _int64s(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def _bits(flags: _Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def rows_of(batch: Batch, largest: int) -> tuple[Rows, bytes, memoryview]:
    """Convert a batch to slots, blocks and payloads, for a writer to append.

    :param largest: most bytes of a message; `origin_ns` is dropped where it would not fit
    :raises Malformed: the batch has not the columns of a batch.
    """
    check_batch(batch)
    slots = np.zeros(len(batch), _SLOT)
    for name in ("time_ns", "type", "subtype"):
        slots[name] = numbers_of(batch, name)
    slots["length"], payloads = _lengths_and_bytes(batch.column("payload"))
    stream, attributes = batch.column("stream"), batch.column("attributes")
    origins = batch.column("origin_ns") if "origin_ns" in batch.schema.names else None
    is_even = attributes.null_count == len(batch) and stream.null_count in {0, len(batch)}
    if origins is not None:
        is_even = is_even and bool((slots["length"] + _STREAM + _ORIGIN <= largest).all())
    if is_even:
        own = stream if stream.null_count < len(batch) else None
        return slots, _even_blocks(slots, own, origins), payloads
    return slots, _uneven_blocks(slots, stream, attributes, origins, largest), payloads


def _lengths_and_bytes(column: pa.Array) -> tuple[_Array, memoryview]:
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    data = column.buffers()[2]
    if data is None:
        return np.diff(offsets), memoryview(b"")
    return np.diff(offsets), memoryview(data)[int(offsets[0]) : int(offsets[-1])]


def _even_blocks(slots: Rows, stream: pa.Array | None, origins: pa.Array | None) -> bytes:
    """Build blocks of equal layout, without attributes."""
    parts = []
    for column, width, flag in (
        (stream, _STREAM, SlotFlag.STREAM),
        (origins, _ORIGIN, SlotFlag.ORIGIN),
    ):
        if column is not None:
            data, size = column.buffers()[1], len(slots) * width
            values = np.frombuffer(data, np.uint8, size, width * column.offset)
            parts.append(values.reshape(len(slots), width))
            slots["flags"] |= flag.value
            slots["block"] += width
    return np.concatenate(parts, axis=1).tobytes() if parts else b""


def _uneven_blocks(
    slots: Rows, stream: pa.Array, attributes: pa.Array, origins: pa.Array | None, largest: int
) -> bytes:
    blocks = []
    first = [None] * len(slots) if origins is None else origins.to_pylist()
    rows = zip(slots, stream.to_pylist(), attributes.to_pylist(), first, strict=True)
    for slot, own_stream, own, origin_ns in rows:
        block = b""
        if own_stream is not None:
            slot["flags"] |= SlotFlag.STREAM
            block = own_stream
        if own is not None:
            slot["flags"] |= SlotFlag.ATTRIBUTES
            slot["attributes"] = len(own)
            block += own
        block += bytes(-len(block) % 8)
        if origin_ns is not None and len(block) + _ORIGIN + int(slot["length"]) <= largest:
            slot["flags"] |= SlotFlag.ORIGIN
            block += origin_ns.to_bytes(_ORIGIN, "little", signed=True)
        slot["block"] = len(block)
        blocks.append(block)
    return b"".join(blocks)
