"""Which services and topics there are: uDiscovery, version 3 (docs/specs/uprotocol.md 6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.uprotocol import UCode, UUri, proto
from support.service_bus import ServiceBus

TOPIC = UUri("here", 0x10, 1, 0x8001)
FIND = UUri("here", 1, 3, 1)
TOPICS = UUri("here", 1, 3, 2)
MORE = """
services:
  discovery:
    services: ["//here/50/2/0"]
    topics: [{topic: "//here/60/1/8005", name: speed, message: vehicle.Speed, permission_level: 2}]
"""


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[ServiceBus]:
    made = ServiceBus(tmp_path / "state", more=MORE)
    yield made
    made.close()


def find(bus: ServiceBus, uri: UUri, *, recursive: bool = False) -> Any:
    asked = proto.FindServicesRequest(uri=uri.to_proto(), recursive=recursive)
    found = bus.result(bus.ask(bus.entity(0x20), FIND, asked), proto.FindServicesResponse)
    if isinstance(found, UCode):
        return found
    return {UUri.from_proto(one) for one in found.uris.uris}


def topics(bus: ServiceBus, topic: UUri, *, recursive: bool = False, source: int = 0x20) -> Any:
    asked = proto.GetServiceTopicsRequest(topic=topic.to_proto(), recursive=recursive)
    found = bus.result(bus.ask(bus.entity(source), TOPICS, asked), proto.GetServiceTopicsResponse)
    return found if isinstance(found, UCode) else list(found.topics)


def test_services_are_those_inside_those_configured_and_those_seen(bus: ServiceBus) -> None:
    here = UUri("here", 0xFFFFFFFF, 0xFF, 0)
    inside = {UUri("here", *of, 0) for of in ((0, 4), (1, 3), (3, 2), (4, 1))}
    configured = {UUri("here", 0x50, 2, 0), UUri("here", 0x60, 1, 0)}
    assert find(bus, here) == inside | configured
    bus.publish(TOPIC)
    bus.publish(UUri("there", 0x70, 1, 0x8001), leg="far")
    assert find(bus, here) == inside | configured | {TOPIC.with_resource(0)}
    assert find(bus, UUri("here", 0x50, 0xFF, 0)) == {UUri("here", 0x50, 2, 0)}
    assert find(bus, UUri("*", 0x70, 0xFF, 0), recursive=True) == {UUri("there", 0x70, 1, 0)}


@pytest.mark.parametrize("method", [find, topics])
def test_wrong_questions_are_answered_with_a_code(bus: ServiceBus, method: Any) -> None:
    assert method(bus, UUri()) == UCode.INVALID_ARGUMENT
    assert method(bus, UUri("here", 0x10, 1, 0), recursive=True) == UCode.INVALID_ARGUMENT
    assert method(bus, UUri("here", 0x99, 1, 0x8001)) == UCode.NOT_FOUND


def test_topics_that_are_configured_say_what_they_are(bus: ServiceBus) -> None:
    [one] = topics(bus, UUri("here", 0x60, 0xFF, 0xFFFF))
    assert (one.info.id, one.info.name, one.info.message) == (0x8005, "speed", "vehicle.Speed")
    assert (one.info.permission_level, one.ttl) == (2, 0)


def test_the_topics_of_the_dispatcher_itself_are_known(bus: ServiceBus) -> None:
    [letters] = topics(bus, UUri("here", 4, 1, 0xFFFF))
    assert (letters.info.id, letters.info.message) == (0x8001, "penstock.dispatch.v1.DeadLetter")
    [changes] = topics(bus, UUri("here", 0, 4, 0xFFFF))
    assert changes.info.id == 0x8000


def test_topics_that_were_seen_are_forgotten_after_an_hour(bus: ServiceBus) -> None:
    bus.publish(TOPIC)
    [one] = topics(bus, UUri("here", 0x10, 0xFF, 0xFFFF))
    assert one.ttl == 3600
    bus.run(3000)
    assert topics(bus, TOPIC)[0].ttl == 600
    bus.run(601)
    assert topics(bus, TOPIC) == UCode.NOT_FOUND


def test_topics_that_may_not_be_subscribed_to_are_not_told_of(tmp_path: Path) -> None:
    more = """
access:
  - {allow: publish}
  - {allow: subscribe, source: "/20/1/0", sink: "//here/10/1/8001"}
"""
    bus = ServiceBus(tmp_path / "state", more=more)
    bus.publish(TOPIC)
    bus.publish(TOPIC.with_resource(0x8002))
    every = UUri("here", 0x10, 1, 0xFFFF)
    assert [UUri.from_proto(one.topic) for one in topics(bus, every)] == [TOPIC]
    assert topics(bus, every, source=0x30) == UCode.PERMISSION_DENIED
    bus.close()


def test_a_service_that_is_switched_off_is_not_there(tmp_path: Path) -> None:
    more = "services: {discovery: false, twin: false}"
    bus = ServiceBus(tmp_path / "state", more=more)
    bus.local.always = None
    bus.subscribe(bus.entity(0x20), TOPIC)
    assert bus.table.count == 1
    assert set(bus.dispatcher._routing.routes.services) == {0, 4}
    bus.close()
