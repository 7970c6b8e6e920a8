"""How are consecutive messages kept together, as columns instead of one by one?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.batch import numbers_of
from penstock.protocols.lhhttt._frames import frames, join_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Buffer

    from penstock.core.batch import Batch
    from penstock.protocols.lhhttt.clients import Loan

__all__ = ["Range", "Run", "RunMap", "count_of", "framed", "merged", "runs_of_batch"]

#: Numbers of messages, from the first up to the end.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Messages with consecutive numbers."""

    first: int
    #: Where each begins in the bytes of all, and where the last one ends.
    offsets: memoryview
    data: Buffer
    #: What they are lent by.
    loan: Loan | None = None

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    @property
    def end(self) -> int:
        return self.first + len(self.offsets) - 1

    @property
    def range(self) -> Range:
        return self.first, self.end

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return int(self.offsets[-1]) - int(self.offsets[0])

    def part(self, first: int, end: int, loan: Loan | None = None) -> Run:
        """Return the part of the run with these numbers."""
        offsets = self.offsets[first - self.first : end - self.first + 1]
        return Run(first, offsets, self.data, loan or self.loan)

    def count_within(self, room: int, more: int) -> int:
        """Return how many messages from the start fit into `room` bytes, with `more` bytes each."""
        offsets, start = self.offsets, self.offsets[0]
        return bisect_right(
            range(1, len(offsets)), room, key=lambda count: offsets[count] - start + count * more
        )

    def count_below(self, size: int, most: int) -> int:
        """Return how many messages from the start, at most `most`, have up to `size` bytes."""
        offsets = self.offsets[: most + 1]
        if offsets[-1] - offsets[0] <= size:
            return len(offsets) - 1
        sizes = map(int.__sub__, offsets[1:], offsets)
        return next((at for at, each in enumerate(sizes) if each > size), len(offsets) - 1)

    def payload(self) -> bytes:
        """Return the first message."""
        return bytes(memoryview(self.data)[self.offsets[0] : self.offsets[1]])

    def frames(self) -> list[bytes]:
        """Return the frame of each message."""
        return frames(self.offsets, self.data)


def framed(head: bytes, runs: Iterable[Run]) -> bytes:
    """Return one frame of a head and the frames of the messages of runs."""
    return join_columns(head, [(run.offsets, run.data) for run in runs])


def runs_of_batch(batch: Batch) -> Iterator[Run]:
    """Yield the messages of a batch as runs, in their order."""
    numbers = numbers_of(batch, "seq")
    payloads = batch.column("payload")
    _, offsets, data = payloads.buffers()
    places = memoryview(offsets).cast("i")[payloads.offset :]
    ends = [*np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers)] if len(numbers) else []
    at = 0
    for end in map(int, ends):
        yield Run(int(numbers[at]), places[at : end + 1], data or b"")
        at = end


def count_of(ranges: Iterable[Range]) -> int:
    """Count the numbers in ranges."""
    return sum([end - first for first, end in ranges])


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges sorted, with adjacent ones merged."""
    found: list[Range] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], end
        else:
            found.append((first, end))
    return found


class RunMap:
    """Runs sorted by their numbers, without overlaps."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._runs: dict[int, Run] = {}
        #: Messages in all of them, and their bytes.
        self.count = self.size = 0

    def add(self, run: Run) -> None:
        insort(self._firsts, run.first)
        self._runs[run.first] = run
        self.count += run.count
        self.size += run.size

    def next(self) -> Run | None:
        """Return the run with the lowest numbers, if there is any."""
        return self._runs[self._firsts[0]] if self._firsts else None

    def within(self, first: int, end: int) -> Iterator[Run]:
        """Yield the parts of runs between `first` and `end`. Removing while iterating is fine."""
        at = max(0, bisect_right(self._firsts, first) - 1)
        for start in self._firsts[at : bisect_left(self._firsts, end)]:
            run = self._runs[start]
            if run.end > first:
                yield run.part(max(run.first, first), min(run.end, end))

    def remove(self, part: Run) -> None:
        """Remove a part of one of its runs."""
        at = bisect_right(self._firsts, part.first) - 1
        run = self._runs.pop(self._firsts.pop(at))
        self.count -= run.count
        self.size -= run.size
        if run.first < part.first:
            self.add(run.part(run.first, part.first))
        if part.end < run.end:
            self.add(run.part(part.end, run.end))

    def take(self, first: int, end: int) -> list[Run]:
        """Remove and return the parts of runs between `first` and `end`."""
        parts = list(self.within(first, end))
        for part in parts:
            self.remove(part)
        return parts
