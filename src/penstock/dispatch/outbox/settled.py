"""Which messages of a lane are settled, and how?"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BLOCK", "Reason", "Settled"]

#: Messages of one block.
BLOCK: Final = 1024
_SHIFT: Final = 10
_MASK: Final = BLOCK - 1


class Reason(enum.IntEnum):
    """Why a message is no longer queued."""

    #: The receiver's transport has it.
    ACKED = 1
    #: Its time was over.
    EXPIRED = 2
    #: It made room for one of a higher class.
    QUEUE_FULL = 3
    #: An error that no retry mends.
    PERMANENT = 4
    #: A person dropped it.
    ADMIN = 5
    #: Its subscription is gone.
    GONE = 6
    #: A newer one took its place.
    SUPERSEDED = 7
    #: Its bytes are not on the disk any more, or not those that were written.
    DAMAGED = 8


class Settled:
    """The settled messages: all below `floor`, and some above it, with the reason of each.

    Below the floor there are only counts, above it a byte for each message, in blocks.
    """

    __slots__ = ("above", "ahead", "below", "blocks", "changes", "floor")

    def __init__(self, floor: int = 0, below: Sequence[int] | None = None) -> None:
        self.floor = floor
        #: Messages below the floor and above it, by reason.
        self.below = [0] * (len(Reason) + 1) if below is None else list(below)
        self.above = [0] * (len(Reason) + 1)
        #: Messages above the floor, in all.
        self.ahead = 0
        self.blocks: dict[int, bytearray] = {}
        #: How often something above the floor changed.
        self.changes = 0

    def __contains__(self, seq: int) -> bool:
        if seq < self.floor:
            return True
        block = self.blocks.get(seq >> _SHIFT)
        return block is not None and block[seq & _MASK] != 0

    def add(self, first: int, count: int, reason: Reason) -> None:
        """Settle messages that follow each other, none of which is settled yet."""
        if first == self.floor and not self.blocks:
            self.floor += count
            self.below[reason] += count
            return
        self.above[reason] += count
        self.ahead += count
        self.changes += 1
        end = first + count
        at = first
        while at < end:
            number, start = at >> _SHIFT, at & _MASK
            stop = min(BLOCK, start + end - at)
            block = self.blocks.get(number)
            if block is None:
                block = self.blocks[number] = bytearray(BLOCK)
            block[start:stop] = bytes((reason,)) * (stop - start)
            at += stop - start
        if first == self.floor:
            self._raise_floor()

    def _raise_floor(self) -> None:
        while (block := self.blocks.get(self.floor >> _SHIFT)) is not None:
            start = self.floor & _MASK
            end = block.find(0, start)
            if end < 0:
                end = BLOCK
            run = block[start:end]
            for reason in Reason:
                if count := run.count(reason):
                    self.below[reason] += count
                    self.above[reason] -= count
            if block.count(0, end) == BLOCK - end:
                del self.blocks[self.floor >> _SHIFT]
            self.ahead -= end - start
            self.floor += end - start
            if end < BLOCK:
                return

    def restore(self, blocks: Mapping[int, bytes], head: int) -> None:
        """Take over what was settled above the floor once; no message is numbered `head` yet."""
        for number, marks in sorted(blocks.items()):
            at = max(number << _SHIFT, self.floor)
            end = min(number + 1 << _SHIFT, head)
            for reason, run in itertools.groupby(marks[at & _MASK : BLOCK][: max(0, end - at)]):
                count = sum(1 for _ in run)
                if reason:
                    self.add(at, count, Reason(reason))
                at += count

    def has_marks(self, number: int) -> bool:
        """Tell whether messages of a block are settled while one before them is not."""
        return number in self.blocks

    def count(self, reason: Reason) -> int:
        return self.below[reason] + self.above[reason]
