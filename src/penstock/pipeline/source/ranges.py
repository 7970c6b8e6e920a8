"""Which range of a stream is read, and how does it become rows without a silent gap?"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import numbers_of
from penstock.core.endpoints import endpoint_of, open_reader
from penstock.core.errors import NotFound
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.pipeline.source.loss_reports import LostRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader

__all__ = [
    "CREATED_ANEW",
    "CUT_OFF",
    "NOT_THERE",
    "PUT_BACK",
    "ROW_SCHEMA",
    "SPARK_SCHEMA",
    "Range",
    "Slice",
    "Times",
    "read_range",
    "rows_of",
    "slices_from_json",
    "slices_to_json",
    "spark_schema",
    "split",
    "why_gone",
]

#: A range of source times: start, and exclusive end; nanoseconds since 1970.
Times = tuple[int, int]
#: In Spark's DDL. Spark's timestamps have microseconds; the exact times are `…_ns`.
SPARK_SCHEMA: Final = (
    "url STRING NOT NULL, seq BIGINT NOT NULL, time_ns BIGINT NOT NULL, "
    "created_ns BIGINT NOT NULL, type INT NOT NULL, subtype INT NOT NULL, stream BINARY, "
    "attributes BINARY, payload BINARY NOT NULL, time TIMESTAMP NOT NULL"
)

#: The same for Arrow. Spark accepts a batch only with exactly this schema.
ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("url", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("created_ns", pa.int64(), nullable=False),
        pa.field("type", pa.int32(), nullable=False),
        pa.field("subtype", pa.int32(), nullable=False),
        pa.field("stream", pa.binary()),
        pa.field("attributes", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("time", pa.timestamp("us", "UTC"), nullable=False),
    ]
)


CREATED_ANEW: Final = "the stream was created anew"
PUT_BACK: Final = "the stream was put back from an older copy, and goes on with other messages"
NOT_THERE: Final = "the stream is not there any more"
CUT_OFF: Final = "they were not on the disk when the power failed"
OVERWRITTEN: Final = "overwritten"
REMOVED: Final = "removed by the log's retention"

_WORDS: Final = {
    DropReason.OVERRUN: OVERWRITTEN,
    DropReason.RETENTION: REMOVED,
    DropReason.DAMAGED: "damaged",
}

#: The most messages and bytes of an Arrow batch for Spark, and the messages of the first one,
#: whose size is unknown.
_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 16 << 20
_AT_FIRST: Final = 64
#: Below this many messages a task of its own costs more than it saves.
_WORTH_A_TASK: Final = 20_000


class Slice(NamedTuple):
    """Messages `start` to `end` - 1 of an epoch of a stream, optionally of a time range."""

    epoch: int
    start: int
    end: int
    #: Only messages with these source times.
    times: Times | None = None
    #: Messages of other queries, which are left out: first message, end, and times.
    others: tuple[tuple[int, int, Times | None], ...] = ()

    def of(self, batch: Batch) -> Batch:
        """Filter a batch by `times` and `others`.

        The caller has to limit it to `start` and `end`.
        """
        if self.times is None and not self.others:
            return batch
        seqs, happened = numbers_of(batch, "seq"), numbers_of(batch, "time_ns")
        meant = np.ones(len(seqs), dtype=bool)
        if self.times is not None:
            meant &= (happened >= self.times[0]) & (happened < self.times[1])
        for start, end, times in self.others:
            theirs = (seqs >= start) & (seqs < end)
            if times is not None:
                theirs &= (happened >= times[0]) & (happened < times[1])
            meant &= ~theirs
        return batch if meant.all() else batch.filter(pa.array(meant))


def slices_to_json(slices: Mapping[str, Slice]) -> str:
    """Encode slices of streams as an option of the source."""
    return json.dumps(
        {url: [str(one.epoch), *one[1:]] for url, one in slices.items()}, sort_keys=True
    )


def slices_from_json(text: str | Mapping[str, Any]) -> dict[str, Slice]:
    """Parse the text of `slices_to_json`.

    :raises ValueError: it has another form.
    """
    given = json.loads(text) if isinstance(text, str) else text
    try:
        return {
            str(url): Slice(
                int(epoch),
                int(start),
                int(end),
                _times(times),
                tuple((int(low), int(high), _times(then)) for low, high, then in others),
            )
            for url, (epoch, start, end, times, others) in given.items()
        }
    except (TypeError, AttributeError) as error:
        raise ValueError("expected slices of streams") from error


def _times(given: Any) -> Times | None:
    return None if given is None else (int(given[0]), int(given[1]))


def spark_schema(names: Sequence[str]) -> str:
    """Return these columns in Spark's DDL."""
    declared = {column.partition(" ")[0]: column for column in SPARK_SCHEMA.split(", ")}
    return ", ".join(declared[name] for name in names)


def rows_of(url: str, batch: Batch, schema: pa.Schema = ROW_SCHEMA) -> pa.RecordBatch:
    """Convert a batch of messages to rows with the columns of a schema."""
    return pa.RecordBatch.from_arrays([_column(n, url, batch) for n in schema.names], schema=schema)


def _column(name: str, url: str, batch: Batch) -> pa.Array:
    match name:
        case "url":
            return _repeated(url, len(batch))
        case "stream":
            return batch.column("stream").cast(pa.binary())
        case "time":
            # Rounded down, also before 1970.
            micros = numbers_of(batch, "time_ns") // 1000
            kind = ROW_SCHEMA.field("time").type
            return pa.Array.from_buffers(kind, len(micros), [None, pa.py_buffer(micros)])
        case _:
            return batch.column(name)


