"""Which thread delivers to which receiver, and when?"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.errors import Closed
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.clock import Clock
    from penstock.dispatch.delivery import Outlet
    from penstock.dispatch.failures import FailureHandler
    from penstock.dispatch.outlets import Outlets
    from penstock.dispatch.ttl import ExpiryTimer

__all__ = ["Deliveries", "Schedule", "Scheduler"]

log = logging.getLogger(__name__)

_Key = TypeVar("_Key")

#: Stale entries tolerated in the heap, in addition to one per key.
_SPARE: Final = 64


class Schedule(Generic[_Key]):
    """A time for each of many keys. Not thread-safe."""

    def __init__(self) -> None:
        self._times: dict[_Key, float] = {}
        #: The same as a heap, with stale entries; the number breaks ties.
        self._heap: list[tuple[float, int, _Key]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: _Key) -> bool:
        return key in self._times

    def get(self, key: _Key) -> float | None:
        return self._times.get(key)

    def set(self, key: _Key, time: float) -> bool:
        """Set the time of a key; tell whether it is the earliest of all."""
        self._times[key] = time
        heapq.heappush(self._heap, (time, next(self._count), key))
        if len(self._heap) > 2 * len(self._times) + _SPARE:
            self._heap = [(at, next(self._count), key) for key, at in self._times.items()]
            heapq.heapify(self._heap)
        return self._heap[0][0] >= time

    def discard(self, key: _Key) -> None:
        self._times.pop(key, None)

    def clear(self) -> None:
        self._times.clear()
        self._heap.clear()

    @property
    def first(self) -> float | None:
        """The earliest time, or None."""
        while self._heap:
            time, _, key = self._heap[0]
            if self._times.get(key) == time:
                return time
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> list[_Key]:
        """Remove and return the keys that are due."""
        found: list[_Key] = []
        while (time := self.first) is not None and time <= now:
            found.append(self.take_first())
        return found

    def take_first(self) -> _Key:
        """Remove and return the key that is due first.

        :raises IndexError: the schedule is empty.
        """
        if self.first is None:
            raise IndexError("nothing is due")
        key = heapq.heappop(self._heap)[2]
        del self._times[key]
        return key


#: Number of threads while none is blocked.
_ENOUGH: Final = 4
#: If no thread has finished a delivery for this time, another one starts (seconds).
_HELD_UP: Final = 0.1
#: Unreachable receivers are queued this much later than others (seconds).
_PRECEDENCE: Final = 2.0
#: Idle time after which a thread ends (seconds).
_IDLE: Final = 5.0


class Scheduler:
    """A small pool of delivery threads for any number of receivers.

    An outlet is idle, queued, or served by one thread, which preserves its order. A receiver that
    blocks its thread does not delay others: if all threads are blocked, another one starts.
    Unreachable and new receivers queue behind the others for a limited time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Delivers one batch to an outlet; returns whether anything was due.
        self._deliver_to: Callable[[Outlet], bool] | None = None
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        #: Queued outlets, by the time they were queued, plus `_PRECEDENCE` if unreachable.
        self._line: Schedule[Outlet] = Schedule()
        #: Outlets being served, and whether they were woken meanwhile.
        self._worked_on: dict[Outlet, bool] = {}
        #: Idle outlets with a due time (monotonic seconds).
        self._resting: Schedule[Outlet] = Schedule()
        self._changed = threading.Condition(self._lock)
        self._timer = Worker("dispatch timer", self._time, log=log, restart=True)
        self._threads: set[Worker] = set()
        self._idle = 0
        self._came_back = 0.0
        self._is_over = False

    def start(self, deliver_to: Callable[[Outlet], bool]) -> None:
        """Start delivering to outlets that are woken."""
        self._deliver_to = deliver_to
        self._timer.start()

    def wake(self, outlet: Outlet) -> None:
        """Queue an outlet for a thread that checks for due messages."""
        if self._deliver_to is None or outlet in self._line:
            return  # not started, or queued already
        with self._lock:
            if outlet in self._worked_on:
                self._worked_on[outlet] = True
            else:
                self._put_in_line(outlet)

    def forget(self, outlet: Outlet) -> None:
        """Remove an outlet, without waiting for a delivery in progress."""
        with self._lock:
            self._resting.discard(outlet)
            self._line.discard(outlet)
            self._worked_on.pop(outlet, None)

    def stop(self) -> None:
        """Stop all threads after their current delivery."""
        with self._lock:
            self._is_over = True
            self._came.notify_all()
            self._changed.notify()
            threads = [*self._threads, self._timer]
        for thread in threads:
            thread.join()

    # --- with the lock --------------------------------------------------------------------------

    def _put_in_line(self, outlet: Outlet) -> None:
        if self._is_over or outlet in self._line:
            return
        self._resting.discard(outlet)
        now = self._clock.monotonic()
        self._line.set(outlet, now if outlet.took_last else now + _PRECEDENCE)
        if self._idle >= len(self._line):
            self._came.notify()
        elif len(self._threads) < _ENOUGH:
            self._begin()
        else:
            self._changed.notify()

    def _begin(self) -> None:
        thread = Worker("dispatch", self._deliver, log=log, restart=True)
        self._came_back = self._clock.monotonic()
        self._threads.add(thread)
        thread.start()

    def _next(self, thread: Worker) -> Outlet | None:
        """Wait for the next outlet; return None when idle too long, or stopped."""
        while not self._line and not self._is_over:
            self._idle += 1
            is_called = self._came.wait(_IDLE)
            self._idle -= 1
            if not is_called:
                break
        if not self._line or self._is_over:
            self._threads.discard(thread)
            return None
        outlet = self._line.take_first()
        self._worked_on[outlet] = False
        return outlet

    def _rest(self, outlet: Outlet, due: float | None) -> None:
        self._came_back = self._clock.monotonic()
        is_woken = self._worked_on.pop(outlet, None)
        if is_woken is None:
            return  # it was forgotten
        if is_woken or (due is not None and due <= self._came_back):
            self._put_in_line(outlet)
        elif due is not None and self._resting.set(outlet, due):
            self._changed.notify()

    # --- the threads ----------------------------------------------------------------------------

    def _deliver(self, thread: Worker) -> None:
        while True:
            with self._lock:
                outlet = self._next(thread)
            if outlet is None:
                return
            due = self._work(outlet)
            with self._lock:
                self._rest(outlet, due)

    def _work(self, outlet: Outlet) -> float | None:
        """Deliver due messages; return when more are due (monotonic seconds), or None."""
        try:
            while self._deliver_to is not None and self._deliver_to(outlet):
                if self._line or self._is_over:
                    return 0.0  # other outlets first
            return outlet.next_due()
        except Closed:
            return None  # its empty outbox was retired
        except Exception:
            log.exception("%s: the deliveries pause", outlet.receiver)
            return self._clock.monotonic() + _IDLE

    def _time(self, _: Worker) -> None:
        with self._lock:
            while not self._is_over:
                now = self._clock.monotonic()
                for outlet in self._resting.take(now):
                    self._put_in_line(outlet)
                first = self._resting.first
                wait = None if first is None else first - now
                if self._line:
                    # A thread that counts as idle may be about to take one, and to be held up.
                    if not self._idle and now - self._came_back >= _HELD_UP:
                        self._begin()
                    wait = _HELD_UP if wait is None else min(wait, _HELD_UP)
                self._changed.wait(wait)


