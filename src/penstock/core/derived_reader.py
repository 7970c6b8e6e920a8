"""How is a stream read whose messages are made of those of another?"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.capabilities import Replayable
from penstock.core.interfaces import Bounds, Concluding, Reader
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.overflow import DropReason
    from penstock.core.position import PositionLike

__all__ = ["DerivedReader"]

#: Messages of the queue that are not returned yet, and the counters of a reader.
_Place: TypeAlias = "tuple[list[Message], int, int, int, LossLedger]"


class DerivedReader(Concluding, Replayable, Reader):
    """Reads a queue, and makes a message of each of its messages, under the queue's own number.

    :param queue: its reader, which this one closes
    """

    def __init__(self, url: str, queue: Reader) -> None:
        super().__init__(url)
        self._queue = queue
        self._messages = self._bytes = self._filtered = 0
        self._unreadable = LossLedger()
        #: Messages of the queue, until what is made of them is returned: a signal may end a call.
        self._found: list[Message] = []
        #: What a batch that a signal keeps from its caller returns to.
        self._before: _Place | None = None
        self._is_making_batch = False

    @abstractmethod
    def _made_of(self, message: Message) -> Message | None:
        """Return what is made of a message of the queue; None: lost (`_lose`), or filtered out."""

    def _lose(self, message: Message, reason: DropReason) -> None:
        """Count a message of the queue of which nothing can be made."""
        loss = Loss(message.seq, message.seq, reason)
        self._unreadable = self._unreadable.with_losses([loss])

    def _take(self, limit: int) -> list[Message]:
        newest: int | None = None
        while found := self._read_queue(limit, 0):
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
        while found := self._read_queue(limit, timeout):
            if messages := self._all_made_of(found):
                return messages
            if deadline is not None and (timeout := deadline - time.monotonic()) <= 0:
                break
        return []

    def _read_queue(self, limit: int, timeout: float | None) -> list[Message]:
        if not self._found:
            self._found = self._queue.read_many(limit, timeout)
        return self._found[:limit]

    def _all_made_of(self, found: list[Message]) -> list[Message]:
        counters = self._messages, self._bytes, self._filtered, self._unreadable
        try:
            messages = [made for message in found if (made := self._made_of(message)) is not None]
            size = sum([message.size for message in messages])
            left = self._found[len(found) :]
        except BaseException:  # a signal: the next call makes them again
            self._messages, self._bytes, self._filtered, self._unreadable = counters
            raise
        self._before = self._found, *counters
        self._messages, self._bytes, self._found = (
            self._messages + len(messages),
            self._bytes + size,
            left,
        )
        return messages

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        return self._batch(super().read_batch, n, timeout)

    def read_batch_with_origins(self, n: int, timeout: float | None = 0) -> Batch:
        return self._batch(super().read_batch_with_origins, n, timeout)

    def _batch(
        self, read: Callable[[int, float | None], Batch], n: int, timeout: float | None
    ) -> Batch:
        self._before = None
        outer, self._is_making_batch = self._is_making_batch, True
        try:
            return read(n, timeout)
        except BaseException:
            self._put_back()
            raise
        finally:
            self._is_making_batch = outer

    def _put_back(self) -> None:
        """Return to the start of what the present call took, and does not return."""
        before, self._before = self._before, None
        if before is not None:
            self._found, self._messages, self._bytes, self._filtered, self._unreadable = before

    def seek(self, position: PositionLike) -> None:
        self._queue.seek(position)
        self._found = []

    def newest_seq(self) -> int | None:
        return self._queue.newest_seq()

    @property
    def epoch(self) -> int | None:
        return self._queue.epoch if isinstance(self._queue, Replayable) else None

    def bounds(self) -> Bounds:
        return self._queue.bounds()

    def acknowledge(self) -> None:
        if not self._found:  # otherwise the queue's reader is beyond what was returned
            self._queue.acknowledge()

    def _has_news(self) -> bool:
        return bool(self._found) or self._queue._has_news()  # noqa: SLF001 - as below

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
            next_seq=self._found[0].seq if self._found else books.next_seq,
            backlog=books.backlog + len(self._found),
            losses=tuple(losses),
        )

    def _close(self, *, finished: bool) -> None:
        queue = self._queue
        if isinstance(queue, Concluding):
            has_returned_all = not self._found and not self._is_making_batch
            queue._close(finished=finished and has_returned_all)  # noqa: SLF001 - as close does
        else:
            queue.close()
