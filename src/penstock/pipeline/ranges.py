"""How is a range of a stream's messages read, and no gap in it overlooked?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import numbers_of
from penstock.core.endpoints import endpoint_of, open_reader
from penstock.core.errors import NotFound
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.pipeline.losses import LostRange
from penstock.pipeline.rows import ROW_SCHEMA, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader

__all__ = ["CREATED_ANEW", "CUT_OFF", "Range", "read_range", "split", "why_gone"]

CREATED_ANEW: Final = "the stream was created anew"
CUT_OFF: Final = "they were not on the disk when the power failed"
OVERWRITTEN: Final = "overwritten"
REMOVED: Final = "removed by the log's retention"

_WORDS: Final = {
    DropReason.OVERRUN: OVERWRITTEN,
    DropReason.RETENTION: REMOVED,
    DropReason.DAMAGED: "damaged",
}

#: Messages, and bytes, of one Arrow batch for Spark, and messages of the first one, whose size
#: nobody knows yet.
_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 16 << 20
_AT_FIRST: Final = 64
#: Below this many messages a task of its own costs more than it saves.
_WORTH_A_TASK: Final = 20_000


@dataclass(frozen=True, slots=True)
class Range:
    """Messages `start` to `end` - 1 of a stream."""

    url: str
    epoch: int
    start: int
    end: int
    type: int | None = None
    #: Where they are read from, if that is another stream: the log that it is staged in.
    place: str | None = None

    def lost(self, first: int, last: int, reason: str) -> LostRange:
        return LostRange(self.url, self.epoch, first, last, reason)


def why_gone(place: str) -> str:
    """Say what becomes of the oldest messages of a stream."""
    return _WORDS[endpoint_of(place).oldest_go_by]


def split(whole: Range, parts: int | None, cores: int) -> list[Range]:
    """Cut a range into parts of the same size, to be read at the same time."""
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
    """Yield the rows of a range, and what of it is gone, in order.

    A ring may be overwritten before and while it is read; the reader finds out after each copy.
    Every message of the range is in a row, of another type, or in a `LostRange`.
    """
    try:
        reader = open_reader(wanted.place or wanted.url, start=Position.START)
    except NotFound:
        yield wanted.lost(wanted.start, wanted.end - 1, "the stream is not there any more")
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
    """Yield the rows of a range whose numbers are those of the stream as it is now."""
    # That it is created anew is told by this number: bounds may be those of the next stream
    # already, while the last messages of this one are delivered.
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
    """Yield what is missing from `at` up to the last message of a batch."""
    numbers = numbers_of(batch, "seq")
    before = np.concatenate(([at - 1], numbers[:-1]))
    for i in np.flatnonzero(numbers != before + 1):
        first, last = int(before[i]) + 1, min(int(numbers[i]), wanted.end) - 1
        if first <= last:
            yield wanted.lost(first, last, _reason(reader, first))


def _wanted_of(batch: Batch, wanted: Range) -> Batch:
    """Return what of a batch is in the range: it may begin late, and so end behind it."""
    end = int(np.searchsorted(numbers_of(batch, "seq"), wanted.end))
    batch = batch.slice(0, end)
    if wanted.type is not None:
        batch = batch.filter(pc.equal(batch.column("type"), pa.scalar(wanted.type, pa.int32())))
    return batch


def _next_size(most: int, batch: Batch) -> int:
    """Return how many messages to ask for, going by the size of the latest ones."""
    each = max(1, int(batch.nbytes) // len(batch))
    return max(1, min(_AT_ONCE, most * 8, _BYTES_AT_ONCE // each))


def _reason(reader: Reader, first: int) -> str:
    for loss in reversed(reader.statistics().losses):
        if loss.first <= first <= loss.last:
            return _WORDS.get(loss.reason, loss.reason.value)
    return OVERWRITTEN
