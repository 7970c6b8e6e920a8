"""Which messages of a stream are settled, leased, or waiting for redelivery?"""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["NOBODY", "SettledMap", "Span", "runs_of"]

#: The `member` of a span that waits.
NOBODY: Final = -1

_end_of = attrgetter("end")


class Span(NamedTuple):
    """Consecutive unsettled messages in the same state."""

    first: int
    #: The last number + 1.
    end: int
    #: How often they were delivered.
    deliveries: int = 0
    #: The member that holds the lease; `NOBODY`: they wait.
    member: int = NOBODY
    #: When the lease or the wait ends: nanoseconds since boot.
    until: int = 0
    #: The key that orders them.
    key: int = 0

    @property
    def size(self) -> int:
        """Number of messages."""
        return self.end - self.first

    def is_held(self, now: int) -> bool:
        """Tell whether a member has it by a lease that is not over."""
        return self.member != NOBODY and self.until > now

    def follows(self, other: Span) -> bool:
        """Tell whether this span starts where `other` ends, in the same state."""
        return self.first == other.end and self[2:] == other[2:]


class SettledMap:
    """All messages of a stream: fresh ones from `next` on, open spans below it, the rest settled.

    Settled messages are not stored: they are the gaps between the spans. So the map of millions
    of messages is one number and the few spans in work.
    """

    def __init__(self, next_seq: int = 0, spans: Iterable[Span] = ()) -> None:
        #: The first message not yet leased to any member.
        self.next = next_seq
        #: Open (unsettled) spans below `next`, in order.
        self.spans: list[Span] = list(spans)
        #: A lower bound of the earliest end of a lease or a wait.
        self._soonest = 0.0

    @property
    def floor(self) -> int:
        """The first unsettled message: all below it are settled."""
        return self.spans[0].first if self.spans else self.next

    def leased(self) -> int:
        """Count the leased messages."""
        return sum(span.size for span in self.spans if span.member != NOBODY)

    def waiting(self) -> int:
        """Count the messages that wait for delivery."""
        return sum(span.size for span in self.spans if span.member == NOBODY)

    def of_member(self, member: int) -> list[Span]:
        """Return the spans leased to a member."""
        return [span for span in self.spans if span.member == member]

    def within(self, first: int, end: int) -> Iterator[Span]:
        """Yield the parts of open spans from `first` up to `end`."""
        at = bisect_left(self.spans, first + 1, key=_end_of)
        while at < len(self.spans) and (span := self.spans[at]).first < end:
            if span.first < first or span.end > end:
                span = span._replace(first=max(span.first, first), end=min(span.end, end))
            yield span
            at += 1

    def put(self, span: Span) -> None:
        """Set the state of messages: open ones, or the next fresh ones."""
        assert span.first < span.end
        assert span.end <= self.next or span.first == self.next
        spans = self.spans
        at = self._carve(span.first, span.end)
        if at and span.follows(spans[at - 1]):
            at -= 1
            span = spans.pop(at)._replace(end=span.end)
        if at < len(spans) and spans[at].follows(span):
            span = span._replace(end=spans.pop(at).end)
        spans.insert(at, span)
        self.next = max(self.next, span.end)
        self._soonest = min(self._soonest, span.until)

    def settle(self, first: int, end: int) -> None:
        """Settle messages: open ones, or the next fresh ones."""
        assert first < end
        assert end <= self.next or first == self.next
        self._carve(first, end)
        self.next = max(self.next, end)

    def cut(self, seq: int) -> int:
        """Make all messages from `seq` on fresh; return how many of them were settled."""
        if seq >= self.next:
            return 0
        settled = self.next - seq - sum(span.size for span in self.within(seq, self.next))
        self._carve(seq, self.next)
        self.next = seq
        return settled

    def due(self, now: int) -> list[Span]:
        """Return the spans whose lease or wait is over, in order."""
        if now < self._soonest:
            return []
        # The caller leases them by `put`; those it does not lease stay due.
        self._soonest = min((span.until for span in self.spans), default=math.inf)
        return [span for span in self.spans if span.until <= now]

    def _carve(self, first: int, end: int) -> int:
        """Remove open messages from `first` up to `end`; return their index in `spans`."""
        spans = self.spans
        if first >= self.next:
            return len(spans)
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
    """Merge numbers, in any order, into sorted disjoint ranges (first, end)."""
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
