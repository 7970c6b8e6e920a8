"""How does one thread end many calls when their time is over?"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadlines"]

log = logging.getLogger(__name__)

#: So many that are not needed any more do not matter.
_FEW: Final = 64


class Deadlines:
    """Calls functions at their times, in a thread that is there while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._worker: Worker | None = None
        self._is_closed = False

    def add(self, seconds: float, call: Callable[[], None]) -> int:
        """Make a call after some seconds. It must not wait, and has to know if it is too late.

        :returns: its number, for `discard`.
        """
        with self._changed:
            number = next(self._numbers)
            if self._is_closed:
                return number
            self._calls[number] = call
            heapq.heappush(self._due, (time.monotonic() + seconds, number))
            if self._worker is None:
                self._worker = Worker(self._name, self._run, log=log, restart=True).start()
            self._changed.notify()
            return number

    def discard(self, number: int) -> None:
        """Do not make a call; one that was made is fine."""
        with self._changed:
            self._calls.pop(number, None)
            # Most calls end long before their time: what is left of them must not pile up.
            if len(self._due) > _FEW + 2 * len(self._calls):
                self._due = [it for it in self._due if it[1] in self._calls]
                heapq.heapify(self._due)

    def _run(self, _: Worker) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._worker = None
                    return
                wait = self._due[0][0] - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                call = self._calls.pop(heapq.heappop(self._due)[1], None)
            if call is not None:
                call()

    def close(self) -> None:
        """Forget all calls."""
        with self._changed:
            self._is_closed = True
            self._due.clear()
            self._calls.clear()
            self._changed.notify()
            worker = self._worker
        if worker is not None:
            worker.join()
