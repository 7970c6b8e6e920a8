"""How does Spark find our streams, `format("penstock")`, and how does it follow them?

`readStream` plans in one process beside the driver, and tells writers its progress.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
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

from penstock.core.endpoints import describe, is_named_by
from penstock.core.errors import InvalidOption, NotFound, PositionError
from penstock.core.position import check_seek
from penstock.pipeline.source.checkpoint import Offset, Offsets, offsets_from_json, offsets_to_json
from penstock.pipeline.source.inputs import Holders, Streams
from penstock.pipeline.source.loss_reports import (
    Attempt,
    DataLoss,
    LossReports,
    LostRange,
    discard,
    log,
    reports_of,
    uncounted,
)
from penstock.pipeline.source.options import SinkOptions, SourceOptions, parse_spark_options
from penstock.pipeline.source.ranges import (
    CREATED_ANEW,
    NOT_THERE,
    PUT_BACK,
    ROW_SCHEMA,
    SPARK_SCHEMA,
    Range,
    read_range,
    spark_schema,
    split,
    why_gone,
)
from penstock.pipeline.spark_process import BATCH, RUN, explained, freeze_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType

    from penstock.core.endpoints import Identity
    from penstock.core.interfaces import Bounds
    from penstock.pipeline.source.decoded_rows import DecodedRows
    from penstock.pipeline.source.ranges import Slice

__all__ = ["Part", "PenstockSource", "StreamReader", "TaskReading", "shares"]

_READ_ANEW: Final = (
    "put the stream back that was read; or set failOnDataLoss=false, and what is there now is read "
    "from its beginning"
)
_WITHOUT_IT: Final = (
    "if it was read to its end, start once with failOnDataLoss=false, which counts that once and "
    "goes on without it"
)
_PUT_BACK_OR: Final = f"put it back; or, {_WITHOUT_IT}"
_REMOVED: Final = "the stream was removed"
_REMOVED_MEANWHILE: Final = "the stream was removed while no query ran"
_NOT_NAMED: Final = "the source does not name it any more"
#: What to do about a loss, where a larger queue is no help.
_HINTS: Final = {
    PUT_BACK: _READ_ANEW,
    CREATED_ANEW: _READ_ANEW,
    NOT_THERE: _PUT_BACK_OR,
    _REMOVED: _PUT_BACK_OR,
    _REMOVED_MEANWHILE: _PUT_BACK_OR,
    _NOT_NAMED: f"name it again; or, {_WITHOUT_IT}",
}


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
        freeze_modules()
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
            raise DataLoss(lost, _HINTS.get(lost.reason))
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


class StreamReader(TaskReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock")`. Plans in one process beside the driver.

    Further instances exist during analysis; so nothing is opened before it is needed.
    """

    def __init__(self, options: SourceOptions) -> None:
        options.check_stream()
        super().__init__(options)
        self._initial: Offsets | None = None
        #: With `availableNow`: the bounds of streams at the start of the query. Keyed by identity,
        #: as slices are: names are those of the checkpoint, which is not known yet.
        self._last: dict[Identity, Bounds] | None = None
        self._holders = None if options.hold is None else Holders(options.hold)
        #: The name for loss reports of this query, kept across restarts; empty: a loss fails it.
        self._reader = "" if options.failOnDataLoss else uuid.uuid4().hex[:16]
        self._reports: LossReports | None = None
        self._slices = {
            self._streams.identity_of(url): one for url, one in (options.slices or {}).items()
        }
        self._planned: Offsets = {}
        self._turn = 0
        self._planned_at = time.monotonic()
        #: Remote streams whose last message was already compared.
        self._compared: set[str] = set()

    @explained()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        if self._initial is None:  # asked more than once: "latest" must not move meanwhile
            found = self._streams.look()
            for option in ("startingOffsets", "startingOffsetsByTimestamp"):
                self._check_urls(option, found)
            staged = self._streams.lost_before_staging()
            self._initial = {}
            for url, bounds in found.items():
                part = self._slice_of(url)
                at = self._start(url, bounds) if part is None else _begin_of(part, url, bounds)
                # Spark stores this offset with the first batch: until then a query that ends asks
                # for it anew, and what it lost is still new.
                counted = staged[url].counted if url in staged else None
                self._initial[url] = Offset(
                    bounds.epoch, at, at, reader=self._reader, lost_before_log=counted
                )
        return offsets_to_json(self._initial)

    @explained()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = {
            self._streams.identity_of(url): bounds for url, bounds in self._streams.look().items()
        }

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
        # First the losses: where each stream continues, before anything is read.
        begins = {url: self._go_on(known.get(url), url, bounds) for url, bounds in found.items()}
        begins |= self._removed({url: at for url, at in known.items() if url not in found})
        self._count_reported(begins, known)
        waiting = {
            url: self._end(url, bounds, begins[url].end) - begins[url].end
            for url, bounds in found.items()
        }
        room = {} if self._is_to_wait(waiting) else self._room(limit, waiting, found)
        offsets = known | {
            url: self._up_to(url, begin, begin.end + room.get(url, 0))
            for url, begin in begins.items()
        }
        is_new = any(
            offset.start < offset.end
            or (before := known.get(url)) is None
            # Also without messages: losses have to appear in the progress.
            or not _is_same(before, offset)
            for url, offset in offsets.items()
            if url in begins
        )
        self._planned = known
        if not is_new:
            return start
        self._turn += 1
        self._planned_at = time.monotonic()
        self._planned = {url: self._kept(known.get(url), each) for url, each in offsets.items()}
        return offsets_to_json(self._planned)

    def _known(self, stored: Mapping[str, Any]) -> Offsets:
        """Parse offsets of a checkpoint, and check that they are of this source.

        Spark identifies the sources of a query by their order alone. If that has changed, each
        would start without offsets, and read its messages again.
        """
        offsets, urls = offsets_from_json(stored), self._options.url
        if offsets and not any(is_named_by(name, url) for name in offsets for url in urls):
            raise PositionError(
                f"the checkpoint is about {', '.join(offsets)}, and the source is "
                f"{', '.join(urls)}",
                hint="put the sources of the query in the order that they had, or give it a new "
                "checkpointLocation, and it begins anew",
            )
        self._streams.use_names(offsets)
        if not self._options.failOnDataLoss:
            self._reader = next((at.reader for at in offsets.values() if at.reader), self._reader)
        return offsets

    @staticmethod
    def _kept(before: Offset | None, offset: Offset) -> Offset:
        """Return the old offset of a stream without news, which leaves it out of the batch."""
        return before if before is not None and _is_same(before, offset) else offset

    def _slice_of(self, url: str) -> Slice | None:
        """Return the part of a stream to read; None: all of it."""
        return self._slices.get(self._streams.identity_of(url)) if self._slices else None

    def _end(self, url: str, bounds: Bounds, begin: int) -> int:
        """Return the end up to which this query may read now."""
        end = self._end_now(url, bounds, begin)
        wanted = self._slice_of(url)
        if wanted is None:
            return end
        last = bounds.successor(wanted.epoch, wanted.end)
        return begin if last is None else max(begin, min(end, last))

    def _end_now(self, url: str, bounds: Bounds, begin: int) -> int:
        if self._last is None:
            return bounds.end
        last = self._last.get(self._streams.identity_of(url))
        end = None if last is None else bounds.successor(last.epoch, last.end)
        if end is None:
            return begin  # all of it came later
        return max(begin, min(bounds.end, end))

    def _up_to(self, url: str, begin: Offset, end: int) -> Offset:
        """Return the offset of a batch up to `end`, with the checksum of its last message."""
        if end == begin.end:
            return begin
        return replace(begin, end=end, check=self._streams.check_of(url, begin.epoch, end - 1))

    def _is_another(self, url: str, known: Offset, bounds: Bounds) -> bool:
        """Tell whether the number of the last read message now belongs to another message.

        A remote stream is checked once: a copy is restored while no query reads it.
        """
        at = known.end - 1
        if not known.check or not bounds.oldest <= at < bounds.end or url in self._compared:
            return False
        if not self._streams.is_near(url):
            self._compared.add(url)
        return self._streams.check_of(url, bounds.epoch, at) not in ("", known.check)

    def _go_on(self, known: Offset | None, url: str, bounds: Bounds) -> Offset:
        """Return where the next batch starts, with lost messages counted."""
        if known is None:  # it appeared after the query began: all of it is new
            return Offset(bounds.epoch, bounds.oldest, bounds.oldest, reader=self._reader)
        lost = None
        place = bounds.successor(known.epoch, known.end)
        at = bounds.oldest if place is None else place
        if known.is_gone and known.epoch != bounds.epoch:  # another one of that name
            at = bounds.oldest
        elif place is None or place > bounds.end:
            # Messages after the last check of the old stream cannot be counted.
            end = self._streams.end_seen(url, known.epoch) if known.epoch != bounds.epoch else None
            seen = max(0, (end or 0) - known.end)
            lost = LostRange(url, known.epoch, known.end, None, CREATED_ANEW, seen)
            at = bounds.oldest
        elif place == known.end and self._is_another(url, known, bounds):
            lost = LostRange(url, known.epoch, known.end, None, PUT_BACK)
            at = bounds.oldest
        elif place < bounds.oldest:
            reason = why_gone(self._streams.place(url))
            lost = LostRange(url, known.epoch, place, bounds.oldest - 1, reason)
            at = bounds.oldest
        offset = replace(
            known, epoch=bounds.epoch, end=at, start=at, reader=self._reader, is_gone=False
        )
        if at != known.end:
            offset = replace(offset, check="")
        if lost is None:
            return offset
        self._lose(lost, "")
        return _counted(offset, lost)

    def _removed(self, gone: Offsets) -> Offsets:
        """Return the final offsets of removed streams, with unread messages counted as lost."""
        ends = {}
        for url, known in gone.items():
            if known.is_gone:  # which is counted
                continue
            end = self._streams.end_of_removed(url, known.epoch)
            lost = None
            if end is None:  # it existed when the query ended; later messages are unknown
                is_named = any(is_named_by(url, one) for one in self._options.url)
                why = _REMOVED_MEANWHILE if is_named else _NOT_NAMED
                lost = LostRange(url, known.epoch, known.end, None, why)
            elif end > known.end:
                lost = LostRange(url, known.epoch, known.end, end - 1, _REMOVED)
            at = max(known.end, end or 0)
            ends[url] = replace(known, end=at, start=at, reader=self._reader, is_gone=True)
            if lost is not None:
                self._lose(lost, "")
                ends[url] = _counted(ends[url], lost)
        return ends

    def _count_reported(self, begins: Offsets, known: Offsets) -> None:
        """Count losses that tasks reported, and those of live streams before staging."""
        for url, on_the_way in self._streams.lost_before_staging().items():
            if (at := begins.get(url)) is None:
                continue
            if count := on_the_way.since(at.lost_before_log):
                lost = LostRange(url, at.epoch, at.end, None, "lost on the way here", count)
                self._tell(lost, "")  # it was never there to be read: no query ends for that
            begins[url] = replace(at, lost=at.lost + count, lost_before_log=on_the_way.total)
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

    def _is_to_wait(self, waiting: Mapping[str, int]) -> bool:
        """Tell whether to wait for more messages before the next batch."""
        least = self._options.minOffsetsPerTrigger
        if least is None or self._last is not None:  # what ends with what is there does not wait
            return False
        has_waited = time.monotonic() - self._planned_at
        return sum(waiting.values()) < least and has_waited < self._options.maxTriggerDelay

    def _room(
        self, limit: ReadLimit, waiting: Mapping[str, int], found: Mapping[str, Bounds]
    ) -> dict[str, int]:
        """Return the number of messages of each stream for the next batch."""
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
        """Estimate how many messages fit in `size` bytes, by the average of stored ones."""
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
        planned, self._planned = self._planned, after
        ranges = []
        for url, at in after.items():
            if at.lost_before_log is not None:  # Spark has stored the end of what it reads
                self._streams.note_counted(url, at.lost_before_log)
            if before.get(url) != at and at.start < at.end:
                if planned.get(url) != at:  # by an earlier life of this query
                    self._check_replay(url, at)
                place = self._streams.place(url)
                part, type_ = self._slice_of(url), self._options.type
                ranges.append(Range(url, at.epoch, at.start, at.end, type_, place, part))
        return self._parts(ranges, self._reader)

    def _check_replay(self, url: str, at: Offset) -> None:
        """Check that a replayed batch has the same messages as before.

        :raises DataLoss: it has not, and `failOnDataLoss` is set. Else the next batch counts it.
        """
        found = self._streams.check_of(url, at.epoch, at.end - 1) if at.check else ""
        if self._options.failOnDataLoss and found not in ("", at.check):
            self._lose(LostRange(url, at.epoch, at.start, None, PUT_BACK), "")

    # --- what the query has finished ------------------------------------------------------------

    @explained()
    def commit(self, end: dict[str, Any]) -> None:
        self._acknowledge(offsets_from_json(end))

    def _acknowledge(self, done: Offsets) -> None:
        """Let a writer that waits for this query overwrite what the query has finished.

        The start of the next batch is the end of the finished ones. It is acknowledged as well,
        since Spark may never call `commit` for the last batch.
        """
        if self._holders is None:
            return
        for url, offset in done.items():
            with suppress(NotFound):  # a stream that was removed has no writer that waits
                self._holders.done(self._streams.place(url), offset.epoch, offset.end)

    def stop(self) -> None:
        """Stop the copies of live streams, and close everything.

        Messages that were lost before the log since the last batch are only logged here: the count
        file beside the log makes the next life of the query count them.
        """
        if self._holders is not None:
            self._holders.close()
        self._streams.stop_copies()
        for url, on_the_way in self._streams.lost_before_staging().items():
            at = self._planned.get(url)
            if count := on_the_way.since(None if at is None else at.lost_before_log):
                log.warning("%s: %d messages lost on the way here since the last batch", url, count)
        if self._reports is not None:
            reported = self._reports.heard()
            left = any(uncounted(reported, url, last) for url, last in self._planned.items())
            if left or self._options.lossFolder is not None:
                self._reports.close()  # they are counted by `LossBook`, or when the query restarts
            else:
                discard(self._reports)
        self._streams.close()


