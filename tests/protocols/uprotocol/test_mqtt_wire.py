"""Messages on MQTT 5: topics, properties, outcomes (docs/specs/uprotocol.md 8.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from penstock.protocols.uprotocol import message as make
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.mqtt_wire import (
    MqttProperties,
    attributes_of,
    code_of_reason,
    properties_of,
    topic_d2d,
    topic_e2e,
    topic_filter_d2d,
    topic_filter_e2e,
)
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases

ADDRESSES = [
    case for case in cases("transport_addresses") if case.values[0]["transport"] == "mqtt5"
]
TOPIC, ENTITY, METHOD = UUri("a", 1, 1, 0x8000), UUri("b", 2, 1, 0), UUri("c", 3, 1, 1)
LEAST = [
    ("uP", "1"),
    ("1", "018bcfe5-6800-7123-8000-000000abcdef"),
    ("2", "up-pub.v1"),
    ("3", "up://a/1/1/8000"),
]


@pytest.mark.parametrize("case", ADDRESSES)
def test_filters_are_those_of_the_vectors(case: Any) -> None:
    sink = None if case["sink"] is None else UUri.parse(case["sink"])
    write = topic_filter_e2e if case["mode"] == "e2e" else topic_filter_d2d
    assert write(UUri.parse(case["source"]), sink, case["local_authority"]) == case["expect"]


@pytest.mark.parametrize("case", cases("umessages"))
def test_messages_of_the_vectors_have_their_topics_and_properties(case: Any) -> None:
    message = UMessage.from_bytes(bytes.fromhex(case["hex"]))
    expected = case["mqtt5"]
    assert topic_e2e(message.attributes, "vehicle1") == expected["topic_e2e"]
    if expected["topic_d2d"] is None:
        with pytest.raises(InvalidMessage, match="no sink"):
            topic_d2d(message.attributes, "vehicle1")
    else:
        assert topic_d2d(message.attributes, "vehicle1") == expected["topic_d2d"]
    found = properties_of(message.attributes)
    assert [list(pair) for pair in found.user_properties] == expected["user_properties"]
    assert found.message_expiry == expected.get("message_expiry_interval")
    assert found.content_type == expected.get("content_type")
    data = expected.get("correlation_data_hex")
    assert found.correlation_data == (None if data is None else bytes.fromhex(data))
    assert UMessage.from_parts(attributes_of(found), message.payload or b"") == message


@pytest.mark.parametrize(
    ("source", "sink", "expected"),
    [
        ("//*/3BA/3/9876", None, "+/3BA/0/3/9876"),
        ("//*/FFFF03BA/3/9876", None, "+/3BA/+/3/9876"),
        ("//*/FFFFFFFF/FF/FFFF", "//device1/AB/1/0", "+/+/+/+/+/device1/AB/0/1/0"),
    ],
)
def test_wildcards_are_those_of_mqtt(source: str, sink: str | None, expected: str) -> None:
    to = None if sink is None else UUri.parse(sink)
    assert topic_filter_e2e(UUri.parse(source), to, "local") == expected


def test_between_devices_only_authorities_are_named() -> None:
    assert topic_filter_d2d(UUri.ANY, UUri.parse("//backend/FFFFFFFF/FF/FFFF"), "x") == "+/backend"
    assert topic_filter_d2d(UUri.ANY, None, "me") == "+/me"
    request = make.request(UUri("", 2, 1, 0), METHOD)
    assert topic_d2d(request.attributes, "me") == "me/c"
    anyone = make.publish(TOPIC).with_attributes(sink=UUri.ANY)
    with pytest.raises(InvalidMessage, match="one authority"):
        topic_d2d(anyone.attributes, "me")


@pytest.mark.parametrize(
    ("ttl", "property6", "expiry"),
    [
        (None, None, None),
        (0, None, None),
        (1, "1", 1),
        (999, "999", 1),
        (1000, None, 1),
        (1001, "1001", 2),
        (2500, "2500", 3),
        (10000, None, 10),
        (2**32 - 1, "4294967295", 4294968),
    ],
)
def test_a_ttl_is_milliseconds_only_where_seconds_do_not_do(
    ttl: int | None, property6: str | None, expiry: int | None
) -> None:
    attributes = make.publish(TOPIC, ttl=ttl).attributes
    found = properties_of(attributes)
    assert dict(found.user_properties).get("6") == property6
    assert found.message_expiry == expiry
    assert attributes_of(found).ttl == (ttl or None)
    exact = properties_of(attributes, exact_ttl=True)
    assert dict(exact.user_properties).get("6") == (None if ttl is None else str(ttl))
    assert exact.message_expiry == expiry
    assert attributes_of(exact).ttl == ttl


def test_a_broker_that_counts_down_changes_only_a_ttl_that_is_not_exact() -> None:
    attributes = make.publish(TOPIC, ttl=10_000).attributes
    for exact, expected in ((False, 6000), (True, 10_000)):
        sent = properties_of(attributes, exact_ttl=exact)
        assert attributes_of(dataclasses.replace(sent, message_expiry=6)).ttl == expected


def test_an_expiry_of_more_than_a_ttl_can_hold_is_the_longest_ttl() -> None:
    assert attributes_of(MqttProperties(LEAST, message_expiry=2**32 - 1)).ttl == 2**32 - 1
    for seconds in (-1, 2**32):
        with pytest.raises(InvalidMessage, match="expiry"):
            attributes_of(MqttProperties(LEAST, message_expiry=seconds))


def test_addresses_are_taken_without_scheme_and_other_properties_left_alone() -> None:
    found = attributes_of(
        MqttProperties(
            [*LEAST[:3], ("3", "//a/1/1/8000"), ("4", "/FFFFFFFF/FF/FFFF"), ("x", "y"), ("x", "z")]
        )
    )
    assert found.source == TOPIC
    assert found.sink == UUri("", 0xFFFFFFFF, 0xFF, 0xFFFF)
    assert attributes_of(MqttProperties(LEAST)) == UAttributes(
        id=UUID7.parse(LEAST[1][1]), type=UMessageType.PUBLISH, source=TOPIC
    )


@pytest.mark.parametrize("key", ["uP", "1", "2", "3"])
def test_what_every_message_has_must_be_there(key: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        attributes_of(MqttProperties([pair for pair in LEAST if pair[0] != key]))
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uP", "2"),
        ("uP", ""),
        ("1", "x"),
        ("1", "018bcfe5-6800-4123-8000-000000abcdef"),
        ("2", "pub.v1"),
        ("2", ""),
        ("3", "up://A/1/1/8000"),
        ("4", ""),
        ("5", "CS7"),
        ("5", "2"),
        ("6", "-1"),
        ("6", "4294967296"),
        ("6", "1_0"),
        ("6", " 1"),
        ("6", "1.5"),
        ("6", "\u0661"),
        ("7", ""),
        ("7", "+1"),
        ("8", "99999999999"),
        ("8", "2147483648"),
        ("10", "\ud800"),
        ("11", "\udfff"),
    ],
)
def test_a_bad_property_is_refused_by_its_key(key: str, value: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        attributes_of(MqttProperties([*(pair for pair in LEAST if pair[0] != key), (key, value)]))
    assert caught.value.field == key


@pytest.mark.parametrize("key", ["uP", "1", "2", "3", "4", "5", "6", "7", "8", "10", "11"])
def test_a_property_that_is_there_twice_is_refused(key: str) -> None:
    full = [*LEAST, ("4", "/FFFFFFFF/FF/FFFF"), ("5", "CS1"), ("6", "1"), ("7", "1"), ("8", "1")]
    full += [("10", "t"), ("11", "")]
    assert attributes_of(MqttProperties(full))
    with pytest.raises(InvalidMessage, match="twice") as caught:
        attributes_of(MqttProperties([*full, (key, dict(full)[key])]))
    assert caught.value.field == key


@pytest.mark.parametrize("text", ["x", "-1", "99999999999", "application/json", "\u0661"])
def test_a_content_type_is_a_number(text: str) -> None:
    with pytest.raises(InvalidMessage, match="is not a number"):
        attributes_of(MqttProperties(LEAST, content_type=text))
    found = attributes_of(MqttProperties(LEAST, content_type="3"))
    assert found.payload_format is UPayloadFormat.JSON


@pytest.mark.parametrize("data", [b"", b"x", bytes(16), bytes(17)])
def test_correlation_data_is_an_id(data: bytes) -> None:
    with pytest.raises(InvalidMessage, match="correlation"):
        attributes_of(MqttProperties(LEAST, correlation_data=data))


@pytest.mark.parametrize(
    "changes",
    [{"id": None}, {"type": UMessageType(9)}, {"source": None}, {"priority": UPriority(9)}],
)
def test_what_has_no_text_cannot_be_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        properties_of(make.publish(TOPIC).attributes.replace(**changes))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (0x00, UCode.OK),
        (0x10, UCode.OK),
        (0x86, UCode.UNAUTHENTICATED),
        (0x8C, UCode.UNAUTHENTICATED),
        (0x87, UCode.PERMISSION_DENIED),
        (0x88, UCode.UNAVAILABLE),
        (0x89, UCode.UNAVAILABLE),
        (0x96, UCode.RESOURCE_EXHAUSTED),
        (0x97, UCode.RESOURCE_EXHAUSTED),
        (0x9F, UCode.RESOURCE_EXHAUSTED),
        (0xA0, UCode.RESOURCE_EXHAUSTED),
        (0x80, UCode.INTERNAL),
        (0x83, UCode.INTERNAL),
        (0xA2, UCode.INTERNAL),
    ],
)
def test_reasons_have_codes(reason: int, code: UCode) -> None:
    assert code_of_reason(reason) is code


@given(messages())
def test_properties_come_back(message: UMessage) -> None:
    assert attributes_of(properties_of(message.attributes, exact_ttl=True)) == message.attributes
    plain = attributes_of(properties_of(message.attributes))
    assert plain == message.attributes.replace(ttl=message.attributes.ttl or None)
