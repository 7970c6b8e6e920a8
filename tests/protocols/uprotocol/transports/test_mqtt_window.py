"""What is under way to a broker at once, and what is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.protocols.uprotocol import UMessage, UUri, notification, publish
from penstock.protocols.uprotocol.mqtt_wire import Packet, Packing
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg
from penstock.protocols.uprotocol.transports.mqtt_publisher import Flight, SendWindow
from support.mosquitto import Mosquitto, mosquitto
from support.until import until

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)
ENTITY = UUri("cloud", 0x300EF, 4, 0)
OTHER = UUri("cloud", 0x300F0, 4, 0)
NOBODY_LISTENS = 0x10


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as running:
        yield running


def packet_to(sink: UUri) -> Packet:
    return Packing("vehicle1").pack(notification(TOPIC, sink, b""), must_be_heard=True)


def answer(window: SendWindow, packet: Packet, reason: int) -> None:
    flight = Flight([packet])
    window.enter(flight)
    window.sent(1, flight, 0)
    window.answered(1, reason)


def test_nothing_follows_the_first_message_to_somebody_until_it_is_heard() -> None:
    window = SendWindow(10, lambda: None)
    assert window.goes_alone(packet_to(ENTITY))
    answer(window, packet_to(ENTITY), 0)
    assert not window.goes_alone(packet_to(ENTITY))
    assert window.goes_alone(packet_to(OTHER))
    answer(window, packet_to(ENTITY), NOBODY_LISTENS)
    assert window.goes_alone(packet_to(ENTITY))


def test_after_a_lost_connection_nobody_is_known_to_listen() -> None:
    window = SendWindow(10, lambda: None)
    answer(window, packet_to(ENTITY), 0)
    window.lose_all()
    assert window.goes_alone(packet_to(ENTITY))


def test_what_need_not_be_heard_waits_for_nobody() -> None:
    window = SendWindow(10, lambda: None)
    packet = Packing("vehicle1").pack(publish(TOPIC, b""), must_be_heard=True)
    assert not window.goes_alone(packet)


@pytest.mark.parametrize("attempt", range(5))
def test_somebody_who_comes_while_a_batch_is_sent_gets_it_in_order(
    broker: Mosquitto, attempt: int
) -> None:
    messages = [notification(TOPIC, ENTITY, b"%d" % number) for number in range(64)]
    heard: list[int] = []
    is_over = threading.Event()

    def ingest(arrived: Sequence[bytes | UMessage]) -> None:
        heard.extend(int(it.payload or b"") for it in arrived if isinstance(it, UMessage))

    def send() -> None:
        rest = messages
        while rest and not is_over.is_set():
            statuses = sender.deliver(ENTITY, rest)
            rest = rest[next((at for at, it in enumerate(statuses) if it is not None), len(rest)) :]

    with (
        MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender,
        MqttLeg("cloud", "cloud", MqttBroker.parse(broker.url)) as receiver,
    ):
        sender.start(lambda _: None, ())
        assert sender.await_connection(10) is None
        sending = threading.Thread(target=send)
        sending.start()
        try:
            receiver.start(ingest, ["cloud"])
            until(lambda: set(heard) == set(range(64)))
        finally:
            is_over.set()
            sending.join()
    first = list(dict.fromkeys(heard))
    assert all(before < after for before, after in pairwise(first)), (attempt, first)


def test_a_failure_that_is_heard_before_the_next_packet_is_sent_holds_up_nobody(
    broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, entered = SendWindow.enter, 0

    def enter_late(window: SendWindow, flight: Flight) -> None:
        nonlocal entered
        enter(window, flight)
        entered += 1
        flight.has_failed |= entered == 3  # by an answer that comes between this and the sending

    monkeypatch.setattr(SendWindow, "enter", enter_late)
    with MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender:
        sender.start(lambda _: None, ())
        assert sender.await_connection(10) is None
        began = time.monotonic()
        for _ in range(2):
            statuses = sender.deliver(TOPIC, [publish(TOPIC, b"") for _ in range(5)])
        assert statuses == [None] * 5
        assert time.monotonic() - began < 4
        assert sender.statistics()["connections"] == 1
