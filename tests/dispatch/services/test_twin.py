"""The last message of a topic: the service uTwin, version 2 (docs/specs/uprotocol.md 6.3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.clock import ManualClock
from penstock.dispatch.services import UTwin
from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UPayloadFormat,
    UUri,
    proto,
    publish,
)
from support.service_bus import ServiceBus

TOPIC = UUri("here", 0x10, 1, 0x8001)
METHOD = UUri("here", 3, 2, 1)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[ServiceBus]:
    made = ServiceBus(tmp_path / "state")
    yield made
    made.close()


def last(bus: ServiceBus, *topics: UUri, source: int = 0x20) -> list[Any]:
    batch = proto.UUriBatch(uris=[topic.to_proto() for topic in topics])
    asked = proto.GetLastMessagesRequest(topics=batch)
    answer = bus.ask(bus.entity(source), METHOD, asked)
    return list(bus.result(answer, proto.GetLastMessagesResponse).responses)


def test_the_last_publish_of_each_topic_is_remembered_also_without_subscribers(
    bus: ServiceBus,
) -> None:
    other = TOPIC.with_resource(0x8002)
    bus.publish(TOPIC, b"old")
    bus.publish(TOPIC, b"new")
    bus.publish(other, b"other")
    found = last(bus, TOPIC, other, TOPIC.with_resource(0x8003))
    assert [one.status.code for one in found] == [UCode.OK, UCode.OK, UCode.NOT_FOUND]
    assert [one.message.payload for one in found[:2]] == [b"new", b"other"]
    message = UMessage.from_bytes(found[0].message.SerializeToString())
    assert message.attributes.source == TOPIC
    assert not found[2].HasField("message")


@pytest.mark.parametrize("authority", ["here", "h", "here.example-of.a_long~name", "[2001::7]"])
def test_both_forms_of_a_request_are_understood(tmp_path: Path, authority: str) -> None:
    bus = ServiceBus(tmp_path / "state")
    topic = TOPIC.with_authority(authority)
    batch = proto.UUriBatch(uris=[topic.to_proto(), TOPIC.to_proto()]).SerializeToString()
    # The .proto file of the specification has a message around the batch, its text has not.
    for asked in (bytes([0x0A, len(batch)]) + batch, batch):
        answer = bus.ask(bus.entity(0x20), METHOD, asked)
        found = bus.result(answer, proto.GetLastMessagesResponse).responses
        assert [UUri.from_proto(one.topic) for one in found] == [topic, TOPIC]
    bus.close()


def test_a_request_that_asks_for_nothing_gets_that(bus: ServiceBus) -> None:
    assert last(bus) == []
    answer = bus.ask(bus.entity(0x20), METHOD, b"\x0a\x02\x0a\x09")
    assert answer.attributes.commstatus == UCode.INVALID_ARGUMENT


def test_an_expired_message_is_not_given_out(bus: ServiceBus) -> None:
    bus.publish(TOPIC, b"short", ttl=1000)
    assert last(bus, TOPIC)[0].status.code == UCode.OK
    bus.run(1.1)
    assert last(bus, TOPIC)[0].status.code == UCode.NOT_FOUND


def test_what_was_expired_when_it_came_takes_the_place_of_nothing(bus: ServiceBus) -> None:
    bus.publish(TOPIC, b"good")
    late = publish(TOPIC, b"late", ttl=1, id=UUID7.new(bus.now_ms - 1000))
    bus.dispatcher.ingest("local", [late.to_bytes()])
    bus.run()
    assert [one.message.payload for one in last(bus, TOPIC)] == [b"good"]


def test_what_is_not_a_topic_is_an_invalid_argument(bus: ServiceBus) -> None:
    found = last(bus, METHOD, TOPIC.with_resource(0xFFFF), UUri("*", 0x10, 1, 0x8001))
    assert [one.status.code for one in found] == [UCode.INVALID_ARGUMENT] * 3


def test_a_local_address_is_one_of_the_dispatchers_authority(bus: ServiceBus) -> None:
    bus.publish(TOPIC, b"x")
    assert last(bus, UUri("", 0x10, 1, 0x8001))[0].message.payload == b"x"


def test_who_may_not_subscribe_may_not_ask_for_the_last_message(tmp_path: Path) -> None:
    more = """
access:
  - {allow: publish}
  - {allow: subscribe, source: "/20/1/0", sink: "//here/10/1/8001"}
"""
    bus = ServiceBus(tmp_path / "state", more=more)
    bus.publish(TOPIC, b"secret")
    assert last(bus, TOPIC)[0].status.code == UCode.OK
    [refused] = last(bus, TOPIC, source=0x30)
    assert refused.status.code == UCode.PERMISSION_DENIED
    assert not refused.HasField("message")
    bus.close()


def test_topics_and_bytes_are_bounded_and_the_oldest_go() -> None:
    twin = UTwin("here", ManualClock(), topics=3, size=10_000)

    def hear(resource: int, size: int = 10) -> None:
        topic = TOPIC.with_resource(resource)
        message = publish(topic, b"x" * size, payload_format=UPayloadFormat.RAW)
        twin.published({topic: message.to_bytes()})

    for resource in (0x8001, 0x8002, 0x8003, 0x8001, 0x8004):
        hear(resource)
    assert [topic.resource_id for topic in twin._last] == [0x8003, 0x8001, 0x8004]
    hear(0x8005, 9_930)
    assert len(twin) == 1
    hear(0x8006, 20_000)
    assert len(twin) == 0
    assert twin._bytes == 0


def test_a_response_never_becomes_larger_than_a_message_may_be(tmp_path: Path) -> None:
    bus = ServiceBus(tmp_path / "state", more="limits: {message: 4k}")
    topics = [TOPIC.with_resource(0x8001 + number) for number in range(4)]
    for topic in topics:
        bus.publish(topic, b"x" * 900)
    codes = [one.status.code for one in last(bus, *topics)]
    assert codes == [UCode.OK, UCode.OK, UCode.RESOURCE_EXHAUSTED, UCode.RESOURCE_EXHAUSTED]
    bus.close()
