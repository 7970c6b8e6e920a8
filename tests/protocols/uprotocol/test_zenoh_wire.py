"""Messages on zenoh: keys, attachments, priorities (docs/specs/uprotocol.md 8.1)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.protocols.uprotocol import message as make
from penstock.protocols.uprotocol.codes import UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.zenoh_wire import (
    PRIORITIES,
    decode_attachment,
    encode_attachment,
    key_of,
    key_of_filter,
    priority_name,
)
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases

ADDRESSES = [
    case for case in cases("transport_addresses") if case.values[0]["transport"] == "zenoh"
]
TOPIC, ENTITY, METHOD = UUri("a", 1, 1, 0x8000), UUri("b", 2, 1, 0), UUri("c", 3, 1, 1)


@pytest.mark.parametrize("case", ADDRESSES)
def test_keys_of_filters_are_those_of_the_vectors(case: Any) -> None:
    sink = None if case["sink"] is None else UUri.parse(case["sink"])
    found = key_of_filter(UUri.parse(case["source"]), sink, case["local_authority"])
    assert found == case["expect"]


@pytest.mark.parametrize("case", cases("umessages"))
def test_messages_of_the_vectors_have_their_keys_and_attachments(case: Any) -> None:
    message = UMessage.from_bytes(bytes.fromhex(case["hex"]))
    assert key_of(message.attributes, "vehicle1") == case["zenoh"]["key"]
    attachment = encode_attachment(message.attributes)
    assert attachment.hex() == case["zenoh"]["attachment_hex"]
    assert UMessage.from_parts(decode_attachment(attachment), message.payload or b"") == message
    assert (message.payload or b"").hex() == case["zenoh"]["payload_hex"]


def test_an_address_is_written_in_five_segments() -> None:
    source, sink = UUri.parse("//device1/10AB/3/80CD"), UUri.parse("//device2/300EF/4/0")
    message = make.notification(source, sink)
    expected = "up/device1/10AB/0/3/80CD/device2/EF/3/4/0"
    assert key_of(message.attributes, "local") == expected
    assert key_of_filter(UUri(), None, "local") == "up/local/0/0/0/0/{}/{}/{}/{}/{}"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (make.publish(TOPIC).with_attributes(source=None), "source"),
        (make.publish(TOPIC).with_attributes(source=UUri.ANY), "source"),
        (make.publish(TOPIC).with_attributes(source=UUri.unchecked("a/b", 1, 1, 1)), "source"),
        (make.notification(TOPIC, ENTITY).with_attributes(sink=None), "sink"),
        (make.notification(TOPIC, ENTITY).with_attributes(sink=UUri.ANY), "sink"),
    ],
)
def test_a_message_without_plain_addresses_has_no_key(message: UMessage, field: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        key_of(message.attributes, "a")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\x00", "version 0"),
        (b"\x02\x0a\x00", "version 2"),
        (b"\x01\xff", "decode"),
    ],
)
def test_other_attachments_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        decode_attachment(data)


def test_classes_have_the_priorities_of_zenoh() -> None:
    assert [priority_name(priority) for priority in UPriority] == [
        "DATA_LOW",
        "BACKGROUND",
        "DATA_LOW",
        "DATA",
        "DATA_HIGH",
        "INTERACTIVE_LOW",
        "INTERACTIVE_HIGH",
        "REAL_TIME",
    ]
    assert priority_name(UPriority(99)) == "DATA_LOW"


def test_the_names_are_of_zenohs_own() -> None:
    zenoh = pytest.importorskip("zenoh")
    for name in PRIORITIES.values():
        assert getattr(zenoh.Priority, name)
    for text in ("//*/FFFFFFFF/FF/FFFF", "//a/1/1/8000", "//[2001::7]/1/1/8000"):
        for sink in (None, UUri.parse("//b/FFFFFFFF/FF/0")):
            assert zenoh.KeyExpr(key_of_filter(UUri.parse(text), sink, "local"))


@given(messages())
def test_attachments_come_back(message: UMessage) -> None:
    found = decode_attachment(encode_attachment(message.attributes))
    assert found == message.attributes
    assert encode_attachment(found) == encode_attachment(message.attributes)


def test_unknown_fields_travel() -> None:
    data = b"\x01" + UAttributes(ttl=3).to_bytes() + bytes.fromhex("c23e03616263")
    assert encode_attachment(decode_attachment(data)) == data