@lru_cache(maxsize=4)  # the batches of a task are mostly of one size
def _repeated(text: str, count: int) -> pa.StringArray:
    """Return a column with the same text in each row.

    Built from buffers, as is the column of times: Arrow's functions would import pandas, slowly.
    """
    data = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * len(data)
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data * count))


@dataclass(frozen=True, slots=True)
class Range:
    """Messages `start` to `end` - 1 of a stream."""

    url: str
    epoch: int
    start: int
    end: int
    type: int | None = None
    #: The URL to read, if it is another one: that of the staging log.
    place: str | None = None
    #: Selects a part of the messages; None: all.
    slice: Slice | None = None

    def lost(self, first: int, last: int, reason: str) -> LostRange:
        return LostRange(self.url, self.epoch, first, last, reason)


def why_gone(place: str) -> str:
    """Return why the oldest messages of a stream are gone."""
    return _WORDS[endpoint_of(place).oldest_go_by]


def split(whole: Range, parts: int | None, cores: int) -> list[Range]:
    """Split a range into equal parts, to be read in parallel."""
    count = whole.end - whole.start
    if count <= 0:
        return []
    wanted = parts if parts is not None else min(cores, -(-count // _WORTH_A_TASK))
    wanted = max(1, min(wanted, count))
    cuts = [whole.start + count * i // wanted for i in range(wanted + 1)]
    return [replace(whole, start=low, end=high) for low, high in itertools.pairwise(cuts)]


def read_range(
    wanted: Range, schema: pa.Schema = ROW_SCHEMA
) -> Iterator[pa.RecordBatch | LostRange]:
    """Yield the rows of a range and its lost parts, in order.

    A ring may be overwritten before and while it is read; the reader detects that after each copy.
    Every message of the range is in a row, filtered out (by type or slice), or in a `LostRange`.
    """
    try:
        reader = open_reader(wanted.place or wanted.url, start=Position.START)
    except NotFound:
        yield wanted.lost(wanted.start, wanted.end - 1, NOT_THERE)
        return
    with reader:
        bounds = reader.bounds()
        cut = bounds.successor(wanted.epoch, wanted.end)
        if cut is None:
            yield wanted.lost(wanted.start, wanted.end - 1, CREATED_ANEW)
            return
        cut = min(cut, bounds.end)
        yield from _read(replace(wanted, end=cut), reader, schema)
        if cut < wanted.end:  # their numbers are those of other messages by now
            reason = CREATED_ANEW if bounds.epoch == wanted.epoch else CUT_OFF
            yield wanted.lost(max(cut, wanted.start), wanted.end - 1, reason)


def _read(wanted: Range, reader: Reader, schema: pa.Schema) -> Iterator[pa.RecordBatch | LostRange]:
    """Yield the rows of a range in the numbers of the stream's current epoch."""
    # This counter tells that the stream was recreated: bounds may already be those of the new one
    # while the last messages of the old one are delivered.
    restarts = reader.statistics().restarts
    at, most = wanted.start, _AT_FIRST
    if at < wanted.end:
        reader.seek(at)
    while at < wanted.end:
        batch = reader.read_batch(min(most, wanted.end - at), timeout=0)
        if reader.statistics().restarts != restarts:
            yield wanted.lost(at, wanted.end - 1, CREATED_ANEW)
            return
        if not batch.num_rows:
            yield wanted.lost(at, wanted.end - 1, _reason(reader, at))
            return
        yield from _gaps(wanted, reader, batch, at)
        most = _next_size(most, batch)
        at = int(numbers_of(batch, "seq")[-1]) + 1
        batch = _wanted_of(batch, wanted)
        if batch.num_rows:
            yield rows_of(wanted.url, batch, schema)


def _gaps(wanted: Range, reader: Reader, batch: Batch, at: int) -> Iterator[LostRange]:
    """Yield the gaps from `at` up to the last message of a batch."""
    numbers = numbers_of(batch, "seq")
    before = np.concatenate(([at - 1], numbers[:-1]))
    for i in np.flatnonzero(numbers != before + 1):
        first, last = int(before[i]) + 1, min(int(numbers[i]), wanted.end) - 1
        if first <= last:
            yield wanted.lost(first, last, _reason(reader, first))


def _wanted_of(batch: Batch, wanted: Range) -> Batch:
    """Return the messages of a batch that are in the range: after a gap it may extend beyond."""
    end = int(np.searchsorted(numbers_of(batch, "seq"), wanted.end))
    batch = batch.slice(0, end)
    if wanted.slice is not None:
        batch = wanted.slice.of(batch)
    if wanted.type is not None:
        batch = batch.filter(pc.equal(batch.column("type"), pa.scalar(wanted.type, pa.int32())))
    return batch


def _next_size(most: int, batch: Batch) -> int:
    """Return how many messages to read next, by the size of the latest ones."""
    each = max(1, int(batch.nbytes) // len(batch))
    return max(1, min(_AT_ONCE, most * 8, _BYTES_AT_ONCE // each))


def _reason(reader: Reader, first: int) -> str:
    for loss in reversed(reader.statistics().losses):
        if loss.first <= first <= loss.last:
            return _WORDS.get(loss.reason, loss.reason.value)
    return OVERWRITTEN
