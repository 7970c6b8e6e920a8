"""How does `spark.read` read what streams hold now?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.core.errors import NotFound
from penstock.pipeline.explaining import explained
from penstock.pipeline.losses import LostRange
from penstock.pipeline.ranges import Range, why_gone
from penstock.pipeline.task_reading import TaskReading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.options import SourceOptions

__all__ = ["BatchReader"]


class BatchReader(TaskReading, DataSourceReader):
    """`spark.read.format("penstock")`: what is there now, or a part of it."""

    def __init__(self, options: SourceOptions) -> None:
        options.refuse(
            {"maxOffsetsPerTrigger", "maxBytesPerTrigger", "hold", "stage"},
            "is for readStream only",
        )
        super().__init__(options)

    @explained()
    def partitions(self) -> Sequence[InputPartition]:
        found = self._streams.look()
        if not found:
            raise NotFound(
                f"there is no stream at {', '.join(self._options.url)}",
                hint="a pattern goes by the names of queues, without .fmq, or of the directories "
                "of logs",
            )
        self._check_urls("startingOffsets", found)
        self._check_urls("endingOffsets", found)
        ranges = []
        for url, bounds in found.items():
            start, end = self._start(url, bounds), self._end(url, bounds)
            if start < bounds.oldest < end:
                lost = LostRange(url, bounds.epoch, start, bounds.oldest - 1, why_gone(url))
                self._lose(lost, "")
                start = bounds.oldest
            if start < end:
                ranges.append(Range(url, bounds.epoch, start, end, self._options.type))
        self._streams.close()
        return self._parts(ranges, "")

    def _end(self, url: str, bounds: Bounds) -> int:
        options = self._options
        if options.endingTime is not None:
            return min(bounds.end, self._streams.first_at(url, options.endingTime))
        return self._place(url, bounds, options.endingOffsets, bounds.end)
