"""How are the services inside the dispatcher reached, and when do they act by themselves?"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError
from penstock.core.worker import Worker
from penstock.protocols.uprotocol import UCode, UStatus
from penstock.protocols.uprotocol.transports import Leg, not_tried_after
from penstock.protocols.uprotocol.transports.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.services.service import Service
    from penstock.protocols.uprotocol import UMessage, UUri
    from penstock.protocols.uprotocol.transports import Ingest

__all__ = ["ServicesLeg"]

log = logging.getLogger(__name__)

#: The wall clock may be set meanwhile, so nothing waits longer than this (seconds).
_LONGEST_WAIT: Final = 0.5
_PAUSE: Final = 1.0


class ServicesLeg(Leg):
    """A leg whose receivers are services of this process.

    One message at a time, so that what they tell of goes out in the order that it happened in.
    """

    scope = "entity"

    def __init__(
        self,
        name: str,
        services: Iterable[Service],
        clock: Clock,
        *,
        threads: bool = True,
    ) -> None:
        super().__init__(name)
        self._services = {service.service_id: service for service in services}
        self._clock = clock
        self._has_threads = threads
        self._changed: Callable[[], None] = lambda: None
        self._ingest: Ingest | None = None
        #: Held while a service acts and what it says is stored.
        self._acting = threading.RLock()
        #: What could not be stored, to be said before anything else.
        self._unsaid: list[UMessage] = []
        self._worker = Worker("services", self._run, log=log)
        self._counts = Counts("received", "delivered", "failed")

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call this whenever a service may have changed the subscriptions."""
        self._changed = changed

    # --- the interface ----------------------------------------------------------------------------

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        del authorities
        self._ingest = ingest
        if self._has_threads:
            self._worker.start()

    def listen(self, topic: UUri) -> None:
        """They publish, and listen to nothing."""

    def unlisten(self, topic: UUri) -> None:
        """They publish, and listen to nothing."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        found: list[UStatus | None] = []
        for message in messages:
            status = self._deliver(address, message)
            if status is not None:
                self._counts.add("failed")
                return found + not_tried_after(status, len(messages) - len(found) - 1)
            self._counts.add("delivered")
            found.append(None)
        return found

    def _deliver(self, address: UUri, message: UMessage) -> UStatus | None:
        service = self._services.get(address.service_id)
        if service is None or address.instance_id:
            return UStatus(UCode.NOT_FOUND, f"no service is at {address}")
        try:
            with self._acting:
                if self._ingest is None:
                    return UStatus(UCode.UNAVAILABLE, "the dispatcher has stopped")
                self._say([])
                said = service.receive(message)
                self._changed()  # whoever is told that he is subscribed, is
                self._say(said)
        except PenstockError as error:
            return UStatus(UCode.UNAVAILABLE, str(error))
        self._worker.wake()  # there may be something to do earlier than thought
        return None

    def _say(self, messages: list[UMessage]) -> None:
        """Have messages stored.

        :raises PenstockError: they are not, and are kept in mind.
        """
        self._unsaid += messages
        if self._unsaid and self._ingest is not None:
            self._ingest(self._unsaid)
            self._counts.add("received", len(self._unsaid))
            self._unsaid = []

    # --- time -------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Do what is due; return when there is more (monotonic seconds), None: when asked.

        :raises PenstockError: something could not be stored.
        """
        with self._acting:
            if self._ingest is None:
                return None
            said = [message for it in self._services.values() for message in it.work()]
            if said:
                self._changed()
            self._say(said)
        dues = [due for it in self._services.values() if (due := it.next_due()) is not None]
        return min(dues, default=None)

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            wait = _LONGEST_WAIT
            try:
                due = self.step()
                if due is not None:
                    wait = min(max(due - self._clock.monotonic(), 0.0), _LONGEST_WAIT)
            except Exception:
                log.exception("a service could not do what was due")
                wait = _PAUSE
            worker.wait(wait)

    def stop(self) -> None:
        with self._acting:
            self._ingest = None
        self._worker.stop()

    def close(self) -> None:
        self.stop()
        for service in self._services.values():
            service.close()

    def statistics(self) -> Mapping[str, int]:
        return self._counts.snapshot()
