"""How do entities and dispatchers talk by an MQTT 5 broker? (docs/specs/uprotocol.md 8.2)"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UStatus, UStatusError
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage
from penstock.protocols.uprotocol.mqtt_wire import (
    ANOTHERS,
    Packing,
    Topics,
    properties_in,
    readable_attributes,
    topic_in,
)
from penstock.protocols.uprotocol.transports.base import BaseTransport, raise_unless_ok
from penstock.protocols.uprotocol.transports.interface import (
    NOT_TRIED,
    Counts,
    Leg,
    Pump,
    Unreadable,
)
from penstock.protocols.uprotocol.transports.listeners import Acknowledging, ListenerLimits
from penstock.protocols.uprotocol.transports.mqtt_connection import MqttBroker
from penstock.protocols.uprotocol.transports.mqtt_link import Arrival, MqttLink, identifier
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from paho.mqtt.client import MQTTMessage

    from penstock.protocols.uprotocol.mqtt_wire import Packet
    from penstock.protocols.uprotocol.transports.interface import Ingest
    from penstock.protocols.uprotocol.transports.listeners import Pattern

__all__ = ["MqttBroker", "MqttLeg", "MqttTransport"]

#: How long (seconds) a slow listener may block the connection before it is closed; unacknowledged
#: messages are then redelivered.
_LONGEST_HOLD: Final = 2.0


class Acknowledgements:
    """Acknowledges packets in order of arrival. Thread-safe.

    A packet that no listener takes holds back those after it. When more than `most` are open, taken
    packets are acknowledged out of order: otherwise the broker would stop sending.

    :param acknowledge: called in order.
    :param most: number of open packets up to which the order is kept.
    """

    def __init__(self, acknowledge: Callable[[Sequence[Arrival]], None], most: int) -> None:
        self._acknowledge = acknowledge
        self._most = most
        self._lock = threading.Lock()
        self._connection = -1
        #: Whether each open packet is taken, by number, in order of arrival.
        self._open: dict[int, bool] = {}
        self._arrivals: dict[int, Arrival] = {}

    def came(self, arrival: Arrival) -> None:
        """Add a packet that arrived."""
        packet, connection = arrival
        if not packet.qos:
            return
        with self._lock:
            if connection != self._connection:  # packets of the earlier connection are redelivered
                self._open.clear()
                self._arrivals.clear()
                self._connection = connection
            self._open.pop(packet.mid, None)
            self._open[packet.mid] = False
            self._arrivals[packet.mid] = arrival

    def taken(self, arrivals: Collection[Arrival]) -> None:
        """Mark packets as taken, and acknowledge those whose turn it is."""
        with self._lock:
            for packet, connection in arrivals:
                if connection == self._connection and packet.mid in self._open:
                    self._open[packet.mid] = True
            done = []
            is_crowded = len(self._open) > self._most
            for number, is_taken in self._open.items():
                if is_taken:
                    done.append(number)
                elif not is_crowded:
                    break
            if done:
                for number in done:
                    del self._open[number]
                # Under the lock, to keep the order.
                self._acknowledge([self._arrivals.pop(number) for number in done])


class _Taken(NamedTuple):
    message: UMessage | Unreadable
    arrival: Arrival


class _Intake:
    """Decodes the messages of a broker, passes them on in batches, and acknowledges them.

    :param take: gets messages; returns those that were taken. The rest is acknowledged later.
    """

    def __init__(
        self,
        name: str,
        broker: MqttBroker,
        packing: Packing,
        take: Callable[[Sequence[_Taken]], Sequence[Arrival]],
        *,
        echo: bool = False,
        identify: bool = False,
        wants_unreadable: bool = False,
    ) -> None:
        self._wants_unreadable = wants_unreadable
        self._take = take
        self._packing = packing
        self._is_stopped = False
        self.counts = Counts("undecodable", "repeated", "ingest_failures")
        # Room for the unacknowledged packets of this connection and some earlier ones.
        self._pump: Pump[_Taken] = Pump(
            name,
            self._hand_over,
            capacity=4 * broker.receive_maximum,
            on_failure=lambda: self.counts.add("ingest_failures"),
            size_of=lambda it: it.message.size,
        )
        # Wait for slow listeners, but keep the connection alive.
        self._patience = min(_LONGEST_HOLD, broker.keepalive / 4)
        self.link = MqttLink(broker, self._arrived, echo=echo, identify=identify)
        self._acknowledgements = Acknowledgements(
            self.link.acknowledge, broker.receive_maximum // 2
        )

    def _arrived(self, arrival: Arrival) -> bool:
        if self._is_stopped:
            return True  # it stays unacknowledged, and comes again to whoever connects next
        self._acknowledgements.came(arrival)
        message: UMessage | Unreadable
        try:
            message = self._packing.unpack(arrival.packet)
        except InvalidMessage as error:
            self.counts.add("undecodable")
            if not self._wants_unreadable:
                self.acknowledge([arrival])
                return True
            message = _unreadable(self._packing, arrival.packet, error)
        if self._pump.put(_Taken(message, arrival), self._patience) or self._is_stopped:
            return True
        if not self.link.broker.is_lasting:
            self.acknowledge([arrival])  # it never comes again, and must not hold back the others
        return False

    def _hand_over(self, batch: Sequence[_Taken]) -> None:
        link = self.link
        current = [it for it in batch if link.is_current(it.arrival)]
        if current:
            self.acknowledge(self._take(current))
        self.counts.add("repeated", len(batch) - len(current))

    def acknowledge(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge packets to the broker."""
        self._acknowledgements.taken(arrivals)

    def stop(self) -> None:
        self._is_stopped = True
        self._pump.stop()

    def close(self) -> None:
        self.stop()
        self.link.close()

    def statistics(self) -> dict[str, int]:
        abandoned = 0 if self.link.broker.redelivers else self._pump.abandoned
        return {**self.counts.snapshot(), **self.link.statistics(), "abandoned": abandoned}


