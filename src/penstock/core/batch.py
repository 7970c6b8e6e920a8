"""How do many messages travel as one Arrow batch?"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "BATCH_SCHEMA",
    "Batch",
    "batch_from_messages",
    "check_batch",
    "messages_from_batch",
    "numbers_of",
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


def batch_from_messages(messages: Sequence[Message]) -> Batch:
    """Turn messages into one batch.

    :raises Malformed: a value does not fit its column: a type above 32 bits, a stream of other
        than 16 bytes.
    """
    columns = zip(*messages, strict=True) if messages else [()] * len(BATCH_SCHEMA)
    arrays = [_array(field, values) for field, values in zip(BATCH_SCHEMA, columns, strict=True)]
    return pa.record_batch(arrays, schema=BATCH_SCHEMA)


def _array(field: pa.Field, values: Sequence[object]) -> pa.Array:
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
    return map(Message, *columns.values())


def check_batch(batch: Batch) -> None:
    """Make sure that a batch has the columns of `BATCH_SCHEMA`, in order, and no missing value.

    :raises Malformed: a column is missing, has another type, or has nulls where none may be.
    """
    if not batch.schema.equals(BATCH_SCHEMA):
        found = {field.name: field.type for field in batch.schema}
        for field in BATCH_SCHEMA:
            if found.get(field.name) != field.type:
                raise Malformed(
                    "batch", f"column {field.name}", field.type, found.get(field.name, "no column")
                )
        if batch.schema.names != BATCH_SCHEMA.names:
            raise Malformed("batch", "its columns", BATCH_SCHEMA.names, batch.schema.names)
    for field in BATCH_SCHEMA:
        if not field.nullable and batch.column(field.name).null_count:
            raise Malformed("batch", f"column {field.name}", "without nulls", "nulls")


def numbers_of(batch: Batch, name: str) -> NDArray[np.int64]:
    """Return a 64-bit column without nulls as numpy sees it, not a copy.

    As `to_numpy` does, which imports pandas where there is one, and that takes long.
    """
    column = batch.column(name)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
