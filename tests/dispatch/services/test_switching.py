"""Can a receiver start and stop topics, for itself only? (docs/specs/uprotocol.md 10.1, R11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.uprotocol import UCode, UMessage, UUri, proto
from support.service_bus import ServiceBus

TOPIC = UUri("here", 0x10, 1, 0x8001)
START, STOP = (UUri("here", 4, 1, number) for number in (1, 2))


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[ServiceBus]:
    made = ServiceBus(tmp_path / "state")
    yield made
    made.close()


def ask(bus: ServiceBus, who: UUri, method: UUri, payload: Any) -> UMessage:
    return bus.ask(who, method, payload)


def test_who_stops_a_topic_gets_it_after_starting_it_and_others_get_it_at_once(
    bus: ServiceBus,
) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    for who in (alice, bob):
        bus.subscribe(who, TOPIC)
    said = ask(bus, alice, STOP, proto.StopRequest(topic=TOPIC.to_proto()))
    assert said.attributes.commstatus in (None, UCode.OK)
    bus.publish(TOPIC, b"1")
    bus.publish(TOPIC, b"2")
    assert b"1" not in bus.payloads(alice)
    assert bus.payloads(bob)[-2:] == [b"1", b"2"]
    said = ask(bus, alice, START, proto.StartRequest(topic=TOPIC.to_proto()))
    assert proto.StartResponse.FromString(said.payload or b"").was_stopped
    assert [it for it in bus.payloads(alice) if it in (b"1", b"2")] == [b"1", b"2"]
    said = ask(bus, alice, START, proto.StartRequest(topic=TOPIC.to_proto()))
    assert not proto.StartResponse.FromString(said.payload or b"").was_stopped


def test_without_a_queue_what_comes_meanwhile_is_a_dead_letter(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC)
    ask(bus, alice, STOP, proto.StopRequest(topic=TOPIC.to_proto(), no_queue=True))
    bus.publish(TOPIC, b"lost")
    assert [letter.code for letter in bus.dispatcher.dead_letters] == [UCode.UNAVAILABLE]


@pytest.mark.parametrize("payload", [b"\xff", b"", proto.StopRequest()])
def test_what_names_no_topic_is_an_invalid_argument(bus: ServiceBus, payload: Any) -> None:
    for method in (START, STOP):
        said = ask(bus, bus.entity(0x20), method, payload)
        assert said.attributes.commstatus == UCode.INVALID_ARGUMENT