def _unreadable(packing: Packing, packet: MQTTMessage, error: InvalidMessage) -> Unreadable:
    """Describe a packet that is not a valid message."""
    plain, topic, payload = properties_in(packet), topic_in(packet), bytes(packet.payload)
    lines = [f"topic: {topic}", *(f"{key}: {value}" for key, value in plain.user_properties)]
    if plain.content_type is not None:
        lines.append(f"content type: {plain.content_type}")
    if plain.correlation_data is not None:
        lines.append(f"correlation data: {plain.correlation_data.hex()}")
    raw = "\n".join(lines).encode(errors="replace") + b"\n\n" + payload
    attributes = readable_attributes(plain)
    if attributes is not None:
        with suppress(InvalidMessage):
            attributes = packing.named_by(topic, attributes)
    message = None if attributes is None else UMessage.from_parts(attributes, payload)
    is_anothers = error.field == ANOTHERS
    if attributes is not None and not is_anothers:
        try:
            is_anothers = topic != packing.topic_of(attributes)
        except InvalidMessage:
            message = None  # nobody knows whose it is
    code = UCode.UNAUTHENTICATED if is_anothers else UCode.INVALID_ARGUMENT
    return Unreadable(raw, error.reason, code, message)


class MqttTransport(BaseTransport):
    """Connects entities by a broker.

    :param topics: `e2e` within a vehicle, `d2d` between devices, where a publish needs a sink.
    :param must_be_heard: whether sending to an entity without a subscriber is UNAVAILABLE.
    :param exact_ttl: also send the ttl in milliseconds, so that it arrives unchanged.
    """

    def __init__(
        self,
        authority: str,
        broker: MqttBroker,
        *,
        topics: Topics = "e2e",
        must_be_heard: bool = False,
        exact_ttl: bool = True,
        echo: bool = False,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        limits = limits or ListenerLimits()
        # Between devices messages for other entities of this authority come, too. They may not use
        # up the packets that the broker sends unacknowledged.
        most = max(1, min(limits.waiting, broker.receive_maximum) // 2)
        super().__init__(
            authority,
            limits=limits,
            clock=clock,
            acknowledging=Acknowledging(
                self._taken, self._is_void, most if topics == "d2d" else None
            ),
        )
        self._packing = Packing(authority, topics, exact_ttl=exact_ttl)
        self._must_be_heard = must_be_heard
        # Read by other threads without a lock: values are replaced, never changed.
        # Between devices several patterns have one filter.
        self._patterns: dict[str, frozenset[Pattern]] = {}
        # Two filters may have the same identifier.
        self._by_identifier: dict[int, frozenset[str]] = {}
        name = f"up-mqtt-{authority}"
        self._intake = _Intake(name, broker, self._packing, self._take, echo=echo, identify=True)
        self.link = self._intake.link
        self.link.start()

    def _take(self, arrived: Sequence[_Taken]) -> Sequence[Arrival]:
        # A broker sends a message once for each subscription, or once for all that match.
        taken = []
        for message, arrival in arrived:
            assert isinstance(message, UMessage)  # others are not asked for
            identifiers = tuple(arrival.identifiers)
            came_for = partial(self._patterns_of, identifiers) if identifiers else None
            if not self._registry.dispatch(message, token=arrival, came_for=came_for).is_kept:
                taken.append(arrival)
        return taken

    def _patterns_of(self, identifiers: Collection[int]) -> tuple[Collection[Pattern], bool]:
        """Return the patterns of subscriptions, and whether all of them are known.

        A resumed session has subscriptions of an earlier process, which may be registered again.
        """
        filters = [self._by_identifier.get(it, frozenset()) for it in identifiers]
        found = (self._patterns.get(name, frozenset()) for names in filters for name in names)
        return frozenset().union(*found), all(filters)

    def _taken(self, token: object) -> None:
        assert isinstance(token, Arrival)
        self._intake.acknowledge([token])

    def _is_void(self, token: object) -> bool:
        assert isinstance(token, Arrival)
        return not self.link.is_current(token)

    def _send(self, message: UMessage) -> None:
        packet = self._packing.pack(message, must_be_heard=self._must_be_heard)
        raise_unless_ok(self.link.await_connection(self.link.broker.connect_timeout))
        raise_unless_ok(self.link.publish([packet])[0])

    def _subscribe(self, pattern: Pattern) -> None:
        raise_unless_ok(self.link.await_connection(self.link.broker.connect_timeout))
        wanted = self._packing.filter_of(*pattern)
        patterns = self._patterns.get(wanted, frozenset())
        is_first = not patterns
        self._patterns[wanted] = patterns | {pattern}
        names = self._by_identifier.get(identifier(wanted), frozenset())
        self._by_identifier[identifier(wanted)] = names | {wanted}
        try:
            if is_first:
                raise_unless_ok(self.link.subscribe(wanted))
        except UStatusError:
            # The caller gets the error, and may retry.
            if self._forget(wanted, pattern):
                self.link.unsubscribe(wanted)
            raise

    def _unsubscribe(self, pattern: Pattern) -> None:
        wanted = self._packing.filter_of(*pattern)
        if self._forget(wanted, pattern):
            self.link.unsubscribe(wanted)

    def _forget(self, wanted: str, pattern: Pattern) -> bool:
        """Remove a pattern from a filter; tell whether it was the last one."""
        patterns = self._patterns[wanted] - {pattern}
        if patterns:
            self._patterns[wanted] = patterns
            return False
        del self._patterns[wanted]
        self._by_identifier[identifier(wanted)] -= {wanted}
        return True

    def close(self) -> None:
        self._registry.end()
        self._intake.close()
        super().close()

    def statistics(self) -> Mapping[str, int]:
        return {**super().statistics(), **self._intake.statistics()}


class MqttLeg(Leg):
    """Connects a dispatcher by a broker. A message is acknowledged when it is stored.

    With a `client_id` the broker keeps messages while the dispatcher is not connected. A PUBACK
    means that the broker has the message: its limits must exceed those of the dispatcher.

    :param authority: the authority to receive for; the first segment of topics between devices.
    """

    scope = "authority"

    def __init__(
        self,
        name: str,
        authority: str,
        broker: MqttBroker,
        *,
        topics: Topics = "e2e",
        must_be_heard: bool = True,
        exact_ttl: bool = True,
    ) -> None:
        super().__init__(name)
        self._broker = broker
        self._packing = Packing(authority, topics, exact_ttl=exact_ttl)
        self._must_be_heard = must_be_heard
        self._lock = threading.Lock()
        self._topics: set[UUri] = set()
        self._intake: _Intake | None = None
        self._counts = Counts("received", "delivered", "failed")

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        counts, packing = self._counts, self._packing

        def take(arrived: Sequence[_Taken]) -> Sequence[Arrival]:
            self.hand_over([it.message for it in arrived], ingest)
            counts.add("received", len(arrived))
            return [it.arrival for it in arrived]

        with self._lock:
            if self._intake is not None:
                return
            name = f"up-mqtt-{self.name}"
            wanted = self.on_unreadable is not None
            self._intake = _Intake(name, self._broker, packing, take, wants_unreadable=wanted)
            link = self._intake.link
            for authority in ["*"] if "*" in authorities else sorted(set(authorities)):
                link.subscribe(packing.filter_of(UUri.ANY, UUri.ANY.with_authority(authority)))
            if packing.topics == "e2e":
                for topic in self._topics:
                    link.subscribe(packing.filter_of(topic, None))
            link.start()

    @property
    def is_lasting(self) -> bool:
        return self._broker.redelivers

    @property
    def is_up(self) -> bool:
        return self._intake is not None and self._intake.link.is_up

    def await_connection(self, patience: float) -> UStatus | None:
        if self._intake is None:
            return UStatus(UCode.UNAVAILABLE, "the leg is not started")
        link = self._intake.link
        return link.await_connection(patience) or link.refusal

    def listen(self, topic: UUri) -> None:
        """Receive publishes of a topic, too; see `Leg.listen`.

        A subscription that the broker refuses is retried; `await_connection` reports it.
        """
        check_filter(topic, None)
        with self._lock:
            if topic in self._topics:
                return
            self._topics.add(topic)
            intake = self._intake
        # Between devices the filter of this authority includes publishes.
        if intake is None or self._packing.topics != "e2e":
            return
        intake.link.subscribe(self._packing.filter_of(topic, None))

    def unlisten(self, topic: UUri) -> None:
        with self._lock:
            if topic not in self._topics:
                return
            self._topics.discard(topic)
            intake = self._intake
        if intake is not None and self._packing.topics == "e2e":
            intake.link.unsubscribe(self._packing.filter_of(topic, None))

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        found: list[UStatus | None] = []
        packets, problem = self._packed(address, messages)
        if self._intake is None:
            problem = UStatus(UCode.UNAVAILABLE, "the leg is not started")
        elif packets:
            answers = self._intake.link.publish(packets)
            found = [None if answer.is_ok else answer for answer in answers]
        if problem is not None and len(found) < len(messages) and not any(found):
            found.append(problem)
        self._counts.add("delivered", found.count(None))
        self._counts.add("failed", len(found) - found.count(None))
        return found + [NOT_TRIED] * (len(messages) - len(found))

    def _packed(
        self, address: UUri, messages: Sequence[UMessage]
    ) -> tuple[list[Packet], UStatus | None]:
        """Create packets, up to the first message that cannot be encoded."""
        packets = []
        for message in messages:
            if self._packing.topics == "d2d" and message.attributes.sink is None:
                is_publish = message.attributes.type == UMessageType.PUBLISH
                sink = UUri.ANY.with_authority(address.authority_name) if is_publish else None
                message = message.with_attributes(sink=sink)  # noqa: PLW2901 - the form of this leg
            try:
                packets.append(self._packing.pack(message, must_be_heard=self._must_be_heard))
            except InvalidMessage as error:
                return packets, UStatus(UCode.INVALID_ARGUMENT, error.reason)
        return packets, None

    def stop(self) -> None:
        if self._intake is not None:
            self._intake.stop()

    def close(self) -> None:
        if self._intake is not None:
            self._intake.close()

    def statistics(self) -> Mapping[str, int]:
        more = {} if self._intake is None else self._intake.statistics()
        return {**self._counts.snapshot(), **more}
