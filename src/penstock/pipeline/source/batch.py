"""How does `spark.read` read the current messages of streams, and a task its part?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from penstock.core.errors import InvalidOption, NotFound
from penstock.core.position import check_seek
from penstock.pipeline.source.inputs import Streams
from penstock.pipeline.source.loss_reports import Attempt, DataLoss, LostRange, log, reports_of
from penstock.pipeline.source.ranges import PUT_BACK, ROW_SCHEMA, Range, read_range, split, why_gone
from penstock.pipeline.spark_process import BATCH, RUN, explained, settle_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql.datasource import Filter

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.source.options import SourceOptions

__all__ = ["BatchReader", "Part", "TaskReading"]


_READ_ANEW: Final = (
    "put the stream back that was read; or set failOnDataLoss=false, and what is there now is read "
    "from its beginning"
)


class Part(InputPartition):
    """The range that one task reads."""

    def __init__(self, range: Range, run: str) -> None:
        self.range = range
        #: The name for loss reports; empty: losses are only logged.
        self.run = run


class TaskReading:
    """Plans ranges and reads them. Pickled for the tasks without its open files."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._streams = Streams(options.url, options.stage)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # --- in a task -------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):  # Spark's own: there is nothing to read
            return
        settle_in()
        with explained():
            decoded = None
            if self._options.decode is not None:
                from penstock.pipeline.source.decoded_rows import DecodedRows  # noqa: PLC0415 - seldom

                decoded = DecodedRows(self._options.decode)
            for found in read_range(partition.range, _schema(self._options.columns)):
                if isinstance(found, LostRange):
                    self._lose(found, partition.run, _attempt())
                else:
                    yield found if decoded is None else decoded.of(found)

    def _lose(self, lost: LostRange, run: str, attempt: Attempt | None = None) -> None:
        """Raise `DataLoss`, or report the loss if `failOnDataLoss` is false."""
        if self._options.failOnDataLoss:
            raise DataLoss(lost, _READ_ANEW if lost.reason == PUT_BACK else None)
        self._tell(lost, run, attempt)

    def _tell(self, lost: LostRange, run: str, attempt: Attempt | None = None) -> None:
        options = self._options
        if options.lossUrl is not None or run:
            reports_of(options.lossUrl, options.lossFolder, run).report(lost, attempt)
        else:
            log.warning("%s", lost)

    # --- while planning --------------------------------------------------------------------------

    def _parts(self, ranges: Sequence[Range], run: str) -> list[Part]:
        options = self._options
        per_range = None
        if options.minPartitions is not None and ranges:
            per_range = -(-options.minPartitions // len(ranges))
        cores = os.cpu_count() or 1
        return [Part(part, run) for whole in ranges for part in split(whole, per_range, cores)]

    def _start(self, url: str, bounds: Bounds) -> int:
        """Return the start position in a stream.

        :raises PositionError: it is beyond the end of the stream.
        """
        options = self._options
        if (moment := options.start_time(url)) is not None:
            return self._streams.first_at(url, moment)
        if options.startingSeq is not None:
            return check_seek(url, options.startingSeq, bounds.oldest, bounds.end)
        return self._place(url, bounds, options.startingOffsets, bounds.oldest)

    def _place(
        self, url: str, bounds: Bounds, wanted: str | int | Mapping[str, int], otherwise: int
    ) -> int:
        if isinstance(wanted, dict):
            if url not in wanted:
                return otherwise
            wanted = wanted[url]
        if wanted == "earliest" or wanted == -2:  # noqa: PLR1714, PLR2004 - Kafka's numbers
            return bounds.oldest
        if wanted == "latest" or wanted == -1:  # noqa: PLR1714
            return bounds.end
        assert isinstance(wanted, int)
        return check_seek(url, wanted, bounds.oldest, bounds.end)

    def _check_urls(self, option: str, urls: Iterable[str]) -> None:
        """Check that the URLs named in an option are among the URLs of the source."""
        wanted = getattr(self._options, option)
        known = set(urls)
        for url in wanted if isinstance(wanted, dict) else ():
            if url not in known:
                raise InvalidOption(
                    option, url, "is none of the URLs", hint=f"those are {', '.join(sorted(known))}"
                )


def _attempt() -> Attempt | None:
    """Return the batch and the run that this task belongs to."""
    context = TaskContext.get()
    batch = None if context is None else context.getLocalProperty(BATCH)
    if context is None or not batch:
        return None
    return Attempt(int(batch), context.getLocalProperty(RUN) or "")


def _schema(names: Sequence[str] | None) -> pa.Schema:
    return ROW_SCHEMA if names is None else pa.schema([ROW_SCHEMA.field(name) for name in names])


@dataclass
class _Wanted:
    """Limits on messages that the filters of a query imply."""

    from_seq: int = 0
    #: Exclusive.
    to_seq: int = 2**63 - 1
    #: Append time, in nanoseconds.
    from_time: int | None = None
    to_time: int | None = None
    type: int | None = None

    def take(self, one: Filter) -> None:
        """Narrow the limits by a filter, if it applies to them."""
        column, (low, high) = getattr(one, "attribute", None), _limits(one)
        if column == ("seq",):
            self.from_seq = max(self.from_seq, low or 0)
            self.to_seq = self.to_seq if high is None else min(self.to_seq, max(high, 0))
        elif column == ("created_ns",):
            self.from_time = max((x for x in (low, self.from_time) if x is not None), default=None)
            self.to_time = min((x for x in (high, self.to_time) if x is not None), default=None)
        elif column == ("type",) and isinstance(one, EqualTo | EqualNullSafe):
            self.type = low


def _limits(one: Filter) -> tuple[int | None, int | None]:
    """Return the lower and the exclusive upper limit of a filter."""
    value = getattr(one, "value", None)
    if not isinstance(value, int):
        return None, None
    match one:
        case EqualTo() | EqualNullSafe():
            return value, value + 1
        case GreaterThan():
            return value + 1, None
        case GreaterThanOrEqual():
            return value, None
        case LessThan():
            return None, value
        case LessThanOrEqual():
            return None, value + 1
    return None, None


class _PushFilters:
    """The `pushFilters` method of a reader.

    Spark calls it if `spark.sql.python.filterPushdown.enabled` is set, and otherwise refuses a
    reader that overrides it. So it pretends to be the method of the base class, and works in
    sessions with any setting.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push: Callable[[list[Filter]], list[Filter]]) -> None:
        self._push = push

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._push(filters)


class BatchReader(TaskReading, DataSourceReader):
    """`spark.read.format("penstock")`: the current messages, or a part of them."""

    def __init__(self, options: SourceOptions) -> None:
        options.check_table()
        super().__init__(options)
        self._wanted = _Wanted()
        self.pushFilters = _PushFilters(self._push)  # type: ignore[method-assign]

    def _push(self, filters: list[Filter]) -> list[Filter]:
        """Note limits on numbers, append times and types.

        Spark applies all filters again: at least the messages that pass them are read.
        """
        if self._options.decode is None:  # which may give these names to other columns
            for one in filters:
                self._wanted.take(one)
        return filters

    @explained()
    def partitions(self) -> Sequence[InputPartition]:
        found = self._streams.look()
        if not found:
            raise NotFound(
                f"there is no stream at {', '.join(self._options.url)}",
                hint="a pattern goes by the names of queues, without .fmq, or of the directories "
                "of logs",
            )
        for option in ("startingOffsets", "startingOffsetsByTimestamp"):
            self._check_urls(option, found)
        for option in ("endingOffsets", "endingOffsetsByTimestamp"):
            self._check_urls(option, found)
        ranges = []
        for url, bounds in found.items():
            start, end = self._start(url, bounds), self._end(url, bounds)
            start, end = self._narrowed(url, bounds, start, end)
            if start < bounds.oldest < end:
                lost = LostRange(url, bounds.epoch, start, bounds.oldest - 1, why_gone(url))
                self._lose(lost, "")
                start = bounds.oldest
            if start < end:
                type_ = self._wanted.type if self._options.type is None else self._options.type
                ranges.append(Range(url, bounds.epoch, start, end, type_))
        self._streams.close()
        return self._parts(ranges, "")

    def _narrowed(self, url: str, bounds: Bounds, start: int, end: int) -> tuple[int, int]:
        """Narrow a range to the messages that can pass the filters."""
        wanted = self._wanted
        if wanted.from_time is not None and start < end:
            start = max(start, self._streams.first_at(url, wanted.from_time))
        if wanted.to_time is not None and start < end:
            end = min(end, self._streams.first_at(url, wanted.to_time))
        # Numbers that a filter excludes are no loss.
        return max(start, min(wanted.from_seq, bounds.end)), min(end, wanted.to_seq)

    def _end(self, url: str, bounds: Bounds) -> int:
        options = self._options
        if (moment := options.end_time(url)) is not None:
            return min(bounds.end, self._streams.first_at(url, moment))
        return self._place(url, bounds, options.endingOffsets, bounds.end)
