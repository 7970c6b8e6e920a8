"""How are messages held for a receiver that is slower than its sender?

The policies are those of psi (docs/specs/psi.md 8): how many messages wait, how old they may be,
when the sender must wait, and which messages are never dropped.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import Closed, InvalidOption
from penstock.core.overflow import BoundedBuffer, DropReason, OverflowPolicy
from penstock.core.units import format_duration, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeliveryPolicy", "DeliveryQueue"]

T = TypeVar("T")

_NS_PER_SECOND: Final = 1_000_000_000

_FORMS: Final = (
    "use unlimited, latest, throttle, synchronous, queue-size:N, queue-size:N:throttle, "
    "queue-size:N:synchronous, queue-throttled:N or latency:TIME"
)
#: Suffixes of `queue-size:N`.
_MORE: Final = (["throttle"], ["synchronous"], ["throttle", "synchronous"])


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """How many messages may wait for a receiver, and what happens to the excess.

    :raises InvalidOption: a number is out of its range.
    """

    #: The most messages that wait; one more drops the oldest. None: no limit.
    max_size: int | None = None
    #: A message older than this (seconds) when it is taken is dropped instead. None: no limit.
    max_latency: float | None = None
    #: The sender waits while this many messages wait. None: it never waits.
    throttle_at: int | None = None
    #: Run the receiver on the sender's thread if no message waits and it is free.
    is_synchronous: bool = False
    #: Tells whether a message must never be dropped.
    is_guaranteed: Callable[[Any], bool] | None = None

    UNLIMITED: ClassVar[DeliveryPolicy]
    LATEST_MESSAGE: ClassVar[DeliveryPolicy]
    THROTTLE: ClassVar[DeliveryPolicy]
    SYNCHRONOUS_OR_THROTTLE: ClassVar[DeliveryPolicy]

    def __post_init__(self) -> None:
        for option in ("max_size", "throttle_at"):
            number = getattr(self, option)
            if number is not None and not 1 <= number < sys.maxsize:
                raise InvalidOption(option, number, "must be at least 1")
        # Written so that NaN is refused too.
        if self.max_latency is not None and not self.max_latency >= 0:
            raise InvalidOption("max_latency", self.max_latency, "must not be negative")

    @classmethod
    def queue_size_constrained(
        cls, size: int, *, throttle_when_full: bool = False, is_synchronous: bool = False
    ) -> DeliveryPolicy:
        """Hold up to `size` messages; when full, drop the oldest or throttle the sender."""
        return cls(
            max_size=size,
            throttle_at=size if throttle_when_full else None,
            is_synchronous=is_synchronous,
        )

    @classmethod
    def queue_size_throttled(cls, size: int) -> DeliveryPolicy:
        """Throttle the sender while `size` messages wait. Nothing is dropped."""
        return cls(throttle_at=size)

    @classmethod
    def latency_constrained(cls, seconds: float) -> DeliveryPolicy:
        """Drop messages that are older than `seconds` when they are taken."""
        return cls(max_latency=seconds)

    def with_guarantees(self, is_guaranteed: Callable[[Any], bool]) -> DeliveryPolicy:
        """Return this policy, but never drop messages for which `is_guaranteed` returns True.

        Existing guarantees stay.
        """
        before = self.is_guaranteed
        if before is None:
            return replace(self, is_guaranteed=is_guaranteed)
        return replace(self, is_guaranteed=lambda item: before(item) or is_guaranteed(item))

    @classmethod
    def parse(cls, text: str) -> DeliveryPolicy:
        """Return the policy meant by `latest`, `queue-size:100`, `latency:500ms` and so on.

        :raises InvalidOption: the text is no policy.
        """
        name, *arguments = text.strip().lower().split(":")
        try:
            if not arguments and name in _NAMED:
                return _NAMED[name]
            match name, arguments:
                case "queue-size", [size]:
                    return cls.queue_size_constrained(_count(size))
                case "queue-size", [size, *more] if more in _MORE:
                    return cls.queue_size_constrained(
                        _count(size),
                        throttle_when_full="throttle" in more,
                        is_synchronous="synchronous" in more,
                    )
                case "queue-throttled", [size]:
                    return cls.queue_size_throttled(_count(size))
                case "latency", [limit]:
                    return cls.latency_constrained(parse_duration(limit))
        except InvalidOption as error:
            raise InvalidOption("policy", text, error.reason, hint=_FORMS) from None
        raise InvalidOption("policy", text, "is not a delivery policy", hint=_FORMS)

    @property
    def can_drop(self) -> bool:
        """Whether the policy may drop a message."""
        drops_oldest = self.max_size is not None and (
            self.throttle_at is None or self.throttle_at > self.max_size
        )
        return drops_oldest or self.max_latency is not None

    def __str__(self) -> str:
        for name, policy in _NAMED.items():
            if replace(self, is_guaranteed=None) == policy:
                return name
        if self.max_latency is not None:
            return f"latency:{format_duration(self.max_latency).replace(' ', '')}"
        if self.max_size is None:
            return f"queue-throttled:{self.throttle_at}"
        throttle = ":throttle" if self.throttle_at else ""
        return f"queue-size:{self.max_size}{throttle}" + ":synchronous" * self.is_synchronous


DeliveryPolicy.UNLIMITED = DeliveryPolicy()
DeliveryPolicy.LATEST_MESSAGE = DeliveryPolicy(max_size=1)
DeliveryPolicy.THROTTLE = DeliveryPolicy(throttle_at=1)
DeliveryPolicy.SYNCHRONOUS_OR_THROTTLE = DeliveryPolicy(throttle_at=1, is_synchronous=True)

_NAMED: Final = {
    "unlimited": DeliveryPolicy.UNLIMITED,
    "latest": DeliveryPolicy.LATEST_MESSAGE,
    "throttle": DeliveryPolicy.THROTTLE,
    "synchronous": DeliveryPolicy.SYNCHRONOUS_OR_THROTTLE,
}


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - 64 bits
        raise InvalidOption("policy", text, "expected a number of messages")
    return int(text)


class DeliveryQueue(BoundedBuffer[T], Generic[T]):
    """A queue of messages for one receiver, under a delivery policy.

    Thread-safe. The counters are those of `BoundedBuffer`: an accepted message was delivered,
    dropped for a reason, or is held.

    `time_of` returns the originating time of an item in nanoseconds; a latency limit needs it.
    `receive` is the receiver of a synchronous policy; for others, call `get`.

    :raises InvalidOption: the policy needs `time_of` or `receive`, which is not given.
    """

    def __init__(
        self,
        policy: DeliveryPolicy,
        *,
        time_of: Callable[[T], int] | None = None,
        receive: Callable[[T], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        # The buffer itself only makes senders wait; what is dropped is decided here.
        super().__init__(policy.throttle_at or sys.maxsize, OverflowPolicy.BLOCK)
        if policy.max_latency is not None and time_of is None:
            raise InvalidOption("time_of", None, "a limit of latency needs the time of a message")
        self.delivery = policy
        self._time_of = time_of
        self._receive = receive
        self._clock = clock
        #: Held by the thread that runs the receiver.
        self._receiving = threading.Lock()
        self._last: T | None = None

    # --- the sender's side ------------------------------------------------------------------------

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Add an item; return False if the policy dropped it instead.

        Only a throttling policy waits: for ever without a timeout, not at all with 0. A
        synchronous policy runs the receiver here, if no item waits and the receiver is free.

        :raises WriteTimeout: the sender was throttled for `timeout` seconds.
        :raises Closed: the queue was closed, before or while waiting.
        """
        if self._receive is not None and self.delivery.is_synchronous and self._deliver_now(item):
            return True
        return super().put(item, timeout)

    def put_last(self, item: T) -> None:
        """Add the last message of a source: it is never dropped and never throttled.

        Waiting messages with a later time are dropped (needs `time_of`).

        :raises Closed: the queue was closed.
        """
        with self._lock:
            if self._closed:
                raise Closed("the buffer was closed; it takes no more")
            if self._time_of is not None:
                end = self._time_of(item)
                kept = [each for each in self._items if self._time_of(each) <= end]
                self._dropped.add(DropReason.AFTER_END, len(self._items) - len(kept))
                self._items.clear()
                self._items.extend(kept)
            self._accepted += 1
            self._last = item
            self._items.append(item)
            self._readable.notify()
            self._writable.notify_all()

    @property
    def is_throttled(self) -> bool:
        """Whether senders should wait until the receiver has caught up."""
        return self.delivery.throttle_at is not None and self._is_full()

    def _deliver_now(self, item: T) -> bool:
        assert self._receive is not None
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            with self._lock:
                if self._items or self._closed:
                    return False  # waiting items come first; `put` handles a closed queue
                self._accepted += 1
                self._delivered += 1
            self._receive(item)
            return True
        finally:
            self._receiving.release()

    def _make_room(self, item: T, timeout: float | None) -> bool:
        if not super()._make_room(item, timeout):  # waits, if the policy throttles
            return False
        size = self.delivery.max_size
        if size is None or len(self._items) < size:
            return True
        for index, waiting in enumerate(self._items):
            if not self._must_stay(waiting):
                del self._items[index]
                self._dropped.add(DropReason.OVERFLOW_OLDEST)
                return True
        return self._must_stay(item)

    # --- the receiver's side ----------------------------------------------------------------------

    def get_many(self, limit: int, timeout: float | None = None) -> list[T]:
        """Wait for one item, then take all there are, oldest first, up to `limit`.

        Expired items are dropped on the way. Returns an empty list on timeout.

        :raises Closed: the queue was closed and everything in it was taken.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        with self._lock:
            while True:
                left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
                self._readable.wait_for(lambda: self._items or self._closed, left)
                if self._closed and not self._items:
                    raise Closed("the buffer was closed and everything in it was taken")
                taken, passed = self._take_fresh(limit)
                self._delivered += len(taken)
                self._writable.notify(passed)
                if taken or (left is not None and not passed) or left == 0:
                    return taken

    def receive(self, timeout: float | None = None) -> bool:
        """Take one item and run the receiver on this thread; False on timeout.

        :raises Closed: the queue was closed and everything in it was taken.
        """
        assert self._receive is not None, "the queue was made without a receiver"
        with self._lock:
            self._readable.wait_for(lambda: self._items or self._closed, timeout)
        # Taken under the receiver's lock: a sender that delivers by itself must not overtake it.
        with self._receiving:
            items = self.get_many(1, 0)
            for item in items:
                self._receive(item)
        return bool(items)

    def peek(self) -> T | None:
        """Return the oldest item without removing it, or None."""
        with self._lock:
            return self._items[0] if self._items else None

    def _take_fresh(self, limit: int) -> tuple[list[T], int]:
        """Remove up to `limit` fresh items; return them and the number removed. Needs the lock."""
        latency, time_of = self.delivery.max_latency, self._time_of
        taken: list[T] = []
        passed = 0
        oldest = None
        if latency is not None:
            oldest = self._clock.now_ns() - round(latency * _NS_PER_SECOND)
        while self._items and len(taken) < limit:
            item = self._items.popleft()
            passed += 1
            is_old = oldest is not None and time_of is not None and time_of(item) < oldest
            if is_old and not self._must_stay(item):
                self._dropped.add(DropReason.EXPIRED)
            else:
                taken.append(item)
        return taken, passed

    def _must_stay(self, item: T) -> bool:
        if item is self._last:
            return True
        return self.delivery.is_guaranteed is not None and self.delivery.is_guaranteed(item)
