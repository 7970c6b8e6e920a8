"""How does `spark.read` read the current messages of streams?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

from penstock.core.errors import NotFound
from penstock.pipeline.source.loss_reports import LostRange
from penstock.pipeline.source.ranges import Range, why_gone
from penstock.pipeline.source.stream import TaskReading
from penstock.pipeline.spark_process import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.datasource import Filter

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.source.options import SourceOptions

__all__ = ["BatchReader"]


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
