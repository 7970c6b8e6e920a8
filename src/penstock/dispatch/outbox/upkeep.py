"""Who brings all outboxes of a process to the disk, about once a second?"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from penstock.dispatch.outbox.outbox import Outbox

__all__ = ["look_after"]

log = logging.getLogger(__name__)

#: With shorter times between, this is how often it looks whether there is work (seconds).
_LONGEST_PAUSE: Final = 1.0
#: Then it is the turn of other outboxes again (seconds).
_LONGEST_MAKING: Final = 0.25


class _Upkeep:
    """One thread for all outboxes, for as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: weakref.WeakKeyDictionary[Outbox, tuple[float, float]] = (
            weakref.WeakKeyDictionary()
        )
        self._worker: Worker | None = None

    def add(self, outbox: Outbox, interval: float) -> None:
        with self._lock:
            self._due[outbox] = (time.monotonic() + interval, interval)
            if self._worker is None or not self._worker.is_alive:
                self._worker = Worker("outboxes", self._run, log=log, restart=True).start()
            self._worker.wake()

    def _run(self, worker: Worker) -> None:
        while (pause := self._work()) is not None:
            worker.wait(pause)

    def _work(self) -> float | None:
        """Do what is due; return how long nothing is. None: there is no outbox any more."""
        now = time.monotonic()
        with self._lock:
            for outbox in list(self._due):
                if outbox.is_closed:
                    del self._due[outbox]
            if not self._due:
                self._worker = None
                return None
            due = [outbox for outbox, (at, _) in self._due.items() if at <= now]
            # Files that are still to be made come last: what shall be in them is stored elsewhere.
            due.sort(key=lambda outbox: outbox.is_to_be_made)
        for outbox in due:
            began = time.monotonic()
            if outbox.is_to_be_made and began - now >= _LONGEST_MAKING:
                break
            with self._lock:
                interval = self._due[outbox][1]
                self._due[outbox] = (began + interval, interval)
            try:
                outbox.tend()
            except PenstockError as error:
                log.warning("%s: it could not be brought to the disk: %s", outbox.folder, error)
            except Exception:
                log.exception("%s: it could not be brought to the disk", outbox.folder)
        del due
        with self._lock:
            soonest = min((at for at, _ in self._due.values()), default=now)
        return min(max(0.0, soonest - time.monotonic()), _LONGEST_PAUSE)


_upkeep = _Upkeep()


def look_after(outbox: Outbox, interval: float) -> None:
    """Call `tend` of an outbox after every such time (seconds), until it is closed."""
    _upkeep.add(outbox, interval)
