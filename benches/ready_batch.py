"""A Spark source that has nothing to read: its tasks yield a batch that is ready, again and again.

It has the columns of ours. So it is as fast as a source in Python can be with these columns.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from penstock.core.batch import BATCH_SCHEMA
from penstock.pipeline.source.ranges import SPARK_SCHEMA, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

__all__ = ["ReadyBatchSource"]

#: Rows of the batch, as many as our source sends at once.
_ROWS = 10_000


class ReadyBatchSource(DataSource):
    """`format("ready-batch")`: one batch of as many rows as `rows` says, in two parts."""

    @classmethod
    def name(cls) -> str:
        return "ready-batch"

    def schema(self) -> str:
        return SPARK_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        rows, size = (int(self.options[name]) for name in ("rows", "size"))
        return _ReadyBatch(self.options["url"], rows, size)


class _Share(InputPartition):
    def __init__(self, rows: int) -> None:
        self.rows = rows


class _ReadyBatch(DataSourceStreamReader):
    def __init__(self, url: str, rows: int, size: int) -> None:
        self._url = url
        self._rows = rows
        self._size = size

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002, N802
        return {"rows": self._rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[_Share]:
        return [_Share((end["rows"] - start["rows"]) // 2)] * 2

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Share)
        batch = _ready(self._url, self._size)
        for _ in range(partition.rows // _ROWS):
            yield batch


@cache
def _ready(url: str, size: int) -> pa.RecordBatch:
    given = {
        "payload": pa.array([bytes(size)] * _ROWS, pa.binary()),
        "stream": pa.nulls(_ROWS, BATCH_SCHEMA.field("stream").type),
        "attributes": pa.nulls(_ROWS, pa.binary()),
    }
    numbers = pa.array(np.arange(_ROWS))
    columns = [
        given[field.name] if field.name in given else numbers.cast(field.type)
        for field in BATCH_SCHEMA
    ]
    return rows_of(url, pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA))
