"""How are packets sent to a broker, many in flight at once, and what did it answer to each?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client

from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.mqtt_wire import REFUSED, code_of_reason
from penstock.protocols.uprotocol.transports.mqtt_connection import SILENT, Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paho.mqtt.properties import Properties

    from penstock.protocols.uprotocol.mqtt_wire import Packet
    from penstock.protocols.uprotocol.transports.interface import Counts
    from penstock.protocols.uprotocol.transports.mqtt_connection import MqttBroker

__all__ = ["Flight", "Publisher", "SendWindow"]

_NOBODY_LISTENS: Final = 0x10
#: Topics remembered as having a subscriber, at most.
_MOST_HEARD: Final = 4096
#: No more packets are sent, since one before them failed.
_AFTER_FAILURE: Final = UStatus(UCode.ABORTED, "one before it failed")


class Flight:
    """The packets of one call of `publish`."""

    def __init__(self, packets: Sequence[Packet]) -> None:
        self.packets = packets
        #: The broker's answer to each packet; None: no answer.
        self.answers: list[UStatus | None] = [None] * len(packets)
        #: Number of packets in flight.
        self.open = 0
        #: Whether to send no more packets.
        self.has_failed = False
        #: Whether the broker did not answer in time.
        self.is_late = False

    def lose(self) -> None:
        """Count a packet that will not be answered."""
        self.has_failed = True
        self.open -= 1

    def answered(self, at: int, reason: int) -> None:
        """Set the broker's answer to a packet."""
        if reason == _NOBODY_LISTENS and self.packets[at].must_be_heard:
            answer = UStatus(UCode.UNAVAILABLE, "nobody subscribes to it")
        else:
            code = code_of_reason(reason)
            refused = code != UCode.OK
            answer = UStatus(code, f"{REFUSED} {reason:#04x}" if refused else "")
        self.answers[at] = answer
        self.has_failed |= not answer.is_ok
        self.open -= 1


class SendWindow:
    """All packets in flight, up to `size`. The caller holds the lock of the link.

    :param wake: called to wake waiting threads.
    """

    def __init__(self, size: int, wake: Callable[[], None]) -> None:
        self.size = size
        self._wake = wake
        self._open = 0
        self._sent: dict[int, tuple[Flight, int]] = {}
        self._early: dict[int, int] = {}
        self._heard: set[str] = set()

    def goes_alone(self, packet: Packet) -> bool:
        """Tell whether no packet may follow this one until it is answered.

        That is so if it needs a subscriber, and its topic is not known to have one: a client that
        subscribes just after it would get the following packets, but not this one.
        """
        return packet.must_be_heard and packet.topic not in self._heard

    @property
    def has_room(self) -> bool:
        return self._open < self.size

    def enter(self, flight: Flight) -> None:
        """Count a packet about to be sent."""
        self._open += 1
        flight.open += 1

    def leave(self, flight: Flight) -> None:
        """Uncount a packet that could not be sent."""
        self._open -= 1
        flight.lose()

    def sent(self, mid: int, flight: Flight, at: int) -> None:
        """Note the number of a sent packet."""
        self._sent[mid] = flight, at
        early = self._early.pop(mid, None)
        if early is not None:
            self.answered(mid, early)

    def answered(self, mid: int, reason: int) -> None:
        """Process an answer of the broker, which may arrive before `sent` is called."""
        found = self._sent.pop(mid, None)
        if found is None:
            self._early[mid] = reason
            return
        flight, at = found
        flight.answered(at, reason)
        self._open -= 1
        if flight.has_failed:
            self._heard.clear()
        elif flight.packets[at].must_be_heard:
            if len(self._heard) >= _MOST_HEARD:
                self._heard.clear()
            self._heard.add(flight.packets[at].topic)
        # Wake rarely, so that a waiting thread finds room for many packets.
        if not flight.open or self._open <= self.size // 2 or flight.has_failed:
            self._wake()

    def lose_all(self) -> None:
        """Give up all packets in flight."""
        for flight, _ in self._sent.values():
            flight.lose()
        self._sent.clear()
        self._early.clear()
        self._heard.clear()
        self._open = 0


