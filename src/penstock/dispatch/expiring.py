"""Who ends the messages whose time is over, also while a receiver is stuck? (E4)."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed
from penstock.dispatch.schedule import Schedule

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
#: So often it looks for what it was not told of (seconds).
_BETWEEN_LOOKS: Final = 1.0


class Expiring:
    """One timer for the messages of all receivers.

    It looks only at those who have something that is due: an outbox that waits for its disk at
    that moment delays nobody else's.
    """

    def __init__(self, outlets: Callable[[], Sequence[Outlet]], clock: Clock) -> None:
        self._outlets = outlets
        self._clock = clock
        self._changed = threading.Condition()
        #: When the first message of an outlet expires, milliseconds since 1970 UTC, or before that.
        self._dues: Schedule[Outlet] = Schedule()
        #: Whether it is not known of all outlets: at first, and after something went wrong.
        self._is_lost = True
        self._looked = self._clock.monotonic()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def sooner(self, outlet: Outlet, ms: int) -> None:
        """Hear that a message of an outlet expires then."""
        known = self._dues.get(outlet)
        if known is not None and known <= ms:
            return
        with self._changed:
            known = self._dues.get(outlet)
            if (known is None or ms < known) and self._dues.set(outlet, ms) and not self._is_lost:
                self._changed.notify()

    def forget(self, outlet: Outlet) -> None:
        """Hear that an outlet is gone."""
        with self._changed:
            self._dues.discard(outlet)

    @property
    def next_ms(self) -> float | None:
        """When there is something to do, milliseconds since 1970 UTC; None: nothing expires."""
        if self._is_lost:
            return 0
        with self._changed:
            return self._dues.first

    def _due(self, now_ms: int) -> list[Outlet]:
        """Return the outlets that are due; whatever they get from here on they say themselves."""
        with self._changed:
            if self._is_lost:
                self._is_lost = False
                self._dues.clear()
                return list(self._outlets())
            found = self._dues.take(now_ms)
        # Those that somebody works with come last, so that the others need not wait for that.
        return sorted(found, key=lambda outlet: outlet.outbox.is_busy)

    def _look_around(self) -> None:
        """Find what nobody told of: messages that were in work, and wait again."""
        now = self._clock.monotonic()
        if now - self._looked < _BETWEEN_LOOKS:
            return
        self._looked = now
        for outlet in self._outlets():
            with contextlib.suppress(Closed):
                if not outlet.outbox.is_busy and (ms := outlet.outbox.next_expiry_ms()) is not None:
                    self.sooner(outlet, ms)

    def work(self) -> bool:
        """End what is due; tell whether there was something.

        :raises StorageError: a dead letter could not be written.
        """
        self._look_around()
        now_ms = self._clock.now_ns() // 1_000_000
        did = False
        try:
            for outlet in self._due(now_ms):
                with contextlib.suppress(Closed):  # it was empty, and had to make room
                    ms = outlet.outbox.next_expiry_ms()
                    if ms is not None and ms <= now_ms:
                        did = outlet.expire(now_ms) or did
                        ms = outlet.outbox.next_expiry_ms()
                    if ms is not None:
                        self.sooner(outlet, ms)
        except BaseException:
            self._is_lost = True
            raise
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
            with self._changed:
                if not self._is_over:
                    self._changed.wait(pause or self._wait())

    def _wait(self) -> float:
        next_ms = 0 if self._is_lost else self._dues.first
        if next_ms is None:
            return _LONGEST_WAIT
        now_ms = self._clock.now_ns() / 1_000_000
        return min(max((next_ms - now_ms) / 1000, 0.0), _LONGEST_WAIT)

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
