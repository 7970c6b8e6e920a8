"""How do messages in a wide queue become columns of an Arrow batch, and columns messages?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, Batch, check_batch
from penstock.queue.wide.layout import SLOT, Rows, SlotFlag

if TYPE_CHECKING:
    from penstock.queue.wide._ring import RingReader
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["MOST_BYTES", "VIEW_SCHEMA", "BadChecksum", "batch_of", "rows_of", "view_batch_of"]

#: Bytes of one batch: Arrow's `binary` counts them in 31 bits.
MOST_BYTES: Final = 2**31 - 1

#: As `BATCH_SCHEMA`, with payloads that are views of the queue.
VIEW_SCHEMA: Final = BATCH_SCHEMA.set(
    BATCH_SCHEMA.get_field_index("payload"), pa.field("payload", pa.binary_view(), nullable=False)
)

#: Arrow's views: up to 12 bytes are within the view, more are in a buffer.
_INLINE: Final = 12
#: A view's offset has 31 bits. So the queue is given as windows that overlap by half.
_WINDOW: Final = 1 << 30

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def batch_of(reader: RingReader, slots: Rows, own_stream: bytes | None) -> Batch:
    """Copy the messages of these slots into one batch. The caller checks that they were there."""
    columns = [*_header_columns(reader, slots, own_stream), _gathered(reader, slots, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)


def view_batch_of(
    reader: RingReader, file: QueueFile, slots: Rows, own_stream: bytes | None
) -> Batch:
    """Lay a batch over the messages of these slots."""
    columns = [*_header_columns(reader, slots, own_stream), _views(file, slots)]
    return pa.RecordBatch.from_arrays(columns, schema=VIEW_SCHEMA)


def _header_columns(reader: RingReader, slots: Rows, own_stream: bytes | None) -> list[pa.Array]:
    numbers = [
        pa.array(np.ascontiguousarray(slots[name]).view(kind), kind)
        for name, kind in (
            ("seq", "int64"),
            ("time_ns", "int64"),
            ("created_ns", "int64"),
            ("type", "int32"),
            ("subtype", "int32"),
        )
    ]
    return [*numbers, _streams(reader, slots, own_stream), _attributes(reader, slots)]


def _streams(reader: RingReader, slots: Rows, own_stream: bytes | None) -> pa.Array:
    kind, count = pa.binary(16), len(slots)
    has = (slots["flags"] & SlotFlag.STREAM) != 0
    if not has.any() and own_stream is None:
        return pa.nulls(count, kind)
    ids = np.frombuffer((own_stream or bytes(16)) * count, "V16").copy()
    if has.any():
        parts = slots[has]
        parts["length"], parts["block"], parts["attributes"], parts["flags"] = 16, 0, 0, 0
        found = np.empty(len(parts), "V16")
        reader._gather(parts, found)  # noqa: SLF001 - the reader's own part in this
        ids[has] = found
    valid = None if own_stream is not None or has.all() else _bits(has)
    return pa.FixedSizeBinaryArray.from_buffers(kind, count, [valid, pa.py_buffer(ids)])


def _attributes(reader: RingReader, slots: Rows) -> pa.Array:
    has = (slots["flags"] & SlotFlag.ATTRIBUTES) != 0
    if not has.any():
        return pa.nulls(len(slots), pa.binary())
    parts = slots.copy()
    parts["position"] += np.where(parts["flags"] & SlotFlag.STREAM, 16, 0).astype(np.uint64)
    parts["length"] = np.where(has, parts["attributes"], 0)
    parts["block"], parts["attributes"], parts["flags"] = 0, 0, 0
    return _gathered(reader, parts, pa.binary(), None if has.all() else _bits(has))


def _gathered(
    reader: RingReader, slots: Rows, kind: pa.DataType, valid: pa.Buffer | None = None
) -> pa.Array:
    offsets = np.zeros(len(slots) + 1, np.int32)
    offsets[1:] = np.cumsum(slots["length"])
    data = pa.allocate_buffer(int(offsets[-1]))
    bad = reader._gather(np.ascontiguousarray(slots), data)  # noqa: SLF001 - as above
    if bad is not None:
        raise BadChecksum(bad)
    return pa.Array.from_buffers(kind, len(slots), [valid, pa.py_buffer(offsets), data])


class BadChecksum(Exception):
    """The bytes of a message do not have its checksum: overwritten, or damaged."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


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
