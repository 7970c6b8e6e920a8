"""Does a delivery that is not full yet wait for more messages? (spec uprotocol 10.1, R7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.dispatch.outbox import Outbox
    from penstock.dispatch.settings import Limits

__all__ = ["Lingering"]


class Lingering:
    """The wait of one receiver's messages for others to go with."""

    def __init__(self, outbox: Outbox, limits: Limits) -> None:
        self._outbox = outbox
        self._limits = limits
        #: Until when they wait (monotonic seconds); None: none do.
        self.until: float | None = None

    def holds(self, now: float) -> bool:
        """Tell whether the next delivery waits."""
        limits, waiting = self._limits, self._outbox.waiting
        is_full = waiting >= limits.batch or self._outbox.size >= limits.batch_bytes
        if self.until is None:
            self.until = now + limits.linger
        if not waiting or is_full or self.until <= now:
            self.until = None
        return self.until is not None
