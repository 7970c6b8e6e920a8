"""What do the readers for batches and for streams share?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from penstock.core.errors import InvalidOption
from penstock.core.position import check_seek
from penstock.pipeline.explaining import explained
from penstock.pipeline.losses import Attempt, DataLoss, LostRange, log, reports_of
from penstock.pipeline.ranges import Range, read_range, split
from penstock.pipeline.rows import ROW_SCHEMA
from penstock.pipeline.streams import Streams
from penstock.pipeline.task_process import BATCH, RUN, settle_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.options import SourceOptions

__all__ = ["Part", "TaskReading"]


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, range: Range, run: str) -> None:
        self.range = range
        #: Under which name losses are reported; empty: nobody listens.
        self.run = run


class TaskReading:
    """Plans ranges and reads them. It is sent to the tasks, so without open files."""

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
                from penstock.pipeline.decoded_rows import DecodedRows  # noqa: PLC0415 - seldom

                decoded = DecodedRows(self._options.decode)
            for found in read_range(partition.range, _schema(self._options.columns)):
                if isinstance(found, LostRange):
                    self._lose(found, partition.run, _attempt())
                else:
                    yield found if decoded is None else decoded.of(found)

    def _lose(self, lost: LostRange, run: str, attempt: Attempt | None = None) -> None:
        """Fail, or say what was lost where people see it."""
        if self._options.failOnDataLoss:
            raise DataLoss(lost)
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
        """Return where to begin with a stream.

        :raises PositionError: that is behind its end.
        """
        options = self._options
        if options.startingTime is not None:
            return self._streams.first_at(url, options.startingTime)
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
        """Make sure that whoever names a URL in an option means one that is there."""
        wanted = getattr(self._options, option)
        known = set(urls)
        for url in wanted if isinstance(wanted, dict) else ():
            if url not in known:
                raise InvalidOption(
                    option, url, "is none of the URLs", hint=f"those are {', '.join(sorted(known))}"
                )


def _attempt() -> Attempt | None:
    """Return which attempt at which batch this task belongs to."""
    context = TaskContext.get()
    batch = None if context is None else context.getLocalProperty(BATCH)
    if context is None or not batch:
        return None
    return Attempt(int(batch), context.getLocalProperty(RUN) or "")


def _schema(names: Sequence[str] | None) -> pa.Schema:
    return ROW_SCHEMA if names is None else pa.schema([ROW_SCHEMA.field(name) for name in names])
