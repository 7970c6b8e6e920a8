"""How is a stream read whose messages are made of those of another?"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from penstock.core.capabilities import Replayable
from penstock.core.interfaces import Bounds, Reader
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics

if TYPE_CHECKING:
    from penstock.core.message import Message
    from penstock.core.overflow import DropReason
    from penstock.core.position import PositionLike

__all__ = ["DerivedReader"]


class DerivedReader(Replayable, Reader):
    """Reads a queue, and makes a message of each of its messages, under the queue's own number.

    :param queue: its reader, which this one closes
    """

    def __init__(self, url: str, queue: Reader) -> None:
        super().__init__(url)
        self._queue = queue
        self._messages = self._bytes = self._filtered = 0
        self._unreadable = LossLedger()

    @abstractmethod
    def _made_of(self, message: Message) -> Message | None:
        """Return what is made of a message of the queue; None: lost (`_lose`), or filtered out."""

    def _lose(self, message: Message, reason: DropReason) -> None:
        """Count a message of the queue of which nothing can be made."""
        self._unreadable.add(Loss(message.seq, message.seq, reason))

    def _take(self, limit: int) -> list[Message]:
        newest: int | None = None
        while found := self._queue.read_many(limit):
            if messages := self._all_made_of(found):
                return messages
            if newest is None:
                newest = self._queue.newest_seq()
            if newest is not None and found[-1].seq >= newest:
                break  # a busy writer could keep it here for ever
        return []

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        """Let the queue's reader wait: it knows what wakes it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while found := self._queue.read_many(limit, timeout):
            if messages := self._all_made_of(found):
                return messages
            if deadline is not None and (timeout := deadline - time.monotonic()) <= 0:
                break
        return []

    def _all_made_of(self, found: list[Message]) -> list[Message]:
        messages = [made for message in found if (made := self._made_of(message)) is not None]
        self._messages += len(messages)
        self._bytes += sum(message.size for message in messages)
        return messages

    def seek(self, position: PositionLike) -> None:
        self._queue.seek(position)

    def newest_seq(self) -> int | None:
        return self._queue.newest_seq()

    @property
    def epoch(self) -> int | None:
        return self._queue.epoch if isinstance(self._queue, Replayable) else None

    def bounds(self) -> Bounds:
        return self._queue.bounds()

    def acknowledge(self) -> None:
        self._queue.acknowledge()

    def _has_news(self) -> bool:
        return self._queue._has_news()  # noqa: SLF001 - as below

    def _idle(self) -> bool:
        return self._queue._idle()  # noqa: SLF001 - called while this reader waits

    def statistics(self) -> ReaderStatistics:
        books = self._queue.statistics()
        losses = sorted((*books.losses, *self._unreadable.ranges()), key=lambda loss: loss.first)
        return books._replace(
            messages=self._messages,
            bytes=self._bytes,
            filtered=books.filtered + self._filtered,
            lost=books.lost + self._unreadable.total,
            losses=tuple(losses),
        )

    def close(self) -> None:
        self._queue.close()
