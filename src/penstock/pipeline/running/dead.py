"""How do rows become dead letters?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.message import Message
from penstock.core.stream_id import StreamId
from penstock.pipeline.running.rows_out import for_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["dead_letters"]

_SCHEMA = "payload BINARY, type INT, subtype INT, time_ns BIGINT, stream BINARY, attributes BINARY"


def dead_letters(frame: DataFrame, receiver: str) -> DataFrame:
    """Return the rows as dead letters that this pipeline gave up."""
    rows = for_output(frame, [receiver]).drop("output")
    reason = f"pipeline {receiver} sent it to its dead letters"

    def give_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield _letters(batch, receiver, reason)

    return rows.mapInArrow(give_up, _SCHEMA)


def _letters(batch: pa.RecordBatch, receiver: str, reason: str) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - in a worker of Spark

    now = time.time_ns()
    attributes = []
    for row in batch.to_pylist():
        stream = row["stream"]
        original = Message(
            seq=0,
            time_ns=row["time_ns"],
            created_ns=now,
            type=row["type"],
            subtype=row["subtype"],
            stream=None if stream is None else StreamId.from_bytes(stream),
            attributes=row["attributes"],
            payload=row["payload"],
        )
        letter = DeadLetter(original, Code.UNKNOWN, reason, receiver, 1, now, now, now)
        attributes.append(letter.to_message().attributes)
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["attributes"] = pa.array(attributes, pa.binary())
    for name in ("type", "subtype"):  # a row may have them as any whole number
        columns[name] = columns[name].cast(pa.int32())
    return pa.RecordBatch.from_pydict(columns)
