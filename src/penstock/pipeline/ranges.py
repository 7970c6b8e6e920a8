"""How is a range of a stream's messages read, and no gap in it overlooked?"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_reader
from penstock.core.errors import PenstockError
from penstock.core.position import Position
from penstock.pipeline.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

__all__ = ["DataLoss", "LostRange", "Range", "read_range", "split"]

log = logging.getLogger(__name__)

#: Messages, and bytes, of one Arrow batch for Spark.
_AT_ONCE: Final = 10_000
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


@dataclass(frozen=True, slots=True)
class LostRange:
    """Messages that were gone before Spark could read them."""

    url: str
    first: int
    last: int
    reason: str

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        which = f"seq {self.first} to {self.last}"
        return f"{self.url}: {self.count:,} messages lost ({which}): {self.reason}"


class DataLoss(PenstockError):
    """Messages that a query was to read are gone."""

    def __init__(self, lost: LostRange) -> None:
        super().__init__(
            str(lost),
            hint="make the queue larger, let the writer wait (hold=NAME), keep a log, or set "
            "failOnDataLoss=false to go on and count them",
        )
        self.lost = lost


def split(whole: Range, parts: int | None, cores: int) -> list[Range]:
    """Cut a range into parts of the same size, to be read at the same time."""
    count = whole.end - whole.start
    if count <= 0:
        return []
    wanted = parts if parts is not None else min(cores, -(-count // _WORTH_A_TASK))
    wanted = max(1, min(wanted, count))
    cuts = [whole.start + count * i // wanted for i in range(wanted + 1)]
    return [
        Range(whole.url, whole.epoch, low, high, whole.type)
        for low, high in itertools.pairwise(cuts)
    ]


def read_range(wanted: Range) -> Iterator[pa.RecordBatch | LostRange]:
    """Yield the rows of a range, and what of it is gone, in order.

    A ring may be overwritten before and while it is read; the reader finds out after each copy.
    """
    with open_reader(wanted.url, start=Position.START) as reader:
        bounds = reader.bounds()
        if bounds.epoch != wanted.epoch:
            yield LostRange(wanted.url, wanted.start, wanted.end - 1, "the queue was created anew")
            return
        reader.seek(wanted.start)
        at = wanted.start
        while at < wanted.end:
            batch = reader.read_batch(min(_AT_ONCE, wanted.end - at), timeout=0)
            first = batch.column("seq")[0].as_py() if batch.num_rows else wanted.end
            if first > at:
                yield LostRange(wanted.url, at, min(first, wanted.end) - 1, "overwritten")
            if not batch.num_rows or first >= wanted.end:
                return
            seqs = batch.column("seq")
            at = seqs[-1].as_py() + 1
            if at > wanted.end:
                batch = batch.slice(0, batch.num_rows - (at - wanted.end))
            if wanted.type is not None:
                batch = batch.filter(_is_type(batch, wanted.type))
            if batch.num_rows:
                yield rows_of(wanted.url, batch)


def _is_type(batch: pa.RecordBatch, type: int) -> pa.Array:
    import pyarrow.compute as pc  # noqa: PLC0415 - only where there is a filter

    return pc.equal(batch.column("type"), type)
