"""How is a broker kept connected, and what is subscribed to with every connection?"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessage

from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.mqtt_wire import code_of_reason
from penstock.protocols.uprotocol.transports.interface import Counts, Owner
from penstock.protocols.uprotocol.transports.mqtt_connection import (
    SILENT,
    Connection,
    connect,
    hang_up,
    make_client,
    subscribe,
)
from penstock.protocols.uprotocol.transports.mqtt_publisher import Publisher as Publishing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from penstock.protocols.uprotocol.mqtt_wire import Packet
    from penstock.protocols.uprotocol.transports.mqtt_connection import MqttBroker

__all__ = ["Arrival", "MqttLink", "Subscriptions", "identifier"]

log = logging.getLogger(__name__)

#: MQTT 5, 3.8.2.1.2: the largest subscription identifier; they start at 1.
_IDENTIFIERS: Final = 268_435_455
#: Pauses between attempts of a refused subscription: it may be allowed later.
_RESUBSCRIBE: Final = Backoff(initial=1.0, maximum=60.0)
#: Pauses between attempts to connect (docs/specs/uprotocol.md 8.2), without jitter as specified.
_BACKOFF: Final = Backoff(table=(0.5, 1, 2, 4, 10), jitter=0)
_FIRST_FAILURE: Final = 0x80
#: Timeout of sending DISCONNECT (seconds).
_GOODBYE: Final = 1.0
#: A filter that is never subscribed to.
_BARRIER: Final = "penstock/barrier"
#: The connection ended before the broker answered, or before it was asked.
_UNANSWERED: Final = UStatus(UCode.UNAVAILABLE, "the connection ended")


def identifier(topic_filter: str) -> int:
    """Return the identifier of a subscription, the same in every process."""
    return zlib.crc32(topic_filter.encode()) % _IDENTIFIERS + 1


class Arrival(NamedTuple):
    """A received packet, and the number of its connection."""

    packet: MQTTMessage
    connection: int

    @property
    def identifiers(self) -> Collection[int]:
        """The identifiers of its subscriptions; empty if the broker does not send them."""
        found = getattr(self.packet.properties, "SubscriptionIdentifier", ())
        return (found,) if isinstance(found, int) else found


@dataclass(slots=True)
class _Refusal:
    status: UStatus
    attempts: int
    #: When to retry (monotonic seconds).
    due: float


class Subscriptions:
    """The topic filters of a session. The caller holds the lock of the link."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._wanted: set[str] = set()
        #: The filters that the session is known to have, wanted or not.
        self._there: set[str] = set()
        #: The filters that `changed` gave out, and that the broker has not answered yet.
        self._asked: set[str] = set()
        #: Wanted filters that were refused.
        self._refused: dict[str, _Refusal] = {}

    def add(self, topic_filter: str) -> None:
        """Add a wanted filter."""
        self._wanted.add(topic_filter)

    def confirm(self, topic_filter: str) -> None:
        """Note that the session has a filter."""
        self._there.add(topic_filter)
        self._refused.pop(topic_filter, None)

    def refuse(self, topic_filter: str, status: UStatus) -> None:
        """Note that the broker refused a filter; it is retried later."""
        self._there.discard(topic_filter)
        if topic_filter not in self._wanted:
            return
        before = self._refused.get(topic_filter)
        if before is None:
            log.warning("%s: %s; it is asked again", topic_filter, status.message)
        attempts = 1 if before is None else before.attempts + 1
        due = self._now() + _RESUBSCRIBE.delay(attempts, self._rng)
        self._refused[topic_filter] = _Refusal(status, attempts, due)

    @property
    def refused(self) -> int:
        """Number of wanted filters that were refused."""
        return len(self._refused)

    @property
    def refusal(self) -> UStatus | None:
        """Why the first of those was refused."""
        return next((it.status for it in self._refused.values()), None)

    @property
    def next_due(self) -> float | None:
        """When the next refused filter is retried (monotonic seconds), or None."""
        return min((it.due for it in self._refused.values()), default=None)

    def due(self) -> list[str]:
        """Return the refused filters to retry now."""
        now = self._now()
        return [name for name, it in self._refused.items() if it.due <= now]

    def remove(self, topic_filter: str) -> None:
        """Remove a wanted filter."""
        self._wanted.discard(topic_filter)
        self._refused.pop(topic_filter, None)

    def confirm_removal(self, topic_filter: str) -> None:
        """Note that the session no longer has a filter."""
        self._there.discard(topic_filter)

    def answered(self, topic_filter: str) -> None:
        """Note that the broker answered what `changed` gave out."""
        self._asked.discard(topic_filter)

    def resumed(self, *, is_kept: bool) -> tuple[list[str], list[str]]:
        """Return the filters to subscribe and to unsubscribe with a new connection.

        What the broker has not answered is asked again: it may never have come there.

        :param is_kept: whether the broker resumed the session.
        """
        if is_kept:
            self._there = self._there - self._asked | (self._asked - self._wanted)
        else:
            self._there.clear()
        self._asked.clear()
        self._refused.clear()  # all of them are asked for
        return self.changed()

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the filters to subscribe and to unsubscribe, and mark them as in progress."""
        missing = sorted(self._wanted - self._there - self._refused.keys())
        unwanted = sorted(self._there - self._wanted)
        self._asked.update(missing, unwanted)
        self._there = self._wanted - self._refused.keys()
        return missing, unwanted


def _refused(reason: int) -> UStatus:
    return UStatus(
        code_of_reason(reason), f"the broker refuses a subscription: reason {reason:#04x}"
    )


class MqttLink:
    """A session with a broker that reconnects automatically. Thread-safe.

    :param arrived: called by the link's thread, and must not block for long; returns False if it
        did not take the packet.
    :param identify: request subscription identifiers from the broker.
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
        self._stopping = threading.Event()
        self._broken = threading.Event()
        self._context = broker.context()
        self._connection = Connection(self._made())
        self._publishing = Publishing(
            broker, self._connection, self.counts, lambda: self._give_up(SILENT)
        )
        # This lock guards everything below.
        self._changed = self._connection.changed
        self._answers: dict[int, int | None] = {}
        self._subscriptions = Subscriptions()
        #: What this connection began with, and the broker has not answered yet.
        self._unconfirmed: dict[int, str] = {}
        name = f"up-mqtt-{broker.client_id or broker.host}"
        self._worker = Worker(name, self._run, log=log, restart=True, backoff=_BACKOFF)

    def start(self) -> None:
        """Connect, in the background."""
        self._worker.start()

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

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
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
            if self.counts["connections"] > before:
                worker.note_success()
            worker.back_off()

    def _connect(self) -> None:
        self._broken.clear()
        connect(self._connection.client, self.broker, is_first=self._connection.number == 0)

    def _await_end(self) -> None:
        """Wait until the connection ends, or is to be closed."""

        def is_over() -> bool:
            return self._broken.is_set() or self._stopping.is_set()

        with self._changed:
            self._changed.wait_for(lambda: self.is_up or is_over(), self.broker.connect_timeout)
            if not self.is_up and not is_over():
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
        """Retry refused subscriptions that are due."""
        with self._changed:
            due = self._subscriptions.due() if self.is_up else []
        for topic_filter in due:
            self._ask_to_subscribe(topic_filter)

    def _hang_up(self) -> None:
        """Close the connection and end the library's thread, in any state."""
        self._connection.client.disconnect()
        self._broken.wait(_GOODBYE)  # set already, unless this is our own good-bye
        hang_up(self._connection.client)
        # A new client for each connection: an old one leaks sockets.
        self._connection.client = self._made()

    def _on_connect(self, client: Client, _: Any, flags: Any, reason: Any, properties: Any) -> None:
        if client is not self._connection.client:
            return
        if reason.is_failure:
            self._give_up(UStatus(code_of_reason(reason.value), f"the broker refuses: {reason}"))
            return
        with self._changed:
            missing, unwanted = self._subscriptions.resumed(is_kept=flags.session_present)
            self._unconfirmed.clear()
        self._identifies &= getattr(properties, "SubscriptionIdentifierAvailable", 1) != 0
        self._tell_changes(client, missing, unwanted)
        with self._changed:
            self._answers.clear()  # the numbers begin anew
            self._publishing.begin(
                most=getattr(properties, "ReceiveMaximum", 65535),
                largest=getattr(properties, "MaximumPacketSize", 1 << 28),
            )
            self._connection.begin(is_resumed=flags.session_present)
            # Calls in between saw no connection, and left their changes to this one.
            missing, unwanted = self._subscriptions.changed()
        self._tell_changes(client, missing, unwanted)
        self.counts.add("connections")

    def _tell_changes(self, client: Client, missing: list[str], unwanted: list[str]) -> None:
        """Send subscribe and unsubscribe packets; the answers arrive later on this thread."""
        asked = {client.unsubscribe(it)[1]: it for it in unwanted}
        asked |= {self._subscribe(client, it)[1]: it for it in missing}
        with self._changed:
            # Without a number it was not sent.
            self._unconfirmed.update((mid, it) for mid, it in asked.items() if mid is not None)

    def _on_disconnect(self, client: Client, _: Any, flags: Any, reason: Any, more: Any) -> None:
        del flags, more
        if client is not self._connection.client:
            return
        self._give_up(UStatus(UCode.UNAVAILABLE, f"the broker was disconnected: {reason}"))

    def _break(self) -> None:
        """Make the link's thread reconnect."""
        self._broken.set()
        with self._changed:
            self._changed.notify_all()

    def _lose(self, status: UStatus, *, is_news: bool = False) -> None:
        """Fail all pending operations; `is_news`: not the disconnect after a refusal."""
        with self._changed:
            self._publishing.end()
            self._connection.end(status, is_news=is_news)

    def _give_up(self, status: UStatus) -> None:
        """Close the connection with a reason."""
        self._lose(status)
        self._break()

    @property
    def is_up(self) -> bool:
        """Whether the broker is connected now."""
        return self._connection.is_up

    def is_current(self, arrival: Arrival) -> bool:
        """Tell whether the broker will not redeliver a packet by a later connection."""
        with self._changed:
            return (
                arrival.connection == self._connection.number
                or arrival.connection < self._connection.session_began
                or not arrival.packet.qos  # QoS 0 is not redelivered
            )

    def await_connection(self, patience: float) -> UStatus | None:
        """Wait until the broker is connected and has confirmed our subscriptions.

        :returns: None, or after the timeout why it is not connected.
        """

        def is_ready() -> bool:
            return self.is_up and not self._unconfirmed

        with self._changed:
            self._changed.wait_for(lambda: is_ready() or self._stopping.is_set(), patience)
            return None if self.is_up else self._connection.why_down

    # --- receiving ------------------------------------------------------------------------------

    def _subscribe(self, client: Client, topic_filter: str) -> tuple[Any, int | None]:
        number = identifier(topic_filter) if self._identifies else None
        return subscribe(client, topic_filter, echo=self._echo, identifier=number)

    def subscribe(self, topic_filter: str) -> UStatus | None:
        """Subscribe to a filter, now and after every reconnect; return an error, or None.

        Without a connection the filter is subscribed when there is one. A refused subscription is
        retried until `unsubscribe`.
        """
        if not self._owner.is_here:
            return self._owner.why_not
        with self._changed:
            self._subscriptions.add(topic_filter)
            if not self.is_up:
                return None
        return self._ask_to_subscribe(topic_filter)

    def _ask_to_subscribe(self, topic_filter: str) -> UStatus | None:
        number = self._connection.number
        status = self._ask(lambda: self._subscribe(self._connection.client, topic_filter))
        with self._changed:
            is_current = self.is_up and number == self._connection.number
            if status is _UNANSWERED or not is_current:
                return None  # it follows, or did, with another connection
            if status is None:
                self._subscriptions.confirm(topic_filter)
            else:
                self._subscriptions.refuse(topic_filter, status)
            self._changed.notify_all()
        return status

    @property
    def refusal(self) -> UStatus | None:
        """Why the connected broker refused a subscription, or None."""
        with self._changed:
            return self._subscriptions.refusal

    def statistics(self) -> dict[str, int]:
        """Return the counters, and the number of refused subscriptions."""
        return {**self.counts.snapshot(), "not_subscribed": self._subscriptions.refused}

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe from a filter."""
        if not self._owner.is_here:
            return
        with self._changed:
            self._subscriptions.remove(topic_filter)
            if not self.is_up:
                return  # it follows with the next connection
        status = self._ask(lambda: self._connection.client.unsubscribe(topic_filter))
        with self._changed:
            if self.is_up and status is None:  # else it follows with the next connection
                self._subscriptions.confirm_removal(topic_filter)

    def _ask(
        self, ask: Callable[[], tuple[Any, int | None]], patience: float | None = None
    ) -> UStatus | None:
        """Ask the broker; return None if it grants it, else why not."""
        rc, mid = ask()
        if rc != MQTT_ERR_SUCCESS or mid is None:
            return _UNANSWERED  # the library knows of the end before it tells us
        with self._changed:
            self._changed.wait_for(
                lambda: mid in self._answers or not self.is_up or self._stopping.is_set(),
                self.broker.ack_timeout if patience is None else patience,
            )
            reason = self._answers.pop(mid, None)
            if reason is None:
                return SILENT if self.is_up else _UNANSWERED
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
            if topic_filter is not None:
                self._subscriptions.answered(topic_filter)
                if worst >= _FIRST_FAILURE:
                    self._subscriptions.refuse(topic_filter, _refused(worst))
            self._changed.notify_all()

    def _on_message(self, client: Client, _: Any, packet: MQTTMessage) -> None:
        del client
        if not self._arrived(Arrival(packet, self._connection.number)):
            self.counts.add("overflowed")
            if packet.qos and self.broker.is_lasting:
                self._break()  # nobody acknowledges it, so it comes again with the next connection
            else:
                self.counts.add("lost")

    def acknowledge(self, arrivals: Iterable[Arrival]) -> None:
        """Acknowledge packets to the broker, except those of an earlier connection."""
        with self._changed:
            client = self._connection.client
            current = self._connection.number if self.is_up else None
        for packet, connection in arrivals:
            if packet.qos and connection == current:
                client.ack(packet.mid, packet.qos)

    # --- sending --------------------------------------------------------------------------------

    def publish(self, packets: Sequence[Packet]) -> list[UStatus]:
        """Publish packets in order, several in flight at once; stop after a failure.

        :returns: the outcome of each; shorter than `packets` if some were not tried.
        """
        forked = self._owner.why_not
        return self._publishing.publish(packets) if forked is None else [forked]

    def _on_publish(self, client: Client, _: Any, mid: int, reason: Any, more: Any) -> None:
        del more
        self._publishing.answered(client, mid, reason.value)

    # --- closing --------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect. A persistent session stays at the broker."""
        if not self._owner.is_here:
            return
        if self.is_up and not self._stopping.is_set():
            # Its answer proves that the broker has read all earlier acknowledgements. Otherwise
            # the next connection may get those messages again.
            self._ask(lambda: self._connection.client.unsubscribe(_BARRIER), _GOODBYE)
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._worker.stop()
        self._lose(UStatus(UCode.UNAVAILABLE, "the transport is closed"))
