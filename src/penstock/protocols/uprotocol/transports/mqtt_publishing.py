"""How are packets sent to a broker, many under way at once, and what became of each?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client

from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.transports.mqtt_connection import SILENT, Connection
from penstock.protocols.uprotocol.transports.mqtt_window import Flight, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.uprotocol.transports.counts import Counts
    from penstock.protocols.uprotocol.transports.mqtt_broker import MqttBroker
    from penstock.protocols.uprotocol.transports.mqtt_packets import Packet

__all__ = ["Publishing"]


class Publishing:
    """Sends packets by a link's connection. Safe to share between threads.

    :param give_up: called when the broker did not answer in time; ends the connection.
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
        self._window = Window(broker.window, self._changed.notify_all)
        self._largest = broker.largest_packet

    def begin(self, *, most: int, largest: int) -> None:
        """Heed what the broker takes with this connection. Whoever calls this holds the lock."""
        self._window.size = min(self._broker.window, most)
        self._largest = min(self._broker.largest_packet, largest)

    def end(self) -> None:
        """Give up on all that are under way. Whoever calls this holds the lock."""
        self._window.lose_all()

    def publish(self, packets: Sequence[Packet]) -> list[UStatus]:
        """Publish packets in order; see `MqttLink.publish`."""
        flight = Flight(packets)
        sent = 0
        why: UStatus | None = None
        for packet in packets:
            why = self._why_not(packet, flight)
            if why is not None or flight.has_failed:
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
        if why is not None:
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
        """Wait for room in the window."""
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
                return connection.why_down
            if not has_room:
                return SILENT
            if not flight.has_failed:
                self._window.enter(flight)
        return None

    def _send(self, packet: Packet, flight: Flight, at: int) -> None:
        connection = self._connection
        number = connection.number
        info = connection.client.publish(
            packet.topic, packet.payload, qos=1, properties=packet.properties
        )
        with self._changed:
            if number != connection.number or not connection.is_up:
                flight.lose()  # with the connection the window began anew
            elif info.rc != MQTT_ERR_SUCCESS:
                self._window.leave(flight)
            else:
                self._window.sent(info.mid, flight, at)

    def answered(self, client: Client, mid: int, reason: int) -> None:
        """Take what the broker says to a packet."""
        with self._changed:
            if client is self._connection.client:
                self._window.answered(mid, reason)
