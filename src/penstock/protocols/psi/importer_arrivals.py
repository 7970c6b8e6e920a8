"""Which of the messages that come are new, and which did not come?

After a reconnection an exporter sends again what was on its way. A message is known by its source,
its number and its time; numbers that are missing are a gap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.protocols.psi.ticks import MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from penstock.protocols.psi.envelope import PsiMessage

__all__ = ["Arrivals", "Gap"]

#: Gaps kept for a person to look at; the counts stay exact beyond it.
_GAPS_KEPT: Final = 1000


class Gap(NamedTuple):
    """Messages of a stream that did not come: `first` to `last`, by their numbers."""

    stream: str
    first: int
    last: int

    @property
    def messages(self) -> int:
        """How many that is."""
        return self.last - self.first + 1


@dataclass(slots=True)
class _Last:
    """The newest message of a stream."""

    sequence: int
    originating_ns: int


class Arrivals:
    """The books of what came, over all connections."""

    def __init__(self, *, from_first: bool) -> None:
        """`from_first`: everything was asked for, so that a stream begins with number 1."""
        self.from_first = from_first
        #: Messages that were new; those that came again, or behind a later one.
        self.taken = self.repeated = 0
        #: Messages that did not come, as far as the numbers tell.
        self.lost = 0
        #: How often a stream was numbered anew.
        self.restarts = 0
        self._last: dict[str, _Last] = {}
        self._gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self._newest_creation_ns = MIN_NS
        #: How far creation times were seen to go back: streams of psi are merged.
        self._disorder_ns = 0
        self.begin()

    def begin(self) -> None:
        """Remember how it is now, for `undo`."""
        self._before: dict[str, _Last | None] = {}
        self._gaps_since = 0
        self._counts_before = self._counts()

    def undo(self) -> None:
        """Forget what came since `begin`: it could not be kept, and has to come again."""
        for stream, last in self._before.items():
            if last is None:
                self._last.pop(stream, None)
            else:
                self._last[stream] = last
        for _ in range(min(self._gaps_since, len(self._gaps))):
            self._gaps.pop()
        (
            self.taken,
            self.repeated,
            self.lost,
            self.restarts,
            self._newest_creation_ns,
            self._disorder_ns,
        ) = self._counts_before
        self.begin()

    def _counts(self) -> tuple[int, ...]:
        return (
            self.taken,
            self.repeated,
            self.lost,
            self.restarts,
            self._newest_creation_ns,
            self._disorder_ns,
        )

    def resume(self, stream: str, sequence: int, originating_ns: int, creation_ns: int) -> None:
        """Note what an earlier process has received."""
        self._last[stream] = _Last(sequence, originating_ns)
        self._newest_creation_ns = max(self._newest_creation_ns, creation_ns)

    def take(self, stream: str, message: PsiMessage) -> bool:
        """Tell whether a message is new, and count it."""
        sequence, originating_ns, creation_ns = message[1:4]
        last = self._last.get(stream)
        if stream not in self._before:
            self._before[stream] = None if last is None else replace(last)
        if last is None:
            if self.from_first and sequence > 1:
                self._miss(stream, 1, sequence - 1)
            self._last[stream] = _Last(sequence, originating_ns)
        elif sequence > last.sequence:
            if sequence > last.sequence + 1:
                self._miss(stream, last.sequence + 1, sequence - 1)
            last.sequence, last.originating_ns = sequence, originating_ns
        elif originating_ns <= last.originating_ns:
            self.repeated += 1
            return False
        else:
            # The exporter was started anew and counts from 1.
            self.restarts += 1
            if sequence > 1:
                self._miss(stream, 1, sequence - 1)
            last.sequence, last.originating_ns = sequence, originating_ns
        self.taken += 1
        if creation_ns >= self._newest_creation_ns:
            self._newest_creation_ns = creation_ns
        else:
            self._disorder_ns = max(self._disorder_ns, self._newest_creation_ns - creation_ns)
        return True

    def miss_until(self, stream: str, sequence: int) -> None:
        """Note that the stream ended with this number, and that nothing more comes."""
        last = self._last.get(stream)
        reached = 0 if last is None else last.sequence
        if sequence > reached and (last is not None or self.from_first):
            self._miss(stream, reached + 1, sequence)
            self._last[stream] = _Last(sequence, MIN_NS if last is None else last.originating_ns)

    def last_sequence(self, stream: str) -> int:
        """Return the number of a stream's newest message; 0 if none came."""
        last = self._last.get(stream)
        return 0 if last is None else last.sequence

    def last_originating_ns(self, stream: str) -> int:
        """Return the originating time of a stream's newest message; `MIN_NS` if none came."""
        last = self._last.get(stream)
        return MIN_NS if last is None else last.originating_ns

    def gaps(self) -> tuple[Gap, ...]:
        """Return the latest gaps, oldest first."""
        return tuple(self._gaps)

    @property
    def resume_ns(self) -> int | None:
        """The creation time from which something may have been missed; None if nothing came.

        The tick of the newest message is asked for again: others may have been created in it. An
        exporter whose streams were seen out of order is asked for twice as much as that was.
        """
        if self._newest_creation_ns == MIN_NS:
            return None
        return max(MIN_NS + NS_PER_TICK, self._newest_creation_ns - 2 * self._disorder_ns)

    def _miss(self, stream: str, first: int, last: int) -> None:
        gap = Gap(stream, first, last)
        self.lost += gap.messages
        self._gaps.append(gap)
        self._gaps_since += 1
