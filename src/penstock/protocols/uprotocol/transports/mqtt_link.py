"""How is a broker kept connected, and what did it say to each packet?"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessage

from penstock.core.retry import Backoff
from penstock.protocols.reaching import why_unreachable
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.mqtt_wire import code_of_reason
from penstock.protocols.uprotocol.transports.counts import Counts
from penstock.protocols.uprotocol.transports.forking import Owner
from penstock.protocols.uprotocol.transports.mqtt_library import (
    connect,
    hang_up,
    make_client,
    subscribe,
)
from penstock.protocols.uprotocol.transports.mqtt_subscriptions import (
    Arrival,
    Subscriptions,
    identifier,
)
from penstock.protocols.uprotocol.transports.mqtt_window import Flight, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.protocols.uprotocol.transports.mqtt_broker import MqttBroker
    from penstock.protocols.uprotocol.transports.mqtt_packets import Packet

__all__ = ["MqttLink"]

log = logging.getLogger(__name__)

#: Between attempts to connect (8.2). Without jitter: the table is the specification's.
_BACKOFF: Final = Backoff(table=(0.5, 1, 2, 4, 10), jitter=0)
_FIRST_FAILURE: Final = 0x80
#: Whoever says good-bye waits this long (seconds) for it to be sent.
_GOODBYE: Final = 1.0
#: A filter that is never subscribed to.
_BARRIER: Final = "penstock/barrier"

_SILENT: Final = UStatus(UCode.UNAVAILABLE, "the broker does not acknowledge")


def _refused(reason: int) -> UStatus:
    return UStatus(
        code_of_reason(reason), f"the broker refuses a subscription: reason {reason:#04x}"
    )


class MqttLink:
    """A session with a broker, connected again whenever it breaks. Safe to share between threads.

    :param arrived: called by the link's thread, and must not wait for long; False: it was not
        taken.
    :param identify: have the broker say which subscriptions a packet came for.
    """

    def __init__(
        self,
        broker: MqttBroker,
        arrived: Callable[[Arrival], bool],
        *,
        echo: bool = False,
        identify: bool = False,
    ) -> None:
        self.broker = broker
        self._owner = Owner()
        self._arrived = arrived
        self._echo = echo
        self._identifies = identify
        self.counts = Counts(
            *("connections", "published", "not_published", "overflowed", "lost", "refused")
        )
        # All below is changed with this lock, which is never held while the library is called:
        # that has locks of its own, and calls back while it holds them.
        self._changed = threading.Condition()
        self._connection = 0
        self._is_up = False
        self._is_resumed = False
        self._window = Window(broker.window, self._changed.notify_all)
        self._largest = broker.largest_packet
        self._answers: dict[int, int | None] = {}
        self._subscriptions = Subscriptions()
        #: Subscriptions made with this connection that the broker has not answered for yet.
        self._unconfirmed: dict[int, str] = {}
        self._down = UStatus(UCode.UNAVAILABLE, "the broker is not connected yet")
        self._stopping = threading.Event()
        self._broken = threading.Event()
        self._context = broker.context()
        self._client = self._made()
        self._thread = threading.Thread(
            target=self._run, name=f"up-mqtt-{broker.client_id or broker.host}", daemon=True
        )

    def start(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    def _made(self) -> Client:
        client = make_client(self.broker, self._context)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_subscribe
        return client

    # --- connecting -----------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        rng = random.Random()  # noqa: S311 - no secret
        while not self._stopping.is_set():
            before = self.counts["connections"]
            try:
                self._connect()
                self._await_end()
            except (OSError, ValueError) as error:
                why = why_unreachable(error, self.broker.host, self.broker.port)
                self._lose(UStatus(UCode.UNAVAILABLE, f"the broker is away: {why}"), is_news=True)
                self._broken.set()
            finally:
                self._hang_up()
            attempt = 1 if self.counts["connections"] > before else attempt + 1
            self._stopping.wait(_BACKOFF.delay(attempt, rng))

    def _connect(self) -> None:
        self._broken.clear()
        connect(self._client, self.broker, is_first=self._connection == 0)

    def _await_end(self) -> None:
        """Return when the connection is to end, or has ended."""

        def is_over() -> bool:
            return self._broken.is_set() or self._stopping.is_set()

        with self._changed:
            self._changed.wait_for(lambda: self._is_up or is_over(), self.broker.connect_timeout)
            if not self._is_up and not is_over():
                raise TimeoutError
        due: float | None = None

        def is_to_look() -> bool:
            return is_over() or self._subscriptions.next_due != due

        while not is_over():
            self._subscribe_again()
            with self._changed:
                due = self._subscriptions.next_due
                asleep = None if due is None else max(0.0, due - time.monotonic())
                self._changed.wait_for(is_to_look, asleep)

    def _subscribe_again(self) -> None:
        """Ask again for what the broker refused, where it is time to."""
        with self._changed:
            due = self._subscriptions.due() if self._is_up else []
        for topic_filter in due:
            self._ask_to_subscribe(topic_filter)

    def _hang_up(self) -> None:
        """End the connection and the library's thread, whatever state they are in."""
        self._client.disconnect()
        self._broken.wait(_GOODBYE)  # set already, unless this is our own good-bye
        hang_up(self._client)
        # Another one for each connection: it keeps sockets open that it needs no more.
        self._client = self._made()

    def _on_connect(self, client: Client, _: Any, flags: Any, reason: Any, properties: Any) -> None:
        if client is not self._client:
            return
        if reason.is_failure:
            self._lose(UStatus(code_of_reason(reason.value), f"the broker refuses: {reason}"))
            self._break()
            return
        with self._changed:
            missing, unwanted = self._subscriptions.resumed(is_kept=flags.session_present)
        if unwanted:
            client.unsubscribe(unwanted)
        self._identifies &= getattr(properties, "SubscriptionIdentifierAvailable", 1) != 0
        asked = {mid: it for it in missing if (mid := self._subscribe(client, it)[1]) is not None}
        broker = self.broker
        with self._changed:
            self._unconfirmed = asked
            self._answers.clear()  # the numbers begin anew
            self._connection += 1
            self._is_resumed = flags.session_present
            self._window.size = min(broker.window, getattr(properties, "ReceiveMaximum", 65535))
            self._largest = min(
                broker.largest_packet, getattr(properties, "MaximumPacketSize", 1 << 28)
            )
            self._is_up = True
            self._changed.notify_all()
        self.counts.add("connections")

    def _on_disconnect(self, client: Client, _: Any, flags: Any, reason: Any, more: Any) -> None:
        del flags, more
        if client is not self._client:
            return
        self._lose(UStatus(UCode.UNAVAILABLE, f"the broker was disconnected: {reason}"))
        self._break()

    def _break(self) -> None:
        """Have the link's thread connect anew."""
        self._broken.set()
        with self._changed:
            self._changed.notify_all()

    def _lose(self, status: UStatus, *, is_news: bool = False) -> None:
        """Tell all who wait that nobody will answer; `is_news`: it is not the end of a refusal."""
        with self._changed:
            # That the broker refused us tells more than that it then closed the connection.
            was_refused = not self._is_up and self._down.code != UCode.UNAVAILABLE
            if is_news or not was_refused or status.code != UCode.UNAVAILABLE:
                self._down = status
            self._is_up = False
            self._window.lose_all()
            self._changed.notify_all()

    @property
    def is_up(self) -> bool:
        """Whether the broker is connected now."""
        return self._is_up

    def is_current(self, arrival: Arrival) -> bool:
        """Tell whether a packet does not come again by a later connection than its own."""
        with self._changed:
            return (
                arrival.connection == self._connection
                or not self._is_resumed
                or not arrival.packet.qos  # which is sent but once
            )

    def await_connection(self, patience: float) -> UStatus | None:
        """Return None when the broker is connected and knows what we subscribe to.

        :returns: after that time, why it is not.
        """

        def is_ready() -> bool:
            return self._is_up and not self._unconfirmed

        with self._changed:
            self._changed.wait_for(lambda: is_ready() or self._stopping.is_set(), patience)
            return None if self._is_up else self._down

    # --- receiving ------------------------------------------------------------------------------

    def _subscribe(self, client: Client, topic_filter: str) -> tuple[Any, int | None]:
        number = identifier(topic_filter) if self._identifies else None
        return subscribe(client, topic_filter, echo=self._echo, identifier=number)

    def subscribe(self, topic_filter: str) -> UStatus | None:
        """Receive what matches, from now on and after every connection; say if that failed.

        Without a connection it is done when there is one. What the broker refuses is asked for
        again, now and then, until `unsubscribe`.
        """
        if not self._owner.is_here:
            return self._owner.why_not
        with self._changed:
            self._subscriptions.add(topic_filter)
            if not self._is_up:
                return None
        return self._ask_to_subscribe(topic_filter)

    def _ask_to_subscribe(self, topic_filter: str) -> UStatus | None:
        connection = self._connection
        status = self._ask(lambda: self._subscribe(self._client, topic_filter))
        with self._changed:
            if not self._is_up or connection != self._connection:
                return None  # it follows, or did, with another connection
            if status is None:
                self._subscriptions.confirm(topic_filter)
            else:
                self._subscriptions.refuse(topic_filter, status)
            self._changed.notify_all()
        return status

    @property
    def refusal(self) -> UStatus | None:
        """Why something that is subscribed to does not come, though the broker is connected."""
        with self._changed:
            return self._subscriptions.refusal

    def statistics(self) -> dict[str, int]:
        """Return the counts, and how many subscriptions the broker refuses now."""
        return {**self.counts.snapshot(), "not_subscribed": self._subscriptions.refused}

    def unsubscribe(self, topic_filter: str) -> None:
        """Receive what matches no more."""
        if not self._owner.is_here:
            return
        with self._changed:
            self._subscriptions.remove(topic_filter)
            if not self._is_up:
                return  # it follows with the next connection
        self._ask(lambda: self._client.unsubscribe(topic_filter))
        with self._changed:
            if self._is_up:
                self._subscriptions.confirm_removal(topic_filter)

    def _ask(
        self, ask: Callable[[], tuple[Any, int | None]], patience: float | None = None
    ) -> UStatus | None:
        rc, mid = ask()
        if rc != MQTT_ERR_SUCCESS or mid is None:
            return None  # disconnected: it follows with the next connection
        with self._changed:
            self._changed.wait_for(
                lambda: mid in self._answers or not self._is_up or self._stopping.is_set(),
                self.broker.ack_timeout if patience is None else patience,
            )
            reason = self._answers.pop(mid, None)
            if reason is None:
                return _SILENT if self._is_up else None
        if reason < _FIRST_FAILURE:
            return None
        return _refused(reason)

    def _on_subscribe(self, client: Client, _: Any, mid: int, reasons: Any, more: Any) -> None:
        del client, more
        worst = max((reason.value for reason in reasons), default=0)
        if worst >= _FIRST_FAILURE:
            self.counts.add("refused")
        with self._changed:
            if len(self._answers) > 1024:  # noqa: PLR2004 - of those that nobody waits for
                self._answers.clear()
            self._answers[mid] = worst
            topic_filter = self._unconfirmed.pop(mid, None)
            if topic_filter is not None and worst >= _FIRST_FAILURE:
                self._subscriptions.refuse(topic_filter, _refused(worst))
            self._changed.notify_all()

    def _on_message(self, client: Client, _: Any, packet: MQTTMessage) -> None:
        del client
        if not self._arrived(Arrival(packet, self._connection)):
            self.counts.add("overflowed")
            if packet.qos:  # nobody acknowledges it, so it comes again with the next connection
                self._break()
            else:
                self.counts.add("lost")

    def acknowledge(self, arrivals: Iterable[Arrival]) -> None:
        """Tell the broker that these are taken. What came by an earlier connection, it knows."""
        with self._changed:
            client = self._client
            current = self._connection if self._is_up else None
        for packet, connection in arrivals:
            if packet.qos and connection == current:
                client.ack(packet.mid, packet.qos)

    # --- sending --------------------------------------------------------------------------------

    def publish(self, packets: Sequence[Packet]) -> list[UStatus]:
        """Publish packets in order, several under way at once; stop after a failure.

        :returns: what became of each; shorter than `packets` if some were not tried.
        """
        forked = self._owner.why_not
        if forked is not None:
            return [forked]
        flight = Flight(packets)
        sent = 0
        why: UStatus | None = None
        for packet in packets:
            why = self._why_not(packet, flight)
            if why is not None or flight.has_failed:
                break
            self._publish(packet, flight, sent)
            sent += 1
            if self._window.goes_alone(packet) and not self._await_answers(flight):
                break
        if not self._await_answers(flight, 0 if why is _SILENT else None):
            self._lose(_SILENT)
            self._break()
        unanswered = UStatus(UCode.UNAVAILABLE, f"not acknowledged: {self._down.message}")
        found = [answer or unanswered for answer in flight.answers[:sent]]
        if why is not None:
            found.append(why)
        published = sum(answer.is_ok for answer in found)
        self.counts.add("published", published)
        self.counts.add("not_published", len(packets) - published)
        return found

    def _await_answers(self, flight: Flight, patience: float | None = None) -> bool:
        if flight.is_late:
            return False
        patience = self.broker.ack_timeout if patience is None else patience
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
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._window.has_room or not self._is_up or flight.has_failed,
                self.broker.ack_timeout,
            )
            if not self._is_up:
                return self._down
            if not has_room:
                return _SILENT
            if not flight.has_failed:
                self._window.enter(flight)
        return None

    def _publish(self, packet: Packet, flight: Flight, at: int) -> None:
        connection = self._connection
        info = self._client.publish(
            packet.topic, packet.payload, qos=1, properties=packet.properties
        )
        with self._changed:
            if connection != self._connection or not self._is_up:
                flight.lose()  # with the connection the window began anew
            elif info.rc != MQTT_ERR_SUCCESS:
                self._window.leave(flight)
            else:
                self._window.sent(info.mid, flight, at)

    def _on_publish(self, client: Client, _: Any, mid: int, reason: Any, more: Any) -> None:
        del more
        with self._changed:
            if client is self._client:
                self._window.answered(mid, reason.value)

    # --- closing --------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect. A lasting session goes on without us."""
        if not self._owner.is_here:
            return
        if self._is_up and not self._stopping.is_set():
            # When this is answered, the broker has read all acknowledgements before it. Otherwise
            # whoever connects next may be there before they are, and get those messages again.
            self._ask(lambda: self._client.unsubscribe(_BARRIER), _GOODBYE)
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._lose(UStatus(UCode.UNAVAILABLE, "the transport is closed"))
