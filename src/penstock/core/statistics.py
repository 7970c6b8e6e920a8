"""What passed, what was lost, and where?"""

from __future__ import annotations

import time
from collections import deque
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence

    from penstock.core.overflow import DropReason

__all__ = ["LoggedLosses", "Loss", "LossLedger", "ReaderStatistics", "WriterStatistics"]

#: Number of ranges kept; the counts stay exact beyond it.
_RANGES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Loss:
    """A range of messages that a reader lost."""

    #: Sequence number of the first message lost.
    first: int
    #: Sequence number of the last message lost.
    last: int
    #: Why it was lost.
    reason: DropReason

    @property
    def count(self) -> int:
        """Number of lost messages."""
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

    def with_losses(self, losses: Sequence[Loss]) -> Self:
        """Return a copy with more losses, which are not logged yet.

        Who assigns it together with a position counts them once, whenever a signal comes.
        """
        ledger = copy(self)
        ledger._ranges = self._ranges.copy()  # noqa: SLF001 - of this class
        for loss in losses:
            LossLedger.add(ledger, loss)
        return ledger

    def ranges(self) -> tuple[Loss, ...]:
        return tuple(self._ranges)


class ReaderStatistics(NamedTuple):
    """Counters of a reader. Every message of the stream is delivered, filtered or lost."""

    #: Messages handed to the caller.
    messages: int
    #: Payload bytes handed to the caller.
    bytes: int
    #: Messages that were gone, or could not be read, before this reader got to them.
    lost: int
    #: Messages passed over by the reader's own filter.
    filtered: int
    #: How often the queue was recreated under this reader.
    restarts: int
    #: Sequence number of the next message to be delivered; None before the first is known.
    next_seq: int | None
    #: Messages in the queue that this reader has not reached yet.
    backlog: int
    #: The latest lost ranges, oldest first.
    losses: tuple[Loss, ...]

    def before(self, end: int) -> ReaderStatistics:
        """Return the counters without the losses from number `end` on, which nobody asked for."""
        kept = tuple(
            replace(loss, last=min(loss.last, end - 1)) for loss in self.losses if loss.first < end
        )
        beyond = sum(loss.count for loss in self.losses) - sum(loss.count for loss in kept)
        return self._replace(lost=self.lost - beyond, losses=kept)


class WriterStatistics(NamedTuple):
    """Counters of a writer. Every message offered was written or refused with an error."""

    #: Messages written.
    messages: int
    #: Payload bytes written, before compression.
    bytes: int
    #: Messages refused with an error: too large, timed out, no space.
    refused: int
    #: Header fields (stream, attributes) that the endpoint cannot store.
    headers_dropped: int
    #: Seconds spent waiting for a lock or for a reader.
    waited: float
    #: Sequence number of the last message written; None before the first.
    last_seq: int | None
    #: Messages written that no receiver took before the writer was closed: they are gone. Only of
    #: writers that are servers; known when it is closed.
    untaken: int = 0


#: Interval (seconds) at which a reader logs repeated overruns.
_BETWEEN_WARNINGS: Final = 1.0


class LoggedLosses(LossLedger):
    """Counts every loss, and logs the losses at intervals."""

    def __init__(self, url: str, log: logging.Logger) -> None:
        super().__init__()
        self._url = url
        self._log = log
        self._silent_until = 0.0
        #: The last loss, until it is logged.
        self._untold: Loss | None = None

    def add(self, loss: Loss) -> None:
        super().add(loss)
        self._untold = loss
        self.tell()

    def with_losses(self, losses: Sequence[Loss]) -> Self:
        ledger = super().with_losses(losses)
        if losses:
            ledger._untold = losses[-1]  # noqa: SLF001 - of this class
        return ledger

    def tell(self, *, at_once: bool = False) -> None:
        """Log the last loss unless it was logged; without `at_once` at intervals only."""
        loss = self._untold
        if loss is not None and (at_once or time.monotonic() >= self._silent_until):
            self._untold = None
            self._silent_until = time.monotonic() + _BETWEEN_WARNINGS
            self._log.warning("%s: %s; %s in all", self._url, loss, f"{self.total:,}")