class Deliveries:
    """Delivers to all receivers, and passes failures to the failure handler."""

    def __init__(
        self,
        outlets: Outlets,
        failures: FailureHandler,
        scheduler: Scheduler,
        timer: ExpiryTimer,
        clock: Clock,
    ) -> None:
        self._outlets = outlets
        self._failures = failures
        self._scheduler = scheduler
        self._timer = timer
        self._clock = clock

    def start(self) -> None:
        """Start the threads that deliver queued and new messages."""
        self._timer.start(self._outlets.all, self._expire)
        self._scheduler.start(self._deliver_to)
        self.wake_all()

    def wake_all(self) -> None:
        """Wake the deliveries of all receivers."""
        for outlet in self._outlets.all():
            self._scheduler.wake(outlet)

    def stop(self) -> None:
        """Stop all threads after their current delivery."""
        self._scheduler.stop()
        self._timer.stop()

    def _deliver_to(self, outlet: Outlet) -> bool:
        """Deliver one batch to a receiver; tell whether anything was due.

        :raises StorageError: a dead letter could not be written; its message is requeued.
        """
        failures = outlet.deliver()
        try:
            if failures:
                self._failures.handle(failures)
            if outlet in self._failures.unpublished:
                self._failures.room_came(outlet)
        except BaseException:
            outlet.pause()
            raise
        return failures is not None

    def _expire(self, outlet: Outlet, now_ms: int) -> bool:
        """Expire messages of a receiver; tell whether there were any."""
        failures = outlet.expire(now_ms)
        self._failures.handle(failures)
        if outlet in self._failures.unpublished:
            self._scheduler.wake(outlet)  # letters wait for the room that came
        return bool(failures)

    def step(self) -> float | None:
        """Do all due work; return when more is due (monotonic seconds), or None."""
        is_busy = True
        while is_busy:
            is_busy = self._timer.work(self._outlets.all, self._expire)
            for outlet in self._outlets.all():
                while self._deliver_to(outlet):
                    is_busy = True
        now = self._clock.monotonic()
        dues = [due for outlet in self._outlets.all() if (due := outlet.next_due()) is not None]
        next_ms = self._timer.next_ms
        if next_ms is not None:
            dues.append(now + max(next_ms * 1_000_000 - self._clock.now_ns(), 0) / 1e9)
        return min(dues, default=None)
