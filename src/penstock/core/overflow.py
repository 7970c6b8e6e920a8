"""What happens to a message when there is no room for it, and who counts it?"""

from __future__ import annotations

import threading
from collections import Counter, deque
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from penstock.core.errors import Closed, InvalidOption, PenstockError, WriteTimeout

__all__ = [
    "BoundedBuffer",
    "BufferStatistics",
    "DropCounts",
    "DropReason",
    "OverflowPolicy",
    "QueueFull",
]

T = TypeVar("T")


class OverflowPolicy(StrEnum):
    """What to do with a message when the buffer is full."""

    #: The writer waits for room. Nothing is lost; the writer is slowed down, and gets
    #: `WriteTimeout` after its timeout, and still has the message.
    BLOCK = "block"
    #: The writer gets `QueueFull` at once, and still has the message.
    FAIL = "fail"
    #: The oldest message is dropped to make room. The writer does not notice; the reader
    #: sees a gap, and the statistics count it.
    DROP_OLDEST = "drop_oldest"
    #: The new message is dropped, those waiting stay. The writer is told by the return value, the
    #: reader sees a gap, and the statistics count it.
    DROP_NEWEST = "drop_newest"


class DropReason(StrEnum):
    """Why a message was dropped."""

    #: It was the oldest when room was needed.
    OVERFLOW_OLDEST = "overflow_oldest"
    #: It arrived when the buffer was full.
    OVERFLOW_NEWEST = "overflow_newest"
    #: It was not delivered within its time to live or its latency limit.
    EXPIRED = "expired"
    #: The receiver will never accept it: too large, not allowed, not understood.
    REFUSED = "refused"
    #: The writer overwrote it before it was read.
    OVERRUN = "overrun"
    #: Retention removed it before it was read.
    RETENTION = "retention"
    #: The queue was recreated before it was read.
    RECREATED = "recreated"
    #: Its bytes do not follow their format.
    DAMAGED = "damaged"
    #: It happened after the end that its source then declared.
    AFTER_END = "after_end"
    #: Its source delivers once only, and the copy stopped before it was delivered.
    ABANDONED = "abandoned"


class QueueFull(PenstockError):
    """The buffer is full, and the policy is to fail. The message was not accepted."""

    def __init__(self, capacity: int, *, hint: str | None = None) -> None:
        super().__init__(f"the queue is full: it holds {capacity:,} messages", hint=hint)
        self.capacity = capacity


class DropCounts:
    """How many messages were dropped, by reason. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[DropReason] = Counter()

    def add(self, reason: DropReason, n: int = 1) -> None:
        """Count `n` more messages dropped for this reason.

        :raises ValueError: `n` is negative; a drop cannot be undone
        """
        if n < 0:
            raise ValueError(f"cannot count {n} drops")
        with self._lock:
            self._counts[reason] += n

    @property
    def total(self) -> int:
        """Messages dropped, over all reasons."""
        with self._lock:
            return self._counts.total()

    def as_dict(self) -> dict[DropReason, int]:
        """Return the current counts; a reason that never occurred is left out."""
        with self._lock:
            return {reason: n for reason, n in self._counts.items() if n}


class BufferStatistics(NamedTuple):
    """A snapshot of the counters. `accepted == delivered + sum(dropped.values()) + held`."""

    #: Messages for which `put` returned, dropped ones included.
    accepted: int
    #: Messages handed to a reader.
    delivered: int
    #: Messages dropped, by reason.
    dropped: dict[DropReason, int]
    #: Messages waiting now.
    held: int
    #: Calls of `put` that raised: the writer kept the message, so it is in no count above.
    refused: int


class BoundedBuffer(Generic[T]):
    """A bounded FIFO queue in memory, with an overflow policy. Thread-safe.

    :raises InvalidOption: the capacity is below 1
    """

    def __init__(self, capacity: int, policy: OverflowPolicy) -> None:
        if capacity < 1:
            raise InvalidOption("capacity", capacity, "must be at least 1")
        self.capacity = capacity
        self.policy = policy
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._readable = threading.Condition(self._lock)
        self._writable = threading.Condition(self._lock)
        self._closed = False
        self._accepted = 0
        self._delivered = 0
        self._refused = 0
        self._dropped = DropCounts()

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Add an item; return False if the policy dropped it instead.

        Only BLOCK waits: for ever without a timeout, not at all with 0.

        :raises QueueFull: the policy is FAIL and the buffer is full
        :raises WriteTimeout: the policy is BLOCK and the buffer stayed full for `timeout` seconds
        :raises Closed: the buffer was closed, before or while waiting
        """
        with self._lock:
            try:
                has_room = self._make_room(item, timeout)
            except PenstockError:
                self._refused += 1
                raise
            self._accepted += 1
            if not has_room:
                self._dropped.add(DropReason.OVERFLOW_NEWEST)
                return False
            self._items.append(item)
            self._readable.notify()
            return True

    def get(self, timeout: float | None = None) -> T | None:
        """Remove and return the oldest item; None on timeout.

        Waits for ever without a timeout, not at all with 0.

        :raises Closed: the buffer was closed and everything in it was taken
        """
        items = self.get_many(1, timeout)
        return items[0] if items else None

    def get_many(self, limit: int, timeout: float | None = None) -> list[T]:
        """Wait for one item, then take all there are, oldest first, up to `limit`.

        Returns an empty list on timeout. Waits for ever without one, not at all with 0.

        :raises Closed: the buffer was closed and everything in it was taken
        """
        with self._lock:
            self._readable.wait_for(lambda: self._items or self._closed, timeout)
            if self._closed and not self._items:
                raise Closed("the buffer was closed and everything in it was taken")
            taken = [self._items.popleft() for _ in range(min(limit, len(self._items)))]
            self._delivered += len(taken)
            self._writable.notify(len(taken))
            return taken

    def close(self) -> None:
        """Accept no more items; held ones can still be read. Wakes all waiting threads."""
        with self._lock:
            self._closed = True
            self._readable.notify_all()
            self._writable.notify_all()

    def statistics(self) -> BufferStatistics:
        """Return a consistent snapshot of the counters."""
        with self._lock:
            return BufferStatistics(
                accepted=self._accepted,
                delivered=self._delivered,
                dropped=self._dropped.as_dict(),
                held=len(self._items),
                refused=self._refused,
            )

    def __len__(self) -> int:
        return len(self._items)

    def _make_room(self, item: T, timeout: float | None) -> bool:
        """Apply the policy; return whether there is room now. Needs the lock."""
        del item  # all items are equal here
        if self.policy is OverflowPolicy.BLOCK:
            self._writable.wait_for(lambda: not self._is_full() or self._closed, timeout)
        if self._closed:
            raise Closed("the buffer was closed; it takes no more")
        if not self._is_full():
            return True
        match self.policy:
            case OverflowPolicy.BLOCK:
                raise WriteTimeout(
                    f"the queue stayed full, with {self.capacity:,} messages, for {timeout} s",
                    hint="the reader is slower than the writer, or has stopped",
                )
            case OverflowPolicy.FAIL:
                raise QueueFull(
                    self.capacity, hint="try again later, or choose another overflow policy"
                )
            case OverflowPolicy.DROP_OLDEST:
                self._items.popleft()
                self._dropped.add(DropReason.OVERFLOW_OLDEST)
                return True
            case OverflowPolicy.DROP_NEWEST:
                return False

    def _is_full(self) -> bool:
        return len(self._items) >= self.capacity