def _begin_of(part: Slice, url: str, bounds: Bounds) -> int:
    """Return the start of a part of a stream.

    :raises PositionError: its first message is not in the stream any more.
    """
    at = bounds.successor(part.epoch, part.start)
    if at is None or at < bounds.oldest:
        raise PositionError(f"{url}: messages from {part.start} on are gone")
    return min(at, bounds.end)


def _is_same(before: Offset, offset: Offset) -> bool:
    """Tell whether an offset has nothing new."""
    return before == replace(
        offset, start=before.start, reader=before.reader, lost_before_log=before.lost_before_log
    )


def _counted(offset: Offset, lost: LostRange) -> Offset:
    unknown = offset.lost_unknown + (lost.last is None)
    return replace(offset, lost=offset.lost + lost.count, lost_unknown=unknown)


def shares(waiting: Mapping[str, int], most: int, turn: int) -> dict[str, int]:
    """Divide `most` messages among streams in proportion to their waiting messages.

    The rest from rounding goes one by one to streams that wait, starting with another one each
    time (`turn`), so that a stream with few messages does not starve.
    """
    total = sum(waiting.values())
    if total <= most:
        return dict(waiting)
    given = {url: most * count // total for url, count in waiting.items()}
    left = most - sum(given.values())
    behind = [url for url, count in sorted(waiting.items()) if count > given[url]]
    for i in range(min(left, len(behind))):
        given[behind[(turn + i) % len(behind)]] += 1
    return given


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
        from penstock.pipeline.source.batch import BatchReader  # noqa: PLC0415 - for df.read

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
        from penstock.pipeline.sink.stream_sink import BatchSink  # noqa: PLC0415 - for those who write

        return BatchSink(self._sink_options(overwrite), schema.names)

    @explained()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from penstock.pipeline.sink.stream_sink import StreamSink  # noqa: PLC0415 - as above

        return StreamSink(self._sink_options(overwrite), schema.names)

    def _source_options(self) -> SourceOptions:
        options = parse_spark_options(self.options, SourceOptions)
        options.check_together()
        return options

    def _check_schema(self, given: StructType) -> None:
        """Check that `.schema(…)`, if given, is the schema of the source.

        :raises InvalidOption: it is not: Spark would misread the rows.
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
    from penstock.pipeline.source.decoded_rows import DecodedRows  # noqa: PLC0415 - seldom needed

    return DecodedRows(options)
