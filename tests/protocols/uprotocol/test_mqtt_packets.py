from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.protocols.uprotocol import (
    UUID7,
    InvalidMessage,
    UMessage,
    UUri,
    notification,
    publish,
    request,
)
from penstock.protocols.uprotocol.mqtt_wire import Packing
from protocols.uprotocol.strategies import messages

PACKING = Packing("local")


def received(topic: str, packed: bytes, payload: bytes) -> MQTTMessage:
    """Make what the library makes of a packet."""
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.unpack(packed)  # type: ignore[no-untyped-call]
    message = MQTTMessage(1, topic.encode())
    message.properties = properties
    message.payload = payload
    return message


@given(messages(shared_memory=False), st.booleans())
def test_what_is_packed_is_read_by_the_library_and_unpacked(sent: UMessage, exact: bool) -> None:
    source, sink = sent.attributes.source, sent.attributes.sink
    assert source is not None
    sent = sent.with_attributes(
        source=source.resolved("local"), sink=None if sink is None else sink.resolved("local")
    )
    if any("\0" in text or "\ufeff" in text for text in _texts(sent)):
        return  # which MQTT does not allow in a text
    packing = Packing("local", exact_ttl=exact)
    packet = packing.pack(sent)
    found = packing.unpack(received(packet.topic, packet.properties.pack(), packet.payload))
    if not exact and not sent.attributes.ttl:  # no time and no end are the same without it
        sent = sent.with_attributes(ttl=None)
    assert found.attributes == sent.attributes
    assert (found.payload or b"") == (sent.payload or b"")
    assert packet.size >= len(packet.properties.pack()) + len(packet.payload)


@given(messages(shared_memory=False))
def test_another_message_of_the_same_kind_is_unpacked_alike(sent: UMessage) -> None:
    if any("\0" in text or "\ufeff" in text for text in _texts(sent)):
        return
    packing = Packing("local")
    for id in (UUID7.new(), UUID7.new(), UUID7.new()):
        packet = packing.pack(sent.with_attributes(id=id))
        message = received(packet.topic, packet.properties.pack(), packet.payload)
        found = packing.unpack(message)
        assert found == Packing("local").unpack(message)
        assert found.attributes.id == id
        assert UMessage.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("ids", [[], ["not an id"], [str(UUID7.new()), str(UUID7.new())]])
def test_a_known_kind_excuses_no_bad_id(ids: list[str]) -> None:
    packing = Packing("local")
    packet = packing.pack(publish(UUri("local", 1, 1, 0x8001)))
    message = received(packet.topic, packet.properties.pack(), b"")
    packing.unpack(message)
    pairs: Any = message.properties
    others = [pair for pair in pairs.UserProperty if pair[0] != "1"]
    del pairs.UserProperty
    pairs.UserProperty = [*others, *(("1", id) for id in ids)]
    with pytest.raises(InvalidMessage, match="property 1"):
        packing.unpack(message)


#: Of another authority: it leaves out its own, as it may, and only the topic names it.
LOCAL = [
    (publish(UUri("", 0x3BA, 3, 0x9876)), "device1/3BA/0/3/9876"),
    (
        request(UUri("", 0x403BA, 3, 0), UUri("local", 0xAB, 1, 2)),
        "device1/3BA/4/3/0/local/AB/0/1/2",
    ),
    (
        notification(UUri("", 0x3BA, 3, 0x9876), UUri("", 0xAB, 1, 0)),
        "device1/3BA/0/3/9876/device1/AB/0/1/0",
    ),
]


@pytest.mark.parametrize(("sent", "topic"), LOCAL)
def test_a_local_address_is_one_of_the_authority_in_the_topic(sent: UMessage, topic: str) -> None:
    for _ in range(2):  # also when it was seen before
        packet = Packing("device1").pack(sent)
        assert packet.topic == topic
        found = PACKING.unpack(received(topic, packet.properties.pack(), b""))
        source, sink = sent.attributes.source, sent.attributes.sink
        assert source is not None
        named = sent.attributes.replace(
            source=source.resolved("device1"), sink=sink and sink.resolved("device1")
        )
        assert found.attributes == named
        elsewhere = topic.replace("device1", "device2")
        found = PACKING.unpack(received(elsewhere, packet.properties.pack(), b""))
        assert found.attributes.source == source.resolved("device2")


def test_between_devices_the_topic_names_the_authorities_of_local_addresses_too() -> None:
    sent = request(UUri("", 0x403BA, 3, 0), UUri("cloud", 0xAB, 1, 2))
    packet = Packing("device1", "d2d").pack(sent)
    found = Packing("cloud", "d2d").unpack(received(packet.topic, packet.properties.pack(), b""))
    assert found.attributes.source == UUri("device1", 0x403BA, 3, 0)
    assert found.attributes.sink == UUri("cloud", 0xAB, 1, 2)


@pytest.mark.parametrize(
    "topic",
    ["device1/3BA/0/3/9877", "device1", "", "/3BA/0/3/9876", "+/3BA/0/3/9876", "A B/3BA/0/3/9876"],
)
def test_a_local_address_at_the_topic_of_another_is_refused(topic: str) -> None:
    packet = PACKING.pack(publish(UUri("", 0x3BA, 3, 0x9876)))
    with pytest.raises(InvalidMessage):
        PACKING.unpack(received(topic, packet.properties.pack(), b""))


def _texts(message: UMessage) -> list[str]:
    return [message.attributes.token or "", message.attributes.traceparent or ""]


TEXT = st.text(max_size=40) | st.sampled_from(["1", "uP", "up-pub.v1", "up://a/1/1/8001", "CS4"])


@given(
    st.lists(st.tuples(TEXT, TEXT), max_size=12),
    st.none() | TEXT,
    st.none() | st.binary(max_size=20),
    st.none() | st.integers(0, 2**32 - 1),
    TEXT,
)
def test_properties_of_any_kind_give_a_message_or_say_what_is_wrong(
    pairs: list[tuple[str, str]],
    content_type: str | None,
    correlation: bytes | None,
    expiry: int | None,
    topic: str,
) -> None:
    class Anything:
        pass

    properties: Any = Anything()
    given_ = {
        "UserProperty": pairs,
        "ContentType": content_type,
        "CorrelationData": correlation,
        "MessageExpiryInterval": expiry,
    }
    for name, value in given_.items():
        if value is not None:
            setattr(properties, name, value)
    message = MQTTMessage(1, topic.encode(errors="replace"))
    message.properties = properties
    message.payload = b"x"
    with contextlib.suppress(InvalidMessage):
        PACKING.unpack(message)


def test_a_topic_that_is_no_text_is_no_message() -> None:
    sent = publish(UUri("local", 1, 1, 0x8001))
    packet = PACKING.pack(sent)
    message = received(packet.topic, packet.properties.pack(), b"")
    message._topic = b"\xff\xfe"
    with pytest.raises(InvalidMessage):
        PACKING.unpack(message)


def test_an_attribute_that_is_too_long_for_mqtt_is_refused() -> None:
    sent = publish(UUri("local", 1, 1, 0x8001)).with_attributes(token="x" * 70_000)
    with pytest.raises(InvalidMessage, match="does not fit MQTT"):
        PACKING.pack(sent)
