"""How does a DataMapper hear of fresh data, without anybody waiting for it?"""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.closing import Closable
from penstock.core.errors import InvalidOption
from penstock.core.worker import Worker
from penstock.protocols.lrose.datamapper_client import DataMapClient, is_active
from penstock.protocols.lrose.datamapper_info import NO_LEAD

__all__ = ["DEFAULT_INTERVAL", "Registrar", "RegistrarStatistics"]

log = logging.getLogger(__name__)

#: Seconds between two registrations, at least.
DEFAULT_INTERVAL: Final = 5.0
#: The map of this machine answers at once, or not at all.
_TIMEOUT: Final = 2.0
_NS_PER_SECOND: Final = 1_000_000_000


class RegistrarStatistics(NamedTuple):
    """Books of a registrar. Every attempt went well or failed."""

    #: Registrations that the map took.
    registered: int
    #: Attempts that failed: nobody there, or refused.
    failed: int
    #: What the last attempt failed by; None once one goes well.
    error: str | None


class Registrar(Closable):
    """Registers the latest data of one data set now and then, in a thread of its own.

    It never raises, and never holds its caller up: a map that is down, hangs or refuses is said
    once in the log, and tried again at the next turn.
    """

    def __init__(
        self,
        directory: str,
        datatype: str,
        *,
        interval: float = DEFAULT_INTERVAL,
        client: DataMapClient | None = None,
        level: int = logging.WARNING,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Register a directory under a type, at most once in `interval` seconds.

        :raises InvalidOption: the interval is negative.
        """
        if not interval >= 0:  # written so that NaN is refused too
            raise InvalidOption("interval", interval, "must not be negative")
        self.directory = directory
        self.datatype = datatype
        self.interval = interval
        self._level = level
        self._clock = clock
        self._client = client or DataMapClient(connect_timeout=_TIMEOUT, timeout=_TIMEOUT)
        self._is_active = is_active()
        self._next = 0.0
        #: What was heard last, the time of the data and the forecast lead; and what of it the map
        #: was told. Each is set by one thread only, so that none needs a lock.
        self._latest: tuple[int, int] | None = None
        self._told: tuple[int, int] | None = None
        self._is_closing = False
        self._worker = Worker("penstock-registrar", self._work, log=log)
        self._books = RegistrarStatistics(0, 0, None)

    def note(self, latest_time: int | None = None, lead: int = NO_LEAD) -> None:
        """Hear that there are data of this time (seconds; None: now). This costs next to nothing.

        The latest of what was heard is registered when its turn comes, or at the end.
        """
        if not self._is_active or self._is_closing:
            return
        if latest_time is None:
            latest_time = self._clock.now_ns() // _NS_PER_SECOND
        self._latest = latest_time, lead
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.interval
            self._worker.start().wake()

    def _work(self, worker: Worker) -> None:
        while True:
            is_last = worker.wait()
            latest = self._latest
            if latest is not None and latest is not self._told:
                self._told = latest
                self._register(*latest)
            if is_last:
                return

    def _register(self, latest_time: int, lead: int) -> None:
        books = self._books
        try:
            self._client.register_latest(self.directory, latest_time, self.datatype, lead=lead)
        except Exception as error:  # noqa: BLE001 - whatever it is, the data matter more
            if books.error is None:
                log.log(
                    self._level,
                    "%s is not registered with the data map: %s; it is tried again",
                    self.directory,
                    error,
                )
            self._books = books._replace(failed=books.failed + 1, error=str(error))
        else:
            if books.error is not None:
                log.info("%s is registered with the data map again", self.directory)
            self._books = RegistrarStatistics(books.registered + 1, books.failed, None)

    def statistics(self) -> RegistrarStatistics:
        return self._books

    def close(self, patience: float = _TIMEOUT) -> None:
        """Register what was heard last, if that takes no longer than this; then end."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._latest is not None:
            self._worker.start()  # for what is left
        self._worker.stop(patience)