class Publisher:
    """Sends packets by a link's connection. Thread-safe.

    :param give_up: called when the broker does not answer in time; closes the connection.
    """

    def __init__(
        self,
        broker: MqttBroker,
        connection: Connection,
        counts: Counts,
        give_up: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._connection = connection
        self._changed = connection.changed
        self._counts = counts
        self._give_up = give_up
        self._window = SendWindow(broker.window, self._changed.notify_all)
        self._largest = broker.largest_packet

    def begin(self, *, most: int, largest: int) -> None:
        """Apply the broker's limits for this connection. The caller holds the lock."""
        self._window.size = min(self._broker.window, most)
        self._largest = min(self._broker.largest_packet, largest)

    def end(self) -> None:
        """Give up all packets in flight. The caller holds the lock."""
        self._window.lose_all()

    def publish(self, packets: Sequence[Packet]) -> list[UStatus]:
        """Publish packets in order; see `MqttLink.publish`."""
        flight = Flight(packets)
        sent = 0
        why: UStatus | None = None
        for packet in packets:
            why = self._why_not(packet, flight)
            if why is not None:
                break
            self._send(packet, flight, sent)
            sent += 1
            if self._window.goes_alone(packet) and not self._await_answers(flight):
                break
        if not self._await_answers(flight, 0 if why is SILENT else None):
            self._give_up()
        down = self._connection.why_down.message
        unanswered = UStatus(UCode.UNAVAILABLE, f"not acknowledged: {down}")
        found = [answer or unanswered for answer in flight.answers[:sent]]
        if why is not None and why is not _AFTER_FAILURE:
            found.append(why)
        published = sum(answer.is_ok for answer in found)
        self._counts.add("published", published)
        self._counts.add("not_published", len(packets) - published)
        return found

    def _await_answers(self, flight: Flight, patience: float | None = None) -> bool:
        if flight.is_late:
            return False
        patience = self._broker.ack_timeout if patience is None else patience
        with self._changed:
            flight.is_late = not self._changed.wait_for(lambda: not flight.open, patience)
        return not flight.is_late

    def _why_not(self, packet: Packet, flight: Flight) -> UStatus | None:
        """Wait for room in the window; return why there is none, or None."""
        if packet.size > self._largest:
            return UStatus(
                UCode.RESOURCE_EXHAUSTED,
                f"about {packet.size:,} bytes; the broker takes {self._largest:,}",
            )
        connection = self._connection
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._window.has_room or not connection.is_up or flight.has_failed,
                self._broker.ack_timeout,
            )
            if not connection.is_up:
                # Whatever its reason is, it says nothing about the message.
                return UStatus(UCode.UNAVAILABLE, connection.why_down.message)
            if not has_room:
                return SILENT
            if flight.has_failed:
                return _AFTER_FAILURE
            # From here on it is sent, whatever is heard meanwhile: its place waits for its answer.
            self._window.enter(flight)
        return None

    def _send(self, packet: Packet, flight: Flight, at: int) -> None:
        connection = self._connection
        number = connection.number
        properties = cast("Properties", packet.properties)  # it has what the library asks for
        info = connection.client.publish(packet.topic, packet.payload, qos=1, properties=properties)
        with self._changed:
            if number != connection.number or not connection.is_up:
                flight.lose()  # with the connection the window began anew
            elif info.rc != MQTT_ERR_SUCCESS:
                self._window.leave(flight)
            else:
                self._window.sent(info.mid, flight, at)

    def answered(self, client: Client, mid: int, reason: int) -> None:
        """Process the broker's answer to a packet."""
        with self._changed:
            if client is self._connection.client:
                self._window.answered(mid, reason)
