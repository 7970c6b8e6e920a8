"""Which messages of a stream are settled, leased to somebody, or waiting to be delivered again?"""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["NOBODY", "SettledMap", "Span", "runs_of"]

#: The member of a span that waits.
NOBODY: Final = -1

_end_of = attrgetter("end")


class Span(NamedTuple):
    """Messages that follow each other and are not settled, all in the same state."""

    first: int
    #: The number behind the last one.
    end: int
    #: How often they were delivered.
    deliveries: int = 0
    #: Who has them leased; `NOBODY`: they wait.
    member: int = NOBODY
    #: When the lease runs out, or the wait is over: nanoseconds of the machine's running time.
    until: int = 0
    #: The key that they keep their order by.
    key: int = 0

    @property
    def size(self) -> int:
        """How many messages that are."""
        return self.end - self.first

    def follows(self, other: Span) -> bool:
        """Tell whether it begins where the other one ends, and is in the same state."""
        return self.first == other.end and self[2:] == other[2:]


class SettledMap:
    """All messages of a stream: fresh ones from `next` on, open spans below it, the rest settled.

    What is settled is not stored: it is what lies between the spans. So the map of millions of
    messages is a number and the few spans that members work on.
    """

    def __init__(self, next_seq: int = 0, spans: Iterable[Span] = ()) -> None:
        #: The first message that nobody was given yet.
        self.next = next_seq
        #: What is open below `next`, in order.
        self.spans: list[Span] = list(spans)
        #: No lease runs out before this moment, and no wait is over before that one.
        self.lease_ends = self.wait_ends = 0.0

    @property
    def floor(self) -> int:
        """The number that all settled messages without a gap are below."""
        return self.spans[0].first if self.spans else self.next

    def leased(self) -> int:
        """Count the messages that somebody has."""
        return sum(span.size for span in self.spans if span.member != NOBODY)

    def waiting(self) -> int:
        """Count the messages that wait."""
        return sum(span.size for span in self.spans if span.member == NOBODY)

    def of_member(self, member: int) -> list[Span]:
        """Return what a member has leased."""
        return [span for span in self.spans if span.member == member]

    def within(self, first: int, end: int) -> Iterator[Span]:
        """Yield the parts of open spans from `first` up to `end`."""
        at = bisect_left(self.spans, first + 1, key=_end_of)
        while at < len(self.spans) and (span := self.spans[at]).first < end:
            yield span._replace(first=max(span.first, first), end=min(span.end, end))
            at += 1

    def put(self, span: Span) -> None:
        """Let messages be in this state from now on: open ones, or the next fresh ones."""
        assert span.first < span.end <= max(self.next, span.end if span.first == self.next else 0)
        at = self._carve(span.first, span.end)
        if at and span.follows(self.spans[at - 1]):
            at -= 1
            span = self.spans.pop(at)._replace(end=span.end)
        if at < len(self.spans) and self.spans[at].follows(span):
            span = span._replace(end=self.spans.pop(at).end)
        self.spans.insert(at, span)
        self.next = max(self.next, span.end)
        if span.member == NOBODY:
            self.wait_ends = min(self.wait_ends, span.until)
        else:
            self.lease_ends = min(self.lease_ends, span.until)

    def settle(self, first: int, end: int) -> None:
        """Let messages be settled: open ones, or the next fresh ones."""
        assert first < end
        assert end <= self.next or first == self.next
        self._carve(first, end)
        self.next = max(self.next, end)

    def cut(self, seq: int) -> int:
        """Let all messages from this one on be fresh; return how many of them were settled."""
        if seq >= self.next:
            return 0
        settled = self.next - seq - sum(span.size for span in self.within(seq, self.next))
        self._carve(seq, self.next)
        self.next = seq
        return settled

    def expired(self, now: int) -> list[Span]:
        """Return the leases that have run out."""
        if now < self.lease_ends:
            return []
        leased = [span for span in self.spans if span.member != NOBODY]
        over = [span for span in leased if span.until <= now]
        self.lease_ends = min((s.until for s in leased if s.until > now), default=math.inf)
        return over

    def due(self, now: int) -> list[Span]:
        """Return the spans whose wait is over, in order."""
        if now < self.wait_ends:
            return []
        waiting = [span for span in self.spans if span.member == NOBODY]
        over = [span for span in waiting if span.until <= now]
        # Who takes them says so by `put`; if nobody does, they are due the next time.
        self.wait_ends = min((span.until for span in waiting), default=math.inf)
        return over

    def _carve(self, first: int, end: int) -> int:
        """Remove what is open from `first` up to `end`; return where in the list that was."""
        spans = self.spans
        low = bisect_left(spans, first + 1, key=_end_of)
        high = low
        left: list[Span] = []
        while high < len(spans) and spans[high].first < end:
            span = spans[high]
            if span.first < first:
                left.append(span._replace(end=first))
            if span.end > end:
                left.append(span._replace(first=end))
            high += 1
        spans[low:high] = left
        return low + (1 if left and left[0].end <= first else 0)


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted, disjoint ranges (first, end) of numbers in any order, each once."""
    if not numbers:
        return []
    first, end = numbers[0], numbers[0] + len(numbers)
    if numbers[-1] == end - 1 and numbers == list(range(first, end)):
        return [(first, end)]
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
