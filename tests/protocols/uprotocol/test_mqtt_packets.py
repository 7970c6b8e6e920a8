from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.protocols.uprotocol import UUID7, InvalidMessage, UMessage, UUri, publish
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
