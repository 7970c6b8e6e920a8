"""How does one thread end many calls when their time is over?"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadlines"]


class Deadlines:
    """Calls functions at their times, in a thread that is there while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call after some seconds. It must not wait, and has to know if it is too late."""
        with self._changed:
            if self._is_closed:
                return
            due = time.monotonic() + seconds
            heapq.heappush(self._due, (due, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._thread = None
                    return
                wait = self._due[0][0] - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                _, _, call = heapq.heappop(self._due)
            call()

    def close(self) -> None:
        """Forget all calls."""
        with self._changed:
            self._is_closed = True
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
