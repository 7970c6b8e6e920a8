"""Which thread delivers to a receiver, and when is there one?"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed

if TYPE_CHECKING:
    from penstock.core.clock import Clock
    from penstock.dispatch.delivering import Outlet

__all__ = ["Threads"]

log = logging.getLogger(__name__)

#: Seconds without work after which a thread goes.
_IDLE: Final = 5.0


class Threads:
    """A thread for each receiver that has messages, so that none waits for another (E15)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._workers: dict[Outlet, _Worker] = {}
        self._is_over = False

    def wake(self, outlet: Outlet) -> None:
        """Let somebody look whether there is something to deliver."""
        worker = self._workers.get(outlet)
        if worker is not None and worker.wake():
            return
        with self._lock:
            worker = self._workers.get(outlet)
            if self._is_over or (worker is not None and worker.wake()):
                return
            worker = self._workers[outlet] = _Worker(outlet, self._clock)
            worker.start()

    def forget(self, outlet: Outlet) -> None:
        """End the thread of an outlet, when it has done what it is at; that is not waited for."""
        with self._lock:
            worker = self._workers.pop(outlet, None)
        if worker is not None:
            worker.end()

    def stop(self) -> None:
        """End all threads, when they have done what they are at."""
        with self._lock:
            self._is_over = True
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()


class _Worker(threading.Thread):
    def __init__(self, outlet: Outlet, clock: Clock) -> None:
        super().__init__(name=f"dispatch to {outlet.receiver}", daemon=True)
        self._outlet = outlet
        self._clock = clock
        self._changed = threading.Condition()
        self._is_woken = True
        self._is_over = False

    def wake(self) -> bool:
        """Let it look again; tell whether it is still there."""
        if self._is_woken and not self._is_over:
            return True  # it will look before it waits or goes
        with self._changed:
            if self._is_over:
                return False
            self._is_woken = True
            self._changed.notify()
            return True

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def run(self) -> None:
        while not self._is_over:
            self._is_woken = False
            try:
                while not self._is_over and self._outlet.work():
                    pass
                due = self._outlet.next_due()
            except Closed:
                return  # nothing was left to do, and its outlet had to make room
            except Exception:
                log.exception("%s: the deliveries pause", self._outlet.receiver)
                due = self._clock.monotonic() + _IDLE
            with self._changed:
                if self._is_woken or self._is_over:
                    continue
                wait = _IDLE if due is None else max(due - self._clock.monotonic(), 0.0)
                if not self._changed.wait(wait) and due is None and not self._is_woken:
                    self._is_over = True
