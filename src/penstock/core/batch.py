"""How do many messages travel as one Arrow batch?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.errors import Malformed
from penstock.core.message import CopiedMessage, Message
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "BATCH_SCHEMA",
    "ORIGIN_SCHEMA",
    "Batch",
    "batch_from_messages",
    "bytes_of",
    "check_batch",
    "count_headers",
    "integers_in",
    "messages_from_batch",
    "numbers_of",
    "same_integers",
    "with_origins",
    "without_origins",
]

#: Many messages: a plain Arrow record batch of `BATCH_SCHEMA`, so that every Arrow tool takes it.
Batch: TypeAlias = pa.RecordBatch

BATCH_SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("created_ns", pa.int64(), nullable=False),
        pa.field("type", pa.int32(), nullable=False),
        pa.field("subtype", pa.int32(), nullable=False),
        pa.field("stream", pa.binary(16)),
        pa.field("attributes", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)

#: The same for copies, with the time at which each message was appended to its first queue.
#: Returned by `read_batch_with_origins` only.
ORIGIN_SCHEMA = BATCH_SCHEMA.append(pa.field("origin_ns", pa.int64(), nullable=False))


def batch_from_messages(messages: Sequence[Message], *, origins: bool = False) -> Batch:
    """Turn messages into one batch.

    :param origins: with the column `origin_ns`
    :raises Malformed: a value does not fit its column: a type above 32 bits, a stream of other
        than 16 bytes.
    """
    columns = zip(*messages, strict=True) if messages else [()] * len(BATCH_SCHEMA)
    arrays = [_array(field, values) for field, values in zip(BATCH_SCHEMA, columns, strict=True)]
    if origins:
        first = [message.origin_ns for message in messages]
        arrays.append(_array(ORIGIN_SCHEMA.field("origin_ns"), first))
    return pa.record_batch(arrays, schema=ORIGIN_SCHEMA if origins else BATCH_SCHEMA)


def _array(field: pa.Field, values: Sequence[object]) -> pa.Array:
    if not values:  # the first call of `pa.array` imports pandas, if it is there
        return pa.nulls(0, field.type)
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, OverflowError) as error:
        raise Malformed("messages", field.name, field.type, error) from error


def messages_from_batch(batch: Batch) -> Iterator[Message]:
    """Return the messages of a batch in order.

    :raises Malformed: the batch does not have the columns of a batch.
    """
    check_batch(batch)
    columns = {name: batch.column(name).to_pylist() for name in BATCH_SCHEMA.names}
    columns["stream"] = [id if id is None else StreamId(id) for id in columns["stream"]]
    messages = map(Message, *columns.values())
    if "origin_ns" not in batch.schema.names:
        return messages
    return map(CopiedMessage.of, messages, batch.column("origin_ns").to_pylist())


def with_origins(batch: Batch) -> Batch:
    """Return a batch with the column `origin_ns`, by default `created_ns`."""
    if "origin_ns" in batch.schema.names:
        return batch
    return batch.append_column(ORIGIN_SCHEMA.field("origin_ns"), batch.column("created_ns"))


def without_origins(batch: Batch) -> Batch:
    """Return a batch with the columns of `BATCH_SCHEMA` alone."""
    return batch.select(BATCH_SCHEMA.names) if "origin_ns" in batch.schema.names else batch


def check_batch(batch: Batch) -> None:
    """Check that a batch has the columns of `BATCH_SCHEMA`, in order, and no missing value.

    The columns of `ORIGIN_SCHEMA` are accepted as well.

    :raises Malformed: a column is missing, has another type, or has nulls where none may be.
    """
    expected = ORIGIN_SCHEMA if "origin_ns" in batch.schema.names else BATCH_SCHEMA
    if not batch.schema.equals(expected):
        found = {field.name: field.type for field in batch.schema}
        for field in expected:
            if found.get(field.name) != field.type:
                raise Malformed(
                    "batch", f"column {field.name}", field.type, found.get(field.name, "no column")
                )
        if batch.schema.names != expected.names:
            raise Malformed("batch", "its columns", expected.names, batch.schema.names)
    for field in expected:
        if not field.nullable and batch.column(field.name).null_count:
            raise Malformed("batch", f"column {field.name}", "without nulls", "nulls")


def numbers_of(batch: Batch, name: str) -> NDArray[np.int64]:
    """Return a column of integers without nulls as a numpy array, without a copy."""
    return integers_in(batch.column(name))


def integers_in(column: pa.Array) -> NDArray[Any]:
    """Return the signed integers of an array without nulls, without a copy.

    `to_numpy` would import pandas where it is installed: a quarter of a second.
    """
    width = column.type.bit_width // 8
    if not len(column):
        return np.empty(0, f"i{width}")
    return np.frombuffer(column.buffers()[1], f"i{width}", len(column), width * column.offset)


def same_integers(value: int, count: int, kind: pa.DataType) -> pa.Array:
    """Return an array of one signed integer, repeated. `pa.scalar` would import pandas."""
    values = np.full(count, value, f"i{kind.bit_width // 8}")
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])


def bytes_of(column: pa.BinaryArray) -> int:
    """Count the bytes of the values in a column of `binary`."""
    if not len(column):
        return 0
    offsets = memoryview(column.buffers()[1]).cast("i")
    size: int = offsets[column.offset + len(column)] - offsets[column.offset]
    return size


def count_headers(batch: Batch, *optional: str) -> int:
    """Count the messages that have a type, a subtype or an optional field."""
    has = np.zeros(len(batch), np.bool_)
    for name in ("type", "subtype"):
        column = batch.column(name)
        has |= integers_in(column) != 0
    for name in optional:
        column = batch.column(name)
        if column.null_count < len(batch):
            has |= column.is_valid().to_numpy(zero_copy_only=False)
    return int(has.sum())
