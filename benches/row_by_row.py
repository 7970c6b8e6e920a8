"""The same Spark source, but for its rows: one Python tuple for each, and not Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.source.options import SourceOptions, parse_spark_options
from penstock.pipeline.source.stream import PenstockSource, StreamReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.types import StructType

__all__ = ["RowByRowSource"]


class RowByRowSource(PenstockSource):
    """`format("penstock-rows")`."""

    @classmethod
    def name(cls) -> str:
        return "penstock-rows"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return _RowByRow(parse_spark_options(self.options, SourceOptions))


class _RowByRow(StreamReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        for batch in super().read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
