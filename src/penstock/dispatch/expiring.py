"""Who ends the messages whose time is over, also while a receiver is stuck? (E4)."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed
from penstock.core.retry import Backoff
from penstock.core.worker import Worker
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
        self._changed = threading.Lock()
        #: When the first message of an outlet expires, milliseconds since 1970 UTC, or before that.
        self._dues: Schedule[Outlet] = Schedule()
        #: Whether it is not known of all outlets: at first, and after something went wrong.
        self._is_lost = True
        self._looked = self._clock.monotonic()
        again = Backoff(initial=_PAUSE, maximum=_PAUSE, jitter=0.0)
        self._worker = Worker("dispatch expiry", self._run, log=log, restart=True, backoff=again)

    def sooner(self, outlet: Outlet, ms: int) -> None:
        """Hear that a message of an outlet expires then."""
        known = self._dues.get(outlet)
        if known is not None and known <= ms:
            return
        with self._changed:
            known = self._dues.get(outlet)
            if (known is None or ms < known) and self._dues.set(outlet, ms) and not self._is_lost:
                self._worker.wake()

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
        self._worker.start()

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self.work()
            worker.note_success()
            worker.wait(self._wait())

    def _wait(self) -> float:
        next_ms = self.next_ms
        if next_ms is None:
            return _LONGEST_WAIT
        now_ms = self._clock.now_ns() / 1_000_000
        return min(max((next_ms - now_ms) / 1000, 0.0), _LONGEST_WAIT)

    def stop(self) -> None:
        self._worker.stop()
