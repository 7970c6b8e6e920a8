"""Which thread delivers to which receiver, and when?"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed
from penstock.core.worker import Worker
from penstock.dispatch.schedule import Schedule

if TYPE_CHECKING:
    from penstock.core.clock import Clock
    from penstock.dispatch.delivering import Outlet

__all__ = ["Threads"]

log = logging.getLogger(__name__)

#: Threads that deliver, while they come back from their receivers.
_ENOUGH: Final = 4
#: When none of them came back for so long, another one begins (seconds).
_HELD_UP: Final = 0.1
#: Receivers that are there come before others that wait, for so long (seconds).
_PRECEDENCE: Final = 2.0
#: Seconds without work after which a thread goes.
_IDLE: Final = 5.0


class Threads:
    """The threads that deliver: some, however many receivers wait.

    An outlet rests, is in line, or is worked on by one thread, which keeps its order. A receiver
    that holds its thread up delays no other: if all are held up, there is another thread (E15).
    Those that are away, and those that are new, let others pass for some time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        #: Those in line, by the time when they came, or some time later.
        self._line: Schedule[Outlet] = Schedule()
        #: Those that are worked on, and whether they were woken since that began.
        self._worked_on: dict[Outlet, bool] = {}
        #: Those that rest, and until when (monotonic seconds).
        self._resting: Schedule[Outlet] = Schedule()
        self._changed = threading.Condition(self._lock)
        self._timer = Worker("dispatch timer", self._time, log=log, restart=True)
        self._threads: set[Worker] = set()
        self._idle = 0
        self._came_back = 0.0
        self._is_over = False

    def wake(self, outlet: Outlet) -> None:
        """Let somebody look whether there is something to deliver."""
        if outlet in self._line:
            return  # somebody will look
        with self._lock:
            if outlet in self._worked_on:
                self._worked_on[outlet] = True
            else:
                self._put_in_line(outlet)

    def forget(self, outlet: Outlet) -> None:
        """Look after an outlet no more; a delivery that is under way is not waited for."""
        with self._lock:
            self._resting.discard(outlet)
            self._line.discard(outlet)
            self._worked_on.pop(outlet, None)

    def stop(self) -> None:
        """End all threads, when they have done what they are at."""
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
        self._line.set(outlet, now if outlet.is_there else now + _PRECEDENCE)
        if self._idle >= len(self._line):
            self._came.notify()
        elif len(self._threads) < _ENOUGH:
            self._begin()
        else:
            self._changed.notify()
        self._timer.start()

    def _begin(self) -> None:
        thread = Worker("dispatch", self._deliver, log=log, restart=True)
        self._came_back = self._clock.monotonic()
        self._threads.add(thread)
        thread.start()

    def _next(self, thread: Worker) -> Outlet | None:
        """Wait for the first in line; None: for too long, or it is all over."""
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
        """Deliver what is due; return when there is more (monotonic seconds), None: nothing."""
        try:
            while outlet.work():
                if self._line or self._is_over:
                    return 0.0  # the others first
            return outlet.next_due()
        except Closed:
            return None  # nothing was left to do, and its outlet had to make room
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
                if self._line and not self._idle:
                    if now - self._came_back >= _HELD_UP:
                        self._begin()
                    wait = _HELD_UP if wait is None else min(wait, _HELD_UP)
                self._changed.wait(wait)
