"""How does `spark.readStream` follow streams?"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.core.endpoints import describe, is_named_by
from penstock.core.errors import NotFound, PositionError
from penstock.pipeline.admission import shares
from penstock.pipeline.explaining import explained
from penstock.pipeline.holding import Holders
from penstock.pipeline.losses import LossReports, LostRange, discard, reports_of, uncounted
from penstock.pipeline.offsets import Offset, Offsets, offsets_from_json, offsets_to_json
from penstock.pipeline.ranges import CREATED_ANEW, Range, why_gone
from penstock.pipeline.task_reading import TaskReading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.options import SourceOptions

__all__ = ["StreamReader"]


class StreamReader(TaskReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock")`. Plans in one process beside the driver.

    Others are made where a plan is put together; so nothing is opened before it is asked.
    """

    def __init__(self, options: SourceOptions) -> None:
        options.check_stream()
        super().__init__(options)
        self._initial: Offsets | None = None
        #: With `availableNow`: what was there when the query began.
        self._last: dict[str, Bounds] | None = None
        self._holders = None if options.hold is None else Holders(options.hold)
        #: The name of this query's losses, if they do not end it: the one that it had before.
        self._reader = "" if options.failOnDataLoss else uuid.uuid4().hex[:16]
        self._reports: LossReports | None = None
        self._planned: Offsets = {}
        self._turn = 0

    @explained()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        if self._initial is None:  # asked more than once: "latest" must not move meanwhile
            found = self._streams.look()
            self._check_urls("startingOffsets", found)
            self._initial = {}
            for url, bounds in found.items():
                at = self._start(url, bounds)
                self._initial[url] = Offset(bounds.epoch, at, at, reader=self._reader)
        return offsets_to_json(self._initial)

    @explained()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._streams.look()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.maxOffsetsPerTrigger is not None:
            return ReadMaxRows(options.maxOffsetsPerTrigger)
        if options.maxBytesPerTrigger is not None:
            return ReadMaxBytes(options.maxBytesPerTrigger)
        return ReadAllAvailable()

    @explained()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        known = self._known(start)
        self._acknowledge(known)
        found = self._streams.look(may_be_removed=not self._options.failOnDataLoss)
        # First what was lost by now: where each stream goes on, with nothing read yet.
        begins = {url: self._go_on(known.get(url), url, bounds) for url, bounds in found.items()}
        begins |= self._removed({url: at for url, at in known.items() if url not in found})
        self._count_reported(begins, known)
        waiting = {
            url: self._end(url, bounds, begins[url].end) - begins[url].end
            for url, bounds in found.items()
        }
        room = self._room(limit, waiting, found)
        offsets = known | {
            url: replace(begin, end=begin.end + room.get(url, 0)) for url, begin in begins.items()
        }
        is_new = any(
            offset.start < offset.end
            or (before := known.get(url)) is None
            # Also with nothing to read: what was lost is to be seen in the progress.
            or not _is_same(before, offset)
            for url, offset in offsets.items()
            if url in begins
        )
        self._planned = known
        if not is_new:
            return start
        self._turn += 1
        self._planned = {url: self._kept(known.get(url), each) for url, each in offsets.items()}
        return offsets_to_json(self._planned)

    def _known(self, stored: Mapping[str, Any]) -> Offsets:
        """Read offsets of a checkpoint, and make sure that they are of this source.

        Spark tells the sources of a query apart by their order alone. If that has changed, each
        would go on with nothing, and read again what it had read before.
        """
        offsets, urls = offsets_from_json(stored), self._options.url
        if offsets and not any(is_named_by(name, url) for name in offsets for url in urls):
            raise PositionError(
                f"the checkpoint is about {', '.join(offsets)}, and the source is "
                f"{', '.join(urls)}",
                hint="put the sources of the query in the order that they had, or give it a new "
                "checkpointLocation, and it begins anew",
            )
        self._streams.call(offsets)
        if not self._options.failOnDataLoss:
            self._reader = next((at.reader for at in offsets.values() if at.reader), self._reader)
        return offsets

    @staticmethod
    def _kept(before: Offset | None, offset: Offset) -> Offset:
        """Leave a stream that has nothing new as it was: then it has no part in the batch."""
        return before if before is not None and _is_same(before, offset) else offset

    def _end(self, url: str, bounds: Bounds, begin: int) -> int:
        """Return how far this query may read now."""
        if self._last is None:
            return bounds.end
        last = self._last.get(url)
        end = None if last is None else bounds.successor(last.epoch, last.end)
        if end is None:
            return begin  # all of it came later
        return max(begin, min(bounds.end, end))

    def _go_on(self, known: Offset | None, url: str, bounds: Bounds) -> Offset:
        """Return where the next batch begins, with what is gone by now counted."""
        if known is None:  # it appeared after the query began: all of it is new
            return Offset(bounds.epoch, bounds.oldest, bounds.oldest, reader=self._reader)
        lost = None
        place = bounds.successor(known.epoch, known.end)
        at = bounds.oldest if place is None else place
        if known.is_gone and known.epoch != bounds.epoch:  # another one of that name
            at = bounds.oldest
        elif place is None or place > bounds.end:
            # Nobody can tell what came between the last look and the end of the old one.
            end = self._streams.end_seen(url, known.epoch) if known.epoch != bounds.epoch else None
            seen = max(0, (end or 0) - known.end)
            lost = LostRange(url, known.epoch, known.end, None, CREATED_ANEW, seen)
            at = bounds.oldest
        elif place < bounds.oldest:
            reason = why_gone(self._streams.place(url))
            lost = LostRange(url, known.epoch, place, bounds.oldest - 1, reason)
            at = bounds.oldest
        offset = replace(
            known, epoch=bounds.epoch, end=at, start=at, reader=self._reader, is_gone=False
        )
        if lost is None:
            return offset
        self._lose(lost, "")
        return _counted(offset, lost)

    def _removed(self, gone: Offsets) -> Offsets:
        """Return where those end that are not there any more, with the rest lost."""
        ends = {}
        for url, known in gone.items():
            if known.is_gone:  # which is counted
                continue
            end = self._streams.end_of_removed(url, known.epoch)
            lost = None
            if end is None:  # it was there when the query ended, and nobody saw what came then
                why = "the stream was removed while no query ran"
                lost = LostRange(url, known.epoch, known.end, None, why)
            elif end > known.end:
                lost = LostRange(url, known.epoch, known.end, end - 1, "the stream was removed")
            at = max(known.end, end or 0)
            ends[url] = replace(known, end=at, start=at, reader=self._reader, is_gone=True)
            if lost is not None:
                self._lose(lost, "")
                ends[url] = _counted(ends[url], lost)
        return ends

    def _count_reported(self, begins: Offsets, known: Offsets) -> None:
        """Count what tasks lost of the batches before, and live streams before they were ours."""
        for url, count in self._streams.lost_before_staging().items():
            at = begins[url].end
            lost = LostRange(url, begins[url].epoch, at, None, "lost on the way here", count)
            self._tell(lost, "")  # it was never there to be read: no query ends for that
            begins[url] = replace(begins[url], lost=begins[url].lost + count)
        if self._options.failOnDataLoss:
            return
        reports = self._losses()
        reported = reports.heard()
        for url, last in known.items():
            if count := uncounted(reported, url, last):
                before = begins.get(url) or last  # it may be removed by now
                begins[url] = replace(before, start=before.end, lost=before.lost + count)
        reports.forget(known.items())

    def _losses(self) -> LossReports:
        if self._reports is None:
            options = self._options
            self._reports = reports_of(options.lossUrl, options.lossFolder, self._reader)
        return self._reports

    def _room(
        self, limit: ReadLimit, waiting: Mapping[str, int], found: Mapping[str, Bounds]
    ) -> dict[str, int]:
        """Return how many messages of each stream go into the next batch."""
        most = sum(waiting.values())
        if isinstance(limit, ReadMaxRows):
            most = min(most, limit.max_rows)
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if size is None and not isinstance(limit, ReadAllAvailable):
            size = self._options.maxBytesPerTrigger  # Spark knows of one limit only
        if size is not None and most:
            most = min(most, self._messages_in(size, found))
        return shares(waiting, most, self._turn)

    def _messages_in(self, size: int, found: Mapping[str, Bounds]) -> int:
        """Return how many messages have so many bytes, going by those that are there."""
        held = [describe(self._streams.place(url)) for url in found]
        count, used = sum(info.count for info in held), sum(info.bytes for info in held)
        return max(1, size * count // used) if used else size

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return {
            url: {"end": bounds.end, "epoch": str(bounds.epoch), "oldest": bounds.oldest}
            for url, bounds in sorted(self._streams.look(may_be_removed=True).items())
        }

    @explained()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, after = offsets_from_json(start), self._known(end)
        self._planned = after
        ranges = []
        for url, at in after.items():
            if before.get(url) != at and at.start < at.end:
                place = self._streams.place(url)
                ranges.append(Range(url, at.epoch, at.start, at.end, self._options.type, place))
        return self._parts(ranges, self._reader)

    # --- what the query has finished ------------------------------------------------------------

    @explained()
    def commit(self, end: dict[str, Any]) -> None:
        self._acknowledge(offsets_from_json(end))

    def _acknowledge(self, done: Offsets) -> None:
        """Let a writer that waits for this query go on, up to what is done for good.

        Where Spark asks for the next batch to begin is what it has finished. That is told also
        when the call for the last batch never comes.
        """
        if self._holders is None:
            return
        for url, offset in done.items():
            with suppress(NotFound):  # a stream that was removed has no writer that waits
                self._holders.done(self._streams.place(url), offset.epoch, offset.end)

    def stop(self) -> None:
        if self._holders is not None:
            self._holders.close()
        if self._reports is not None:
            reported = self._reports.heard()
            left = any(uncounted(reported, url, last) for url, last in self._planned.items())
            if left or self._options.lossFolder is not None:
                self._reports.close()  # somebody counts them, or the query when it is begun again
            else:
                discard(self._reports)
        self._streams.close()


def _is_same(before: Offset, offset: Offset) -> bool:
    """Tell whether an offset says nothing new."""
    return replace(offset, start=before.start, reader=before.reader) == before


def _counted(offset: Offset, lost: LostRange) -> Offset:
    unknown = offset.lost_unknown + (lost.last is None)
    return replace(offset, lost=offset.lost + lost.count, lost_unknown=unknown)
