"""How do entities and dispatchers talk by zenoh? (spec uprotocol 8.1)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.protocols.uprotocol.codes import UMessageType
from penstock.protocols.uprotocol.filters import check_filter
from penstock.protocols.uprotocol.transports.base import BaseTransport, raise_unless_ok
from penstock.protocols.uprotocol.transports.counts import Counts
from penstock.protocols.uprotocol.transports.interface import NOT_TRIED, Leg
from penstock.protocols.uprotocol.transports.pumping import Pump
from penstock.protocols.uprotocol.transports.zenoh_link import ZenohLink
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.zenoh_wire import key_of_filter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.protocols.uprotocol.codes import UStatus
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Ingest, Unreadable
    from penstock.protocols.uprotocol.transports.listeners import ListenerLimits, Pattern

__all__ = ["ZenohLeg", "ZenohLink", "ZenohTransport"]


class ZenohTransport(BaseTransport):
    """Connects entities by zenoh. The link is closed with it."""

    def __init__(
        self,
        link: ZenohLink,
        *,
        must_be_heard: bool = False,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(link.authority, limits=limits, clock=clock)
        self.link = link
        self._must_be_heard = must_be_heard
        self._subscribers: dict[Pattern, Any] = {}
        self._pump: Pump[tuple[UMessage, Pattern]] = Pump(
            f"up-zenoh-{link.authority}", self._take, batch=64, size_of=lambda it: it[0].size
        )

    def _take(self, arrived: Sequence[tuple[UMessage, Pattern]]) -> None:
        # A message comes once for each subscriber that it matches.
        for message, pattern in arrived:
            self._registry.dispatch(message, (pattern,))

    def _send(self, message: UMessage) -> None:
        raise_unless_ok(self.link.put(message, must_be_heard=self._must_be_heard))

    def _subscribe(self, pattern: Pattern) -> None:
        key = key_of_filter(*pattern, self.authority)
        put = self._pump.put
        self._subscribers[pattern] = self.link.subscribe(key, lambda it: put((it, pattern)))

    def _unsubscribe(self, pattern: Pattern) -> None:
        self.link.unsubscribe(self._subscribers.pop(pattern))

    def close(self) -> None:
        if self._is_closed:
            return
        for subscriber in self._subscribers.values():
            self.link.unsubscribe(subscriber)
        self._subscribers.clear()
        self._pump.stop()
        super().close()
        self.link.close()

    def statistics(self) -> Mapping[str, int]:
        return {**super().statistics(), **self.link.counts.snapshot()}


class ZenohLeg(Leg):
    """Connects a dispatcher by zenoh. The link is closed with it.

    zenoh acknowledges nothing. So that a message is not given up to nobody, delivering it needs
    somebody who subscribes to it at that moment; and it counts as delivered `settle_after` seconds
    later, unless the link was lost meanwhile. A receiver that hangs is given up by zenoh after its
    lease, 10 seconds: whoever fears that sets more than that.
    """

    scope = "authority"

    def __init__(
        self,
        name: str,
        link: ZenohLink,
        *,
        must_be_heard: bool = True,
        settle_after: float = 0.25,
    ) -> None:
        super().__init__(name)
        self.settle_after = settle_after
        self.link = link
        self._must_be_heard = must_be_heard
        self._pump: Pump[UMessage | Unreadable] | None = None
        self._lock = threading.Lock()
        self._topics: dict[UUri, Any] = {}
        self._subscribers: list[Any] = []
        self._counts = Counts("received", "ingest_failures", "delivered", "failed")

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        counts, authority = self._counts, self.link.authority

        def take(messages: Sequence[UMessage | Unreadable]) -> None:
            self.hand_over(messages, ingest)
            counts.add("received", len(messages))

        with self._lock:
            if self._pump is not None:
                return
            self._pump = Pump(
                f"up-zenoh-{self.name}",
                take,
                on_failure=lambda: counts.add("ingest_failures"),
                size_of=lambda it: it.size,
            )
            for name in ["*"] if "*" in authorities else sorted(set(authorities)):
                key = key_of_filter(UUri.ANY, UUri.ANY.with_authority(name), authority)
                subscriber = self.link.subscribe(key, self._point_to_point, self._unreadable)
                self._subscribers.append(subscriber)
            for topic in self._topics:
                self._topics[topic] = self._subscribed(topic)

    def _point_to_point(self, message: UMessage) -> None:
        # The key of any sink is also that of none, which publishes have.
        if self._pump is not None and message.attributes.type != UMessageType.PUBLISH:
            self._pump.put(message)

    def _unreadable(self, what: Unreadable) -> None:
        if self._pump is not None and self.on_unreadable is not None:
            self._pump.put(what)

    def _subscribed(self, topic: UUri) -> Any:
        assert self._pump is not None
        key = key_of_filter(topic, None, self.link.authority)
        return self.link.subscribe(key, self._pump.put, self._unreadable)

    def listen(self, topic: UUri) -> None:
        check_filter(topic, None)
        with self._lock:
            if topic not in self._topics:
                self._topics[topic] = None if self._pump is None else self._subscribed(topic)

    def unlisten(self, topic: UUri) -> None:
        with self._lock:
            subscriber = self._topics.pop(topic, None)
        self.link.unsubscribe(subscriber)

    @property
    def is_up(self) -> bool:
        return self.link.is_connected

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        del address  # a message is put to the key of its own addresses
        found: list[UStatus | None] = []
        failed: set[tuple[UUri | None, UUri | None]] = set()
        for message in messages:
            # Where one is away, others may be there: only what is behind it has to wait.
            sink = message.attributes.sink
            between = message.attributes.source, sink and sink.with_resource(0)
            if between in failed:
                found.append(NOT_TRIED)
                continue
            status = self.link.put(message, must_be_heard=self._must_be_heard)
            found.append(status)
            if status is not None:
                self._counts.add("failed")
                failed.add(between)
                if not self.link.is_connected:
                    break
        self._counts.add("delivered", found.count(None))
        return found + [NOT_TRIED] * (len(messages) - len(found))

    @property
    def links_lost(self) -> int:
        return self.link.losses

    def stop(self) -> None:
        with self._lock:
            subscribers = [*self._subscribers, *self._topics.values()]
            self._subscribers.clear()
            self._topics.clear()
            pump = self._pump
        for subscriber in subscribers:
            self.link.unsubscribe(subscriber)
        if pump is not None:
            pump.stop()

    def close(self) -> None:
        self.stop()
        self.link.close()

    def statistics(self) -> Mapping[str, int]:
        return {**self._counts.snapshot(), **self.link.counts.snapshot()}
