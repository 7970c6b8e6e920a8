"""Which messages has a leg taken over that may still be lost on their way?

A transport that acknowledges nothing has what it took over in this process for a while: it goes
with the process, or with the link. So these are settled some time later, and delivered again when
the link was lost meanwhile. Until then they are queued, also for whoever opens the outbox next.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.outbox import Item
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["HandedOver"]

#: Messages that may be on their way to one receiver: they are held in memory.
_MOST: Final = 65_536


class _Some(NamedTuple):
    #: When they count as delivered (monotonic seconds).
    due: float
    #: How many links the leg had lost before.
    links_lost: int
    items: list[Item]


class HandedOver:
    """What is on its way to one receiver. For one thread."""

    def __init__(self, leg: Leg, clock: Clock) -> None:
        self._leg = leg
        self._clock = clock
        self._some: deque[_Some] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no more should be handed over for now."""
        return self._count >= _MOST

    @property
    def next_due(self) -> float | None:
        """When the first of them count as delivered (monotonic seconds); None: there are none."""
        return self._some[0].due if self._some else None

    def add(self, items: list[Item], links_lost: int) -> None:
        """Keep messages that the leg took over when it had lost so many links."""
        self._some.append(
            _Some(self._clock.monotonic() + self._leg.settle_after, links_lost, items)
        )
        self._count += len(items)

    def take(self) -> tuple[Sequence[Item], Sequence[Item]]:
        """Return those that arrived by now, and those that have to be delivered again."""
        if not self._some:
            return (), ()
        sure: list[Item] = []
        again: list[Item] = []
        if self._leg.links_lost != self._some[0].links_lost:
            # Also what was handed over since: otherwise it would come before what is missing.
            again = [item for some in self._some for item in some.items]
            self._some.clear()
        now = self._clock.monotonic()
        while self._some and self._some[0].due <= now:
            sure += self._some.popleft().items
        self._count -= len(sure) + len(again)
        return sure, again
