"""How do messages in a wide queue become columns of an Arrow batch, and columns messages?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, Batch, check_batch
from penstock.core.errors import MessageTooLarge
from penstock.queue.wide.layout import SLOT, Rows, SlotFlag, slots_of

if TYPE_CHECKING:
    from penstock.queue.wide._ring import RingReader
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["EMPTY_BATCH", "VIEW_SCHEMA", "Run", "copied_run", "lent_run", "rows_of"]

#: Bytes of one batch: Arrow's `binary` counts them in 31 bits.
_MOST_BYTES: Final = 2**31 - 1

#: As `BATCH_SCHEMA`, with payloads that are views of the queue.
VIEW_SCHEMA: Final = BATCH_SCHEMA.set(
    BATCH_SCHEMA.get_field_index("payload"), pa.field("payload", pa.binary_view(), nullable=False)
)
#: Made of nulls, because `pa.array` imports pandas where there is one.
EMPTY_BATCH: Final = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in BATCH_SCHEMA], schema=BATCH_SCHEMA
)

_HAS_BLOCK: Final = int(SlotFlag.STREAM | SlotFlag.ATTRIBUTES)
_FEWEST_NULLS: Final = 4096

#: Arrow's views: up to 12 bytes are within the view, more are in a buffer.
_INLINE: Final = 12
#: A view's offset has 31 bits. So the queue is given as windows that overlap by half.
_WINDOW: Final = 1 << 30

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Run(NamedTuple):
    """Messages that follow each other, as a batch."""

    batch: Batch
    #: How many there were, before the filter.
    count: int  # type: ignore[assignment]
    #: Bytes of the payloads in the batch.
    size: int


class _Numbers(NamedTuple):
    """The columns of numbers of a run, and what else was seen."""

    columns: list[pa.Array]
    offsets: pa.Buffer
    size: int
    flags: int


def copied_run(reader: RingReader, file: QueueFile, first: int, limit: int) -> Run | int:
    """Copy up to `limit` messages from `first` on into one batch: columns, in one go.

    Returns the number of a message that is not right, if there is one, instead. The caller makes
    sure that the writer did not overtake it meanwhile.
    """
    numbers = _numbers(reader, file, first, limit)
    if numbers is None:
        return first
    count = len(numbers.columns[0])
    payloads = pa.allocate_buffer(numbers.size)
    if (bad := reader._payloads(first, count, payloads)) is not None:  # noqa: SLF001
        return bad
    slots = _slots(file, first, count) if numbers.flags & _HAS_BLOCK else None
    if reader._oldest > first:  # noqa: SLF001
        return first  # the slots may be others by now, and what they point to anything
    buffers = [None, numbers.offsets, payloads]
    columns = [
        *numbers.columns,
        *_block_columns(file, count, slots),
        pa.Array.from_buffers(pa.binary(), count, buffers),
    ]
    return Run(pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA), count, numbers.size)


def lent_run(
    reader: RingReader, file: QueueFile, first: int, limit: int, type: int | None
) -> Run | int:
    """Lay a batch over up to `limit` messages from `first` on, those of one type only if asked.

    Returns the number of a message that is not right, if there is one, instead.
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
    """Return the numbers of up to `limit` messages; None: already the first is not right.

    :raises MessageTooLarge: the first has more bytes than a column can have.
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
    """Copy the slots of these messages. The caller looks whether they were overwritten."""
    table = slots_of(file.mapping, file.geometry)
    start = first & (len(table) - 1)
    slots = table[start : start + count]
    rest = count - len(slots)
    return np.concatenate([slots, table[:rest]]) if rest else slots.copy()


def _block_columns(file: QueueFile, count: int, slots: Rows | None) -> list[pa.Array]:
    """Return the columns `stream` and `attributes`; without slots no message has its own."""
    own = bytes(file.header["stream"][0])
    own_stream = own if any(own) else None
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
    # Where each byte comes from: its place in the column, moved to where its message has it.
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
    """Return a column of nothing: a part of one that all batches share."""
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
    for i in range(4):  # a longer view shows the first four bytes of what it stands for
        raw[~short, 4 + i] = memory[first + i]
    return pa.Array.from_buffers(
        pa.binary_view(), len(slots), [None, pa.py_buffer(views), *windows]
    )


def _bits(flags: _Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def rows_of(batch: Batch) -> tuple[Rows, bytes, memoryview]:
    """Return the slots, the blocks and the payloads of a batch, for a writer to append.

    :raises Malformed: the batch does not have the columns of a batch.
    """
    check_batch(batch)
    columns = {name: batch.column(name) for name in BATCH_SCHEMA.names}
    slots = np.zeros(len(batch), SLOT)
    for name in ("time_ns", "type", "subtype"):
        slots[name] = columns[name].to_numpy(zero_copy_only=False)
    slots["length"], payloads = _lengths_and_bytes(columns["payload"])
    blocks = b""
    stream, attributes = columns["stream"], columns["attributes"]
    if stream.null_count < len(batch) or attributes.null_count < len(batch):
        blocks = _fill_blocks(slots, stream.to_pylist(), attributes.to_pylist())
    return slots, blocks, payloads


def _lengths_and_bytes(column: pa.Array) -> tuple[_Array, memoryview]:
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    data = column.buffers()[2]
    if data is None:
        return np.diff(offsets), memoryview(b"")
    return np.diff(offsets), memoryview(data)[int(offsets[0]) : int(offsets[-1])]


def _fill_blocks(slots: Rows, streams: list[bytes | None], attributes: list[bytes | None]) -> bytes:
    blocks = []
    for slot, stream, own in zip(slots, streams, attributes, strict=True):
        block = b""
        if stream is not None:
            slot["flags"] |= SlotFlag.STREAM
            block = stream
        if own is not None:
            slot["flags"] |= SlotFlag.ATTRIBUTES
            slot["attributes"] = len(own)
            block += own
        block += bytes(-len(block) % 8)
        slot["block"] = len(block)
        blocks.append(block)
    return b"".join(blocks)
