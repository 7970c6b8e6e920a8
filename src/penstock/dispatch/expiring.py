"""Who ends the messages whose time is over, also while a receiver is stuck? (E4)."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.delivering import Outlet

__all__ = ["Expiring"]

log = logging.getLogger(__name__)

#: The wall clock may be set meanwhile, so nothing waits longer than this (seconds).
_LONGEST_WAIT: Final = 0.5
#: After something went wrong (seconds).
_PAUSE: Final = 1.0


class Expiring:
    """One timer for the messages of all receivers."""

    def __init__(self, outlets: Callable[[], Sequence[Outlet]], clock: Clock) -> None:
        self._outlets = outlets
        self._clock = clock
        self._changed = threading.Condition()
        #: Milliseconds since 1970 UTC; None: nothing expires.
        self._next_ms: int | None = 0
        self._is_over = False
        self._thread: threading.Thread | None = None

    def sooner(self, ms: int) -> None:
        """Hear that a message expires then."""
        if self._next_ms is None or ms < self._next_ms:
            with self._changed:
                if self._next_ms is None or ms < self._next_ms:
                    self._next_ms = ms
                    self._changed.notify()

    @property
    def next_ms(self) -> int | None:
        return self._next_ms

    def work(self) -> bool:
        """End what is due; tell whether there was something.

        :raises StorageError: a dead letter could not be written.
        """
        now_ms = self._clock.now_ns() // 1_000_000
        if self._next_ms is None or self._next_ms > now_ms:
            return False
        with self._changed:
            self._next_ms = None  # whatever comes from here on says so itself
        did = False
        soonest: list[int] = []
        for outlet in self._outlets():
            with contextlib.suppress(Closed):  # it was empty, and had to make room
                ms = outlet.outbox.next_expiry_ms()
                if ms is not None and ms <= now_ms:
                    did = outlet.expire(now_ms) or did
                    ms = outlet.outbox.next_expiry_ms()
                if ms is not None:
                    soonest.append(ms)
        if soonest:
            self.sooner(min(soonest))
        return did

    # --- with a thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="dispatch expiry", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            pause = 0.0
            try:
                self.work()
            except Exception:
                log.exception("messages whose time is over could not be given up")
                pause = _PAUSE
                self._next_ms = 0
            with self._changed:
                if not self._is_over:
                    self._changed.wait(pause or self._wait())

    def _wait(self) -> float:
        if self._next_ms is None:
            return _LONGEST_WAIT
        now_ms = self._clock.now_ns() / 1_000_000
        return min(max((self._next_ms - now_ms) / 1000, 0.0), _LONGEST_WAIT)

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
