"""What passed, what was lost, and where?"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.core.overflow import DropReason

__all__ = ["Loss", "LossLedger", "ReaderStatistics", "WriterStatistics"]

#: Ranges kept for a person to look at; the counts stay exact beyond it.
_RANGES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Loss:
    """A run of messages that a reader did not get."""

    #: Sequence number of the first message lost.
    first: int
    #: Sequence number of the last message lost.
    last: int
    #: Why it was lost.
    reason: DropReason

    @property
    def count(self) -> int:
        """How many messages that is."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        which = f"seq {self.first}" if self.count == 1 else f"seq {self.first} to {self.last}"
        plural = "" if self.count == 1 else "s"
        return f"{self.count:,} message{plural} lost ({which}): {self.reason.value}"


class LossLedger:
    """Counts losses exactly and remembers the latest ranges."""

    def __init__(self) -> None:
        self.total = 0
        self._ranges: deque[Loss] = deque(maxlen=_RANGES_KEPT)

    def add(self, loss: Loss) -> None:
        self.total += loss.count
        previous = self._ranges[-1] if self._ranges else None
        if previous and previous.last + 1 == loss.first and previous.reason == loss.reason:
            self._ranges[-1] = replace(previous, last=loss.last)
        else:
            self._ranges.append(loss)

    def ranges(self) -> tuple[Loss, ...]:
        return tuple(self._ranges)


class ReaderStatistics(NamedTuple):
    """Books of a reader. Every message that was there is delivered, filtered or lost."""

    #: Messages handed to the caller.
    messages: int
    #: Payload bytes handed to the caller.
    bytes: int
    #: Messages that were gone, or could not be read, before this reader got to them.
    lost: int
    #: Messages passed over by the reader's own filter.
    filtered: int
    #: How often the queue was created anew under this reader.
    restarts: int
    #: Sequence number of the next message to be delivered; None before the first is known.
    next_seq: int | None
    #: Messages in the queue that this reader has not reached yet.
    backlog: int
    #: The latest lost ranges, oldest first.
    losses: tuple[Loss, ...]


class WriterStatistics(NamedTuple):
    """Books of a writer. Every message offered was written or refused with an error."""

    #: Messages written.
    messages: int
    #: Payload bytes written, before compression.
    bytes: int
    #: Messages refused with an error: too large, timed out, no space.
    refused: int
    #: Header fields (stream, attributes) the endpoint had no place for.
    headers_dropped: int
    #: Seconds spent waiting for a lock or for a reader.
    waited: float
    #: Sequence number of the last message written; None before the first.
    last_seq: int | None
