"""How does Spark read streams? `spark.readStream.format("penstock")` and `spark.read`."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import InvalidOption, PositionError
from penstock.pipeline.offsets import Offset, Offsets, offsets_from_json, offsets_to_json
from penstock.pipeline.options import SinkOptions, SourceOptions, parse_spark_options
from penstock.pipeline.ranges import DataLoss, LostRange, Range, read_range, split
from penstock.pipeline.rows import SPARK_SCHEMA
from penstock.pipeline.sink import BatchSink, StreamSink
from penstock.pipeline.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.core.interfaces import Bounds, Reader

__all__ = ["PenstockSource"]

log = logging.getLogger(__name__)


class PenstockSource(DataSource):
    """`format("penstock")`."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return SPARK_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it is ours
        return _BatchReader(parse_spark_options(self.options, SourceOptions))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return _StreamReader(parse_spark_options(self.options, SourceOptions))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchSink(self._sink_options(overwrite), schema.names)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return StreamSink(self._sink_options(overwrite), schema.names)

    def _sink_options(self, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise InvalidOption(
                "mode", "overwrite", "a stream is appended to", hint='use mode("append")'
            )
        return parse_spark_options(self.options, SinkOptions)


class _Part(InputPartition):
    """What one task reads."""

    def __init__(self, range: Range) -> None:
        self.range = range


class _Reading:
    """What the batch and the stream reader share. Sent to the tasks, so without open files."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._streams = Streams(options.url)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        for found in read_range(partition.range):
            if isinstance(found, LostRange):
                self._lose(found)
            else:
                yield found

    def _lose(self, lost: LostRange) -> None:
        """Fail, or say what was lost where people see it."""
        if self._options.failOnDataLoss:
            raise DataLoss(lost)
        log.warning("%s", lost)
        if self._options.lossUrl is not None:
            record = {
                "url": lost.url,
                "first": lost.first,
                "last": lost.last,
                "reason": lost.reason,
            }
            with open_writer(self._options.lossUrl) as writer:
                writer.write(json.dumps(record, sort_keys=True).encode())

    def _parts(self, ranges: Sequence[Range]) -> list[_Part]:
        options = self._options
        per_range = None
        if options.minPartitions is not None and ranges:
            per_range = -(-options.minPartitions // len(ranges))
        cores = os.cpu_count() or 1
        return [_Part(part) for whole in ranges for part in split(whole, per_range, cores)]

    def _place(self, url: str, bounds: Bounds, wanted: str | int | Mapping[str, int]) -> int:
        if isinstance(wanted, dict):
            if url not in wanted:
                return bounds.oldest
            wanted = wanted[url]
        if wanted == "earliest" or wanted == -2:  # noqa: PLR1714, PLR2004 - Kafka's numbers
            return bounds.oldest
        if wanted == "latest" or wanted == -1:  # noqa: PLR1714
            return bounds.end
        assert isinstance(wanted, int)
        if wanted < 0:
            raise PositionError(f"{url}: there is no message {wanted}")
        return wanted

    def _start(self, url: str, bounds: Bounds) -> int:
        options = self._options
        if options.startingTime is not None:
            return self._streams.first_at(url, options.startingTime)
        if options.startingSeq is not None:
            return options.startingSeq
        return self._place(url, bounds, options.startingOffsets)


class _BatchReader(_Reading, DataSourceReader):
    """`spark.read.format("penstock")`: what is there now, or a part of it."""

    def partitions(self) -> Sequence[InputPartition]:
        ranges = []
        for url, bounds in self._streams.look().items():
            start, end = self._start(url, bounds), self._end(url, bounds)
            if start < bounds.oldest < end:
                self._lose(LostRange(url, start, bounds.oldest - 1, "overwritten"))
                start = bounds.oldest
            if start < end:
                ranges.append(Range(url, bounds.epoch, start, end, self._options.type))
        self._streams.close()
        return self._parts(ranges)

    def _end(self, url: str, bounds: Bounds) -> int:
        options = self._options
        if options.endingTime is not None:
            return self._streams.first_at(url, options.endingTime)
        return min(bounds.end, self._place(url, bounds, options.endingOffsets))


class _StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock")`. Plans in one process beside the driver."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._initial: Offsets | None = None
        #: With `availableNow`: where each stream ended when the query began.
        self._last: dict[str, int] | None = None
        self._holders: dict[str, Reader] = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        if self._initial is None:  # asked more than once: "latest" must not move meanwhile
            self._initial = {}
            for url, bounds in self._streams.look().items():
                at = self._start(url, bounds)
                self._initial[url] = Offset(bounds.epoch, at, at)
        return offsets_to_json(self._initial)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = {url: bounds.end for url, bounds in self._streams.look().items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.maxOffsetsPerTrigger is not None:
            return ReadMaxRows(options.maxOffsetsPerTrigger)
        if options.maxBytesPerTrigger is not None:
            return ReadMaxBytes(options.maxBytesPerTrigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        known = offsets_from_json(start)
        self._acknowledge(known)
        found = self._streams.look()
        backlog = {url: self._from(known.get(url), url, bounds) for url, bounds in found.items()}
        room = self._room(limit, backlog, found)
        offsets = dict(known)
        is_new = False
        for url, bounds in found.items():
            begin = backlog[url]
            end = bounds.end if self._last is None else min(bounds.end, self._last.get(url, begin))
            end = max(begin, min(end, begin + room[url]))
            before = known.get(url)
            if before is None or end > begin or before.epoch != bounds.epoch or begin != before.end:
                is_new = is_new or end > begin
                offsets[url] = Offset(bounds.epoch, end, begin)
        return offsets_to_json(offsets) if is_new else start

    def _from(self, known: Offset | None, url: str, bounds: Bounds) -> int:
        """Return where the next batch begins; what is gone by now is told of."""
        if known is None:  # it appeared after the query began: all of it is new
            return bounds.oldest
        if known.epoch != bounds.epoch or known.end > bounds.end:
            self._lose(LostRange(url, known.end, known.end, "the queue was created anew"))
            return bounds.oldest
        if known.end < bounds.oldest:
            self._lose(LostRange(url, known.end, bounds.oldest - 1, "overwritten"))
            return bounds.oldest
        return known.end

    def _room(
        self, limit: ReadLimit, backlog: Mapping[str, int], found: Mapping[str, Bounds]
    ) -> dict[str, int]:
        """Return how many messages of each stream fit into the next batch."""
        waiting = {url: found[url].end - begin for url, begin in backlog.items()}
        total = sum(waiting.values())
        most = total
        if isinstance(limit, ReadMaxRows):
            most = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            most = self._messages_in(limit.max_bytes, found)
        if total <= most:
            return waiting
        # To each its share, and at least one where there is any.
        return {
            url: max(1, most * count // total) if count else 0 for url, count in waiting.items()
        }

    def _messages_in(self, size: int, found: Mapping[str, Bounds]) -> int:
        """Return how many messages have so many bytes, going by those of late."""
        from penstock.core.endpoints import describe  # noqa: PLC0415 - seldom needed

        held = [describe(url) for url in found]
        count, used = sum(info.count for info in held), sum(info.bytes for info in held)
        return max(1, size * count // used) if used else size

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return {
            url: {"end": bounds.end, "epoch": str(bounds.epoch), "oldest": bounds.oldest}
            for url, bounds in sorted(self._streams.look().items())
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, after = offsets_from_json(start), offsets_from_json(end)
        ranges = [
            Range(url, offset.epoch, offset.start, offset.end, self._options.type)
            for url, offset in after.items()
            if before.get(url) != offset and offset.start < offset.end
        ]
        return self._parts(ranges)

    # --- what the query has finished ------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        self._acknowledge(offsets_from_json(end))

    def _acknowledge(self, done: Offsets) -> None:
        """Let a writer that waits for this query go on, up to what is done for good.

        The start of a batch is what was committed before. That is told also when the call for
        the last batch never comes.
        """
        if self._options.hold is None:
            return
        for url, offset in done.items():
            holder = self._holders.get(url)
            if holder is None:
                holder = self._holders[url] = open_reader(url, hold=self._options.hold)
            if holder.bounds().epoch == offset.epoch:
                holder.seek(offset.end)

    def stop(self) -> None:
        for holder in self._holders.values():
            holder.close()
        self._holders.clear()
        self._streams.close()
