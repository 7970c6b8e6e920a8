"""How does Spark find our streams? `format("penstock")`, to read and to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from penstock.core.errors import InvalidOption
from penstock.pipeline.batch_reading import BatchReader
from penstock.pipeline.explaining import explained
from penstock.pipeline.options import SinkOptions, SourceOptions, parse_spark_options
from penstock.pipeline.rows import SPARK_SCHEMA, spark_schema
from penstock.pipeline.sink import BatchSink, StreamSink
from penstock.pipeline.stream_reading import StreamReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType

    from penstock.pipeline.decoded_rows import DecodedRows

__all__ = ["PenstockSource"]


class PenstockSource(DataSource):
    """`format("penstock")`."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    @explained()
    def schema(self) -> str | StructType:
        options = self._source_options()  # a mistake is told of at once
        if options.decode is not None:
            return _decoded(options.decode).spark_schema
        return SPARK_SCHEMA if options.columns is None else spark_schema(options.columns)

    @explained()
    def reader(self, schema: StructType) -> DataSourceReader:
        reader = BatchReader(self._source_options())
        self._check_schema(schema)
        return reader

    @explained()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        reader = StreamReader(self._source_options())
        self._check_schema(schema)
        return reader

    @explained()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchSink(self._sink_options(overwrite), schema.names)

    @explained()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return StreamSink(self._sink_options(overwrite), schema.names)

    def _source_options(self) -> SourceOptions:
        options = parse_spark_options(self.options, SourceOptions)
        options.check_together()
        return options

    def _check_schema(self, given: StructType) -> None:
        """Make sure that `.schema(…)` asks for nothing else than what comes.

        :raises InvalidOption: it does. Spark would take the rows for something that they are not.
        """
        if _columns(given) != _columns(self.schema()):
            raise InvalidOption(
                "schema",
                given.simpleString(),
                "a stream has its own",
                hint='leave .schema(…) out; .option("columns", …) chooses columns, and '
                '.option("decode", …) with .option("schema", …) makes columns of payloads',
            )

    def _sink_options(self, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise InvalidOption(
                "mode", "overwrite", "a stream is appended to", hint='use mode("append")'
            )
        return parse_spark_options(self.options, SinkOptions)


def _columns(schema: str | StructType) -> list[tuple[str, str]]:
    """Return the names and types of columns. Spark cannot read its own DDL in this process."""
    if isinstance(schema, str):
        words = (column.split() for column in schema.lower().split(", "))
        return [(name, type_) for name, type_, *_ in words]
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


def _decoded(options: Mapping[str, Any]) -> DecodedRows:
    from penstock.pipeline.decoded_rows import DecodedRows  # noqa: PLC0415 - seldom needed

    return DecodedRows(options)
