"""When is the next message of a lane due to expire, loaded or not?"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.dispatch.outbox.settled import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NEVER", "Expiries", "Times"]

#: The times of one block.
Times: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

#: Blocks whose times are all kept, of those that were not due yet.
_MOST_KNOWN: Final = 1024

#: Later than any.
NEVER: Final = (1 << 64) - 1


class Expiries:
    """The smallest time of every block, and all times of some blocks.

    Those are the blocks that were due once, and as many others as memory is to be spent on.
    """

    def __init__(self) -> None:
        #: By block; NEVER for one whose messages do not expire. It may be too small, not too large.
        self.least: dict[int, int] = {}
        self._times: dict[int, Times] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, first: int, times: Sequence[int]) -> None:
        """Take over the times (0: never) of messages that follow each other."""
        if not any(times) and first // BLOCK in self.least and first % BLOCK + len(times) <= BLOCK:
            return  # mostly: none expires, and the block is known
        at = 0
        while at < len(times):
            block, start = divmod(first + at, BLOCK)
            part = times[at : at + BLOCK - start]
            at += len(part)
            least = min(part) or min((ms for ms in part if ms), default=NEVER)
            known = self._times.get(block)
            is_first = self.least.get(block, NEVER) == NEVER  # there is no other time in it
            if known is None and is_first and least < NEVER and len(self._times) < _MOST_KNOWN:
                known = self._times[block] = np.full(BLOCK, NEVER, np.uint64)
            if known is not None:
                known[start : start + len(part)] = [ms or NEVER for ms in part]
            self.lower(block, least)

    def lower(self, block: int, ms: int) -> None:
        """Let a block be due then, if it is not sooner."""
        if ms < self.least.setdefault(block, NEVER):
            self.least[block] = ms
            heapq.heappush(self._heap, (ms, block))
            if len(self._heap) > 2 * len(self.least) + BLOCK:  # mostly of blocks that are gone
                self._heap = [(ms, block) for block, ms in self.least.items() if ms < NEVER]
                heapq.heapify(self._heap)

    def restore(self, seq: int, ms: int) -> None:
        """Let a message be due again."""
        block, at = divmod(seq, BLOCK)
        known = self._times.get(block)
        if known is not None:
            known[at] = ms
        self.lower(block, ms)

    def next_ms(self) -> int | None:
        """Return the next time, or one before it."""
        while self._heap:
            ms, block = self._heap[0]
            if self.least.get(block) == ms:
                return ms
            heapq.heappop(self._heap)
        return None

    def due(self, now_ms: int) -> int | None:
        """Return a block that is due."""
        ms = self.next_ms()
        return None if ms is None or ms > now_ms else heapq.heappop(self._heap)[1]

    def unknown_before(self, ms: int) -> int | None:
        """Return a block that will be due, and whose times are not known one by one."""
        soon = (block for due, block in self._heap if due < ms and block not in self._times)
        return next((block for block in soon if self.least.get(block, NEVER) < ms), None)

    def knows(self, block: int) -> bool:
        """Tell whether the times of a block are known one by one."""
        return block in self._times

    def learn(self, block: int, times: Times) -> None:
        """Take over all times of a block; those of settled messages are NEVER."""
        self._times[block] = times

    def expired(self, block: int, now_ms: int) -> list[int]:
        """Return the messages of a block that are due, which then are no more."""
        times = self._times[block]
        places = np.flatnonzero(times <= np.uint64(now_ms))
        times[places] = NEVER
        self.least[block] = NEVER
        self.lower(block, int(times.min()))
        if self.least[block] == NEVER:
            del self._times[block]
        first = block * BLOCK
        return [first + place for place in places.tolist()]

    def forget(self, block: int) -> None:
        """Forget a block that is settled as a whole."""
        self.least.pop(block, None)
        self._times.pop(block, None)
