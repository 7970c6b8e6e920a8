"""What are the rows that Spark sees of a stream's messages?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from penstock.core.batch import Batch

__all__ = ["ROW_SCHEMA", "SPARK_SCHEMA", "rows_of"]

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

_THOUSAND: Final = pa.scalar(1000, pa.int64())


def rows_of(url: str, batch: Batch) -> pa.RecordBatch:
    """Turn a batch of messages into rows."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["url"] = pa.repeat(pa.scalar(url, pa.string()), len(batch))
    columns["stream"] = columns["stream"].cast(pa.binary())
    # Towards the past, as clocks do, also before 1970.
    micros = pc.divide(columns["time_ns"], _THOUSAND)
    is_cut = pc.and_(
        pc.less(columns["time_ns"], 0),
        pc.not_equal(pc.multiply(micros, _THOUSAND), columns["time_ns"]),
    )
    micros = pc.subtract(micros, is_cut.cast(pa.int64()))
    columns["time"] = micros.cast(pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays([columns[n] for n in ROW_SCHEMA.names], schema=ROW_SCHEMA)
