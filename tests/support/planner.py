"""What Spark asks of a source while it plans, asked by a test."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from penstock.pipeline.source.ranges import ROW_SCHEMA
from penstock.pipeline.source.stream import Part, PenstockSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.streaming.datasource import ReadLimit

    from penstock.pipeline.source.stream import StreamReader

__all__ = ["Planner", "declared"]


def declared(source: PenstockSource) -> StructType:
    """Return the columns of a source, as Spark hands them back to it."""
    schema = source.schema()
    if isinstance(schema, StructType):
        return schema
    names = [column.split()[0] for column in schema.split(", ")]
    return from_arrow_schema(pa.schema([ROW_SCHEMA.field(name) for name in names]))


class Planner:
    """Plans batches as Spark does: each begins where the one before ended."""

    def __init__(self, url: str, **options: Any) -> None:
        given = {key.lower(): str(value) for key, value in options.items()}
        source = PenstockSource({"url": url, **given})
        reader: Any = source.streamReader(declared(source))
        self.reader: StreamReader = reader
        self.at: dict[str, Any] = {}
        self.parts: list[Part] = []

    def begin(self) -> dict[str, Any]:
        self.at = self.reader.initialOffset()
        return self.at

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Plan the next batch; False: there is nothing new."""
        before = self.at
        self.at = self.reader.latestOffset(before, limit or ReadAllAvailable())
        self.parts = self._parts(before)
        return self.at != before

    def _parts(self, before: dict[str, Any]) -> list[Part]:
        found = self.reader.partitions(before, self.at)
        return [part for part in found if isinstance(part, Part)]

    def read(self) -> list[int]:
        """Read the batch as tasks do, which get the reader and their part as bytes."""
        reader, parts = pickle.loads(pickle.dumps((self.reader, self.parts)))
        return [number for part in parts for number in _numbers(reader, part)]

    def run(self, limit: ReadLimit | None = None) -> list[int]:
        """Plan and read a batch."""
        return self.read() if self.plan(limit) else []


def _numbers(reader: StreamReader, part: Part) -> Iterator[int]:
    for batch in reader.read(part):
        yield from map(int, batch.column("payload").to_pylist())
