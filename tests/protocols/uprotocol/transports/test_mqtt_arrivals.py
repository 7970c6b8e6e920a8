"""What comes from a broker while somebody is slow, or the connection breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from paho.mqtt.properties import Properties

from penstock.protocols.uprotocol import UMessage, UUri, notification, publish
from penstock.protocols.uprotocol.mqtt_wire import Packing
from penstock.protocols.uprotocol.transports import interface
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from penstock.protocols.uprotocol.transports.mqtt_link import identifier
from support.mosquitto import Mosquitto, mosquitto
from support.mqtt_client import PlainClient
from support.until import until
from support.waiting import SOON

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)
ENTITY = UUri("cloud", 0x300EF, 4, 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as running:
        yield running


class Slow:
    """Stores what comes, when it is let."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.stored: list[UMessage] = []
        self.has_some = False

    def ingest(self, messages: Sequence[bytes | UMessage]) -> None:
        self.has_some = True
        assert self.go_on.wait(SOON)
        self.stored += [it for it in messages if isinstance(it, UMessage)]


def test_what_is_sent_but_once_is_kept_when_the_session_is_resumed(broker: Mosquitto) -> None:
    slow = Slow()
    plain = PlainClient(broker.port)
    with MqttLeg("cloud", "cloud", MqttBroker.parse(broker.url, client_id="cloud")) as receiver:
        receiver.start(slow.ingest, ["cloud"])
        assert receiver.await_connection(10) is None
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(20)]
        for number, message in enumerate(messages):
            if number == 1:
                until(lambda: slow.has_some)
            packet = Packing("vehicle1").pack(message)
            properties = cast("Properties", packet.properties)
            plain.client.publish(packet.topic, packet.payload, 0, properties=properties)
        intake = receiver._intake
        assert intake is not None
        size = sum(message.size for message in messages)
        until(lambda: slow.has_some and intake._pump._bytes == size)
        # Of those that are in hand already nothing can be learned.
        assert len(intake._pump._waiting) > 0
        intake.link._break()
        until(lambda: receiver.statistics()["connections"] == 2)
        slow.go_on.set()
        until(lambda: len(slow.stored) == 20)
        assert slow.stored == messages
        assert receiver.statistics()["repeated"] == 0
    plain.close()


def test_who_is_slow_has_a_bounded_number_of_bytes_waiting(
    broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1 << 20
    defaults = interface.Pump.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "most_bytes", most)
    slow = Slow()
    options = MqttBroker.parse(broker.url, client_id="cloud", keepalive=1)
    with (
        MqttLeg("cloud", "cloud", options) as receiver,
        MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender,
    ):
        receiver.start(slow.ingest, ["cloud"])
        sender.start(lambda _: None, ())
        for leg in (receiver, sender):
            assert leg.await_connection(10) is None
        messages = [notification(TOPIC, ENTITY, bytes(100_000)) for _ in range(60)]
        assert sender.deliver(ENTITY, messages) == [None] * 60
        until(lambda: receiver.statistics()["overflowed"] > 0)
        assert receiver._intake is not None
        assert receiver._intake._pump._bytes <= most
        slow.go_on.set()
        ids = {message.attributes.id for message in messages}
        until(lambda: {message.attributes.id for message in slow.stored} == ids, 40)


def test_what_came_in_a_session_that_the_broker_forgot_is_kept_when_the_next_one_is_resumed(
    broker: Mosquitto,
) -> None:
    slow = Slow()
    with (
        MqttLeg("cloud", "cloud", MqttBroker.parse(broker.url, client_id="cloud")) as receiver,
        MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender,
    ):
        receiver.start(slow.ingest, ["cloud"])
        sender.start(lambda _: None, ())
        for leg in (receiver, sender):
            assert leg.await_connection(10) is None
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(6)]
        assert sender.deliver(ENTITY, messages[:1]) == [None]
        until(lambda: slow.has_some)
        assert sender.deliver(ENTITY, messages[1:]) == [None] * 5
        intake = receiver._intake
        assert intake is not None
        until(lambda: len(intake._pump._waiting) == 5)
        broker.kill()  # and with it all sessions
        broker.start()
        until(lambda: receiver.statistics()["connections"] == 2)
        assert receiver.await_connection(10) is None
        intake.link._break()
        until(lambda: receiver.statistics()["connections"] == 3)
        slow.go_on.set()
        until(lambda: len(slow.stored) + receiver.statistics()["repeated"] == 6)
        assert slow.stored == messages


def test_without_a_session_what_there_is_no_room_for_is_counted_and_costs_no_other_message(
    broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = interface.Pump.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "most_bytes", 1 << 20)
    slow = Slow()
    with (
        MqttLeg("cloud", "cloud", MqttBroker.parse(broker.url, keepalive=1)) as receiver,
        MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender,
    ):
        receiver.start(slow.ingest, ["cloud"])
        sender.start(lambda _: None, ())
        for leg in (receiver, sender):
            assert leg.await_connection(10) is None
        messages = [notification(TOPIC, ENTITY, bytes(100_000)) for _ in range(60)]
        assert sender.deliver(ENTITY, messages) == [None] * 60
        until(lambda: receiver.statistics()["overflowed"] > 0)
        slow.go_on.set()
        until(lambda: len(slow.stored) + receiver.statistics()["lost"] == 60, 20)
        assert slow.stored


def test_two_filters_whose_numbers_are_the_same_are_both_heard(broker: Mosquitto) -> None:
    packing = Packing("vehicle1")
    seen: dict[int, UUri] = {}
    for number in range(0x10000 * 0x7FFE):
        topic = UUri("vehicle1", number // 0x7FFE, 1, 0x8000 + number % 0x7FFE)
        other = seen.setdefault(identifier(packing.filter_of(topic, None)), topic)
        if other is not topic:
            break
    options = MqttBroker.parse(broker.url)
    heard: list[UUri | None] = []
    with (
        MqttTransport("vehicle2", options) as receiver,
        MqttTransport("vehicle1", options) as sender,
    ):
        for one in (topic, other):
            receiver.register_listener(one, lambda it: heard.append(it.attributes.source))
        for one in (topic, other):
            sender.send(publish(one))
        until(lambda: {topic, other} <= set(heard))
        receiver.close()
