"""What are the rows that Spark sees of a stream's messages?"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.core.batch import numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.batch import Batch

__all__ = ["ROW_SCHEMA", "SPARK_SCHEMA", "rows_of", "spark_schema"]

#: As Spark declares it. Spark's timestamps have microseconds; the exact times are `…_ns`.
SPARK_SCHEMA: Final = (
    "url STRING NOT NULL, seq BIGINT NOT NULL, time_ns BIGINT NOT NULL, "
    "created_ns BIGINT NOT NULL, type INT NOT NULL, subtype INT NOT NULL, stream BINARY, "
    "attributes BINARY, payload BINARY NOT NULL, time TIMESTAMP NOT NULL"
)

#: The same for Arrow. Spark takes a batch only if its schema is this one exactly.
ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("url", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("created_ns", pa.int64(), nullable=False),
        pa.field("type", pa.int32(), nullable=False),
        pa.field("subtype", pa.int32(), nullable=False),
        pa.field("stream", pa.binary()),
        pa.field("attributes", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("time", pa.timestamp("us", "UTC"), nullable=False),
    ]
)


def spark_schema(names: Sequence[str]) -> str:
    """Return these columns as Spark declares them."""
    declared = {column.partition(" ")[0]: column for column in SPARK_SCHEMA.split(", ")}
    return ", ".join(declared[name] for name in names)


def rows_of(url: str, batch: Batch, schema: pa.Schema = ROW_SCHEMA) -> pa.RecordBatch:
    """Turn a batch of messages into rows: all columns, or those of a schema."""
    return pa.RecordBatch.from_arrays([_column(n, url, batch) for n in schema.names], schema=schema)


def _column(name: str, url: str, batch: Batch) -> pa.Array:
    match name:
        case "url":
            return _repeated(url, len(batch))
        case "stream":
            return batch.column("stream").cast(pa.binary())
        case "time":
            # Towards the past, as clocks do, also before 1970.
            micros = numbers_of(batch, "time_ns") // 1000
            kind = ROW_SCHEMA.field("time").type
            return pa.Array.from_buffers(kind, len(micros), [None, pa.py_buffer(micros)])
        case _:
            return batch.column(name)


@lru_cache(maxsize=4)  # the batches of a task are mostly of one size
def _repeated(text: str, count: int) -> pa.StringArray:
    """Return a column with the same text in each row.

    From its buffers, as is the column of times: Arrow's own ways load pandas, which takes long.
    """
    data = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * len(data)
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data * count))
