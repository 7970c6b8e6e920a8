"""How do entities of one process talk to each other, with or without a dispatcher between them?"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import PenstockError
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.transports.base import BaseTransport, resolved
from penstock.protocols.uprotocol.transports.interface import Counts, Leg, not_tried_after

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Ingest
    from penstock.protocols.uprotocol.transports.listeners import ListenerLimits
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["InProcessBus", "InProcessLeg", "InProcessTransport"]


class InProcessBus:
    """The bus that the entities of a process are connected to.

    Without a leg every message goes to all transports on the bus, including the sender's. With a
    leg every message goes to its dispatcher, and transports get only what that delivers. Listeners
    are called by the sending thread, one message at a time: messages sent by a listener are
    delivered after it returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports: tuple[InProcessTransport, ...] = ()
        self._leg: InProcessLeg | None = None
        self._turns = _Turns()

    def send(self, message: UMessage) -> None:
        """Send a message to all transports, or to the dispatcher.

        :raises UStatusError: UNAVAILABLE, the dispatcher could not store it.
        """
        leg = self._leg
        if leg is not None:
            leg.take(message)
            return
        for transport in self._transports:
            self._turns.take(transport, message)

    def deliver(self, address: UUri, message: UMessage) -> UStatus | None:
        """Deliver a message to the transports of one entity; return the outcome."""
        found = [it for it in self._transports if it.is_at(address)]
        if not found:
            return UStatus(UCode.UNAVAILABLE, f"nobody is at {address}")
        # A message without a listener stays with the dispatcher, whose state is persistent.
        outcomes = [transport.dispatch(message, keep=False) for transport in found]
        if any(outcome.status is None for outcome in outcomes):
            return None
        return outcomes[0].status

    def attach(self, what: InProcessTransport | InProcessLeg) -> None:
        """Connect a transport, or the one leg.

        :raises UStatusError: ALREADY_EXISTS, the bus has a leg already.
        """
        with self._lock:
            if isinstance(what, InProcessTransport):
                self._transports = (*self._transports, what)
            elif self._leg is not None and self._leg is not what:
                raise UStatusError(UCode.ALREADY_EXISTS, "the bus has a dispatcher already")
            else:
                self._leg = what

    def detach(self, what: InProcessTransport | InProcessLeg) -> None:
        """Disconnect a transport or the leg. Idempotent."""
        with self._lock:
            self._transports = tuple(it for it in self._transports if it is not what)
            if self._leg is what:
                self._leg = None


class _Turns(threading.local):
    """The messages that a thread has yet to deliver to listeners, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[InProcessTransport, UMessage]] = deque()
        self._is_running = False

    def take(self, transport: InProcessTransport, message: UMessage) -> None:
        self._waiting.append((transport, message))
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._waiting:
                to, what = self._waiting.popleft()
                to.dispatch(what)
        finally:
            self._is_running = False


class InProcessTransport(BaseTransport):
    """Connects entities to a bus of their process.

    :param entity: the entity whose messages a dispatcher delivers here; None: all of the authority.
    """

    def __init__(
        self,
        bus: InProcessBus,
        authority: str,
        *,
        entity: UUri | None = None,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(authority, limits=limits, clock=clock)
        self._bus = bus
        self._entity = None if entity is None else entity.resolved(authority).with_resource(0)
        self.dispatch = self._registry.dispatch
        bus.attach(self)

    def is_at(self, address: UUri) -> bool:
        """Tell whether this transport gets the messages delivered to an address."""
        if self._entity is None:
            return address.authority_name in ("", self.authority)
        return self._entity == address.resolved(self.authority).with_resource(0)

    def _send(self, message: UMessage) -> None:
        self._bus.send(message)

    def close(self) -> None:
        self._bus.detach(self)
        super().close()


class InProcessLeg(Leg):
    """Connects a dispatcher to a bus. It gets all messages sent on the bus."""

    scope = "entity"

    def __init__(self, name: str, bus: InProcessBus, authority: str = "") -> None:
        super().__init__(name)
        self.bus = bus
        self._authority = authority
        self._ingest: Ingest | None = None
        self._counts = Counts("received", "refused", "delivered", "failed")
        # Held during `ingest`, so that none runs after `stop` has returned.
        self._ingesting = threading.Condition()
        self._calls = 0

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        del authorities  # there is no other way off the bus: the dispatcher judges them all
        self._ingest = ingest
        self.bus.attach(self)

    def listen(self, topic: UUri) -> None:
        """Do nothing: all publishes are received anyway."""

    def unlisten(self, topic: UUri) -> None:
        """Do nothing: all publishes are received anyway."""

    def take(self, message: UMessage) -> None:
        """Ingest a message of the bus.

        :raises UStatusError: UNAVAILABLE, it could not be stored.
        """
        with self._ingesting:
            ingest = self._ingest
            if ingest is None:
                self._counts.add("refused")
                raise UStatusError(UCode.UNAVAILABLE, "the dispatcher has stopped")
            self._calls += 1
        try:
            ingest([resolved(message, self._authority) if self._authority else message])
        except (PenstockError, OSError) as error:
            self._counts.add("refused")
            raise UStatusError(
                UCode.UNAVAILABLE, f"the dispatcher did not store it: {error}"
            ) from error
        else:
            self._counts.add("received")
        finally:
            with self._ingesting:
                self._calls -= 1
                self._ingesting.notify_all()

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        found: list[UStatus | None] = []
        for message in messages:
            status = self.bus.deliver(address, message)
            if status is not None:
                self._counts.add("failed")
                return found + not_tried_after(status, len(messages) - len(found) - 1)
            found.append(None)
            self._counts.add("delivered")
        return found

    def stop(self) -> None:
        with self._ingesting:
            self._ingest = None
            self._ingesting.wait_for(lambda: not self._calls, 10.0)

    def close(self) -> None:
        self.stop()
        self.bus.detach(self)

    def statistics(self) -> Mapping[str, int]:
        return self._counts.snapshot()
