"""Which messages has a leg taken over that may still be lost on their way?

A transport that acknowledges nothing has what it took over in this process for a while: it goes
with the process, or with the link. So these are settled some time later, and handed over again
when a link was lost meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from penstock.core.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = ["HandedOver"]

T = TypeVar("T")

#: What may be on its way is held in memory: so many messages, and so many bytes.
_MOST: Final = 65_536
_MOST_BYTES: Final = 64 << 20


class _Some(NamedTuple, Generic[T]):
    #: When they count as delivered (monotonic seconds).
    due: float
    #: How many links the leg had lost before.
    links_lost: int
    items: Sequence[T]
    size: int


class HandedOver(Generic[T]):
    """What is on its way by one leg. For one thread."""

    def __init__(self, leg: Leg, clock: Clock = SYSTEM_CLOCK) -> None:
        self._leg = leg
        self._clock = clock
        self._some: deque[_Some[T]] = deque()
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no more should be handed over for now."""
        return self._count >= _MOST or self._bytes >= _MOST_BYTES

    @property
    def next_due(self) -> float | None:
        """When the first of them count as delivered (monotonic seconds); None: there are none."""
        return self._some[0].due if self._some else None

    def add(self, items: Sequence[T], links_lost: int, size: int = 0) -> None:
        """Keep messages of so many bytes, taken over when the leg had lost so many links."""
        due = self._clock.monotonic() + self._leg.settle_after
        self._some.append(_Some(due, links_lost, items, size))
        self._count += len(items)
        self._bytes += size

    def take(self) -> tuple[list[T], list[T]]:
        """Return those that arrived by now, and those that have to be handed over again."""
        sure: list[T] = []
        again: list[T] = []
        if self._some and self._leg.links_lost != self._some[0].links_lost:
            # Also what was handed over since: otherwise it would come before what is missing.
            again = [item for some in self._some for item in some.items]
            self._some.clear()
            self._count = self._bytes = 0
        now = self._clock.monotonic()
        while self._some and self._some[0].due <= now:
            some = self._some.popleft()
            sure += some.items
            self._count -= len(some.items)
            self._bytes -= some.size
        return sure, again
