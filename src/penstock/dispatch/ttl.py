"""Who ends the messages whose time is over, also while their receiver is stuck?"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed
from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from penstock.dispatch.scheduler import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.delivery import Outlet

    Outlets = Callable[[], Sequence[Outlet]]
    Expire = Callable[[Outlet, int], bool]

__all__ = ["ExpiryTimer"]

log = logging.getLogger(__name__)

#: Longest wait (seconds), since the wall clock may be set meanwhile.
_LONGEST_WAIT: Final = 0.5
#: Pause after an error (seconds).
_PAUSE: Final = 1.0
#: Interval of the check of all outlets (seconds).
_BETWEEN_LOOKS: Final = 1.0


class ExpiryTimer:
    """One timer for the messages of all receivers.

    It accesses only outboxes with due messages, so that an outbox waiting for its disk delays no
    other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Lock()
        #: Lower bound of the next expiry by outlet (milliseconds since 1970 UTC).
        self._dues: Schedule[Outlet] = Schedule()
        #: Whether all outlets must be checked: at the start, and after an error.
        self._is_lost = True
        self._looked = self._clock.monotonic()
        self._worker: Worker | None = None

    def sooner(self, outlet: Outlet, ms: int) -> None:
        """Note that a message of an outlet expires at `ms`."""
        known = self._dues.get(outlet)
        if known is not None and known <= ms:
            return
        with self._changed:
            known = self._dues.get(outlet)
            is_first = (known is None or ms < known) and self._dues.set(outlet, ms)
            if is_first and not self._is_lost and self._worker is not None:
                self._worker.wake()

    def forget(self, outlet: Outlet) -> None:
        """Remove an outlet."""
        with self._changed:
            self._dues.discard(outlet)

    @property
    def next_ms(self) -> float | None:
        """When the next message expires (milliseconds since 1970 UTC), or None."""
        if self._is_lost:
            return 0
        with self._changed:
            return self._dues.first

    def _due(self, outlets: Outlets, now_ms: int) -> list[Outlet]:
        """Remove and return the outlets that are due; later messages are noted by `sooner`."""
        with self._changed:
            if self._is_lost:
                self._is_lost = False
                self._dues.clear()
                return list(outlets())
            found = self._dues.take(now_ms)
        # Busy outboxes come last, so that the others need not wait.
        return sorted(found, key=lambda outlet: outlet.outbox.is_busy)

    def _look_around(self, outlets: Outlets) -> None:
        """Periodically check all outlets, for messages requeued without a call of `sooner`."""
        now = self._clock.monotonic()
        if now - self._looked < _BETWEEN_LOOKS:
            return
        self._looked = now
        for outlet in outlets():
            with contextlib.suppress(Closed):
                if not outlet.outbox.is_busy and (ms := outlet.outbox.next_expiry_ms()) is not None:
                    self.sooner(outlet, ms)

    def work(self, outlets: Outlets, expire: Expire) -> bool:
        """Expire due messages; tell whether there were any.

        :param outlets: returns all outlets
        :param expire: expires messages of one outlet; returns whether there were any
        :raises StorageError: a dead letter could not be written.
        """
        self._look_around(outlets)
        now_ms = self._clock.now_ns() // 1_000_000
        did = False
        try:
            for outlet in self._due(outlets, now_ms):
                with contextlib.suppress(Closed):  # its empty outbox was retired
                    ms = outlet.outbox.next_expiry_ms()
                    if ms is not None and ms <= now_ms:
                        did = expire(outlet, now_ms) or did
                        ms = outlet.outbox.next_expiry_ms()
                    if ms is not None:
                        self.sooner(outlet, ms)
        except BaseException:
            self._is_lost = True
            raise
        return did

    # --- with a thread --------------------------------------------------------------------------

    def start(self, outlets: Outlets, expire: Expire) -> None:
        """Call `work` in a thread when messages are due, until `stop`."""

        def run(worker: Worker) -> None:
            while not worker.is_stopping:
                self.work(outlets, expire)
                worker.note_success()
                worker.wait(self._wait())

        again = Backoff(initial=_PAUSE, maximum=_PAUSE, jitter=0.0)
        self._worker = Worker("dispatch expiry", run, log=log, restart=True, backoff=again)
        self._worker.start()

    def _wait(self) -> float:
        next_ms = self.next_ms
        if next_ms is None:
            return _LONGEST_WAIT
        now_ms = self._clock.now_ns() / 1_000_000
        return min(max((next_ms - now_ms) / 1000, 0.0), _LONGEST_WAIT)

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
