"""Messages as CloudEvents, in JSON and in protobuf (docs/specs/uprotocol.md 7)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.uprotocol import message as make
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.cloud_events import (
    from_json,
    from_protobuf,
    to_json,
    to_protobuf,
)
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage
from penstock.protocols.uprotocol.uuri import UUri
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases

TOPIC, ENTITY, METHOD = UUri("a", 1, 1, 0x8000), UUri("b", 2, 1, 0), UUri("c", 3, 1, 1)
STRING_IN_ANY = bytes.fromhex(
    "0a2f747970652e676f6f676c65617069732e636f6d2f676f6f676c652e70726f746f6275662e"
    "537472696e6756616c756512040a026869"
)


def without_ok(message: UMessage) -> UMessage:
    """An OK is not mapped: it is the same as none."""
    return message.with_attributes(commstatus=message.attributes.commstatus or None)


@pytest.mark.parametrize("case", cases("umessages"))
def test_messages_of_the_vectors_are_the_events_of_the_vectors(case: Any) -> None:
    message = UMessage.from_bytes(bytes.fromhex(case["hex"]))
    event = to_json(message)
    assert event == case["cloudevent_json"]
    for form in (event, json.dumps(event), json.dumps(event).encode()):
        assert from_json(form) == without_ok(message)
    assert from_protobuf(to_protobuf(message)) == without_ok(message)


@pytest.mark.parametrize(
    ("format", "payload", "member"),
    [
        (UPayloadFormat.UNSPECIFIED, b"\xff", "binary_data"),
        (UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, STRING_IN_ANY, "proto_data"),
        (UPayloadFormat.PROTOBUF, b"\x08\x01", "proto_data"),
        (UPayloadFormat.JSON, b'{"a":1}', "text_data"),
        (UPayloadFormat.SOMEIP, b"\xff", "binary_data"),
        (UPayloadFormat.SOMEIP_TLV, b"\xff", "binary_data"),
        (UPayloadFormat.RAW, b"\xff", "binary_data"),
        (UPayloadFormat.TEXT, "ä".encode(), "text_data"),
        # what is not what it says goes as it is
        (UPayloadFormat.TEXT, b"\xff", "binary_data"),
        (UPayloadFormat.JSON, b"\xff", "binary_data"),
        (UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, b"\xff", "proto_data"),
        (UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, b"\x12\x01a\x0a\x01b", "proto_data"),
    ],
)
def test_a_payload_is_in_the_member_of_its_format(
    format: UPayloadFormat, payload: bytes, member: str
) -> None:
    message = make.publish(TOPIC, payload, payload_format=format)
    data = to_protobuf(message)
    assert proto.CloudEvent.FromString(data).WhichOneof("data") == member
    assert from_protobuf(data) == message


def test_an_any_is_the_value_of_the_any_that_an_event_has() -> None:
    form = UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY
    message = make.publish(TOPIC, STRING_IN_ANY, payload_format=form)
    event = proto.CloudEvent.FromString(to_protobuf(message))
    assert event.proto_data.type_url == "type.googleapis.com/google.protobuf.Any"
    assert event.proto_data.value == STRING_IN_ANY
    event.proto_data.type_url = ""  # as up-rust writes it
    assert from_protobuf(event.SerializeToString()) == message
    event.proto_data.ParseFromString(STRING_IN_ANY)  # as others may read the same table
    assert from_protobuf(event.SerializeToString()) == message


@pytest.mark.parametrize("format", list(UPayloadFormat)[:-1])
def test_an_empty_payload_is_not_lost(format: UPayloadFormat) -> None:
    message = make.publish(TOPIC, b"", payload_format=format)
    assert from_protobuf(to_protobuf(message)) == message
    assert from_json(to_json(message)) == message
    without = make.publish(TOPIC)
    assert from_protobuf(to_protobuf(without)) == from_json(to_json(without)) == without


def test_attributes_have_the_types_of_the_table() -> None:
    request = make.request(ENTITY, METHOD, b"x", ttl=5, token="t", permission_level=2)
    event = proto.CloudEvent.FromString(to_protobuf(request))
    found = {name: value.WhichOneof("attr") for name, value in event.attributes.items()}
    assert found == {
        "sink": "ce_uri_ref",
        "priority": "ce_string",
        "ttl": "ce_integer",
        "token": "ce_string",
        "plevel": "ce_integer",
    }
    assert (event.spec_version, event.type) == ("1.0", "up-req.v1")
    answer = make.error_response(request, UCode.ABORTED)
    event = proto.CloudEvent.FromString(to_protobuf(answer, dataschema="type.example/UStatus"))
    assert event.attributes["commstatus"].ce_integer == 10
    assert event.attributes["pformat"].ce_integer == 2
    assert event.attributes["reqid"].ce_string == str(request.attributes.id)
    assert event.attributes["dataschema"].ce_uri == "type.example/UStatus"
    assert event.proto_data.type_url == "type.example/UStatus"
    assert event.proto_data.value == answer.payload


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff", b"NaN", b'"\\ud800"', b"[" * 100_000, b"1" * 5000, b"1e999"],
    ids=["empty", "half", "binary", "nan", "surrogate", "deep", "long", "infinite"],
)
def test_what_says_json_and_is_not_goes_as_base64(payload: bytes) -> None:
    message = make.publish(TOPIC, payload, payload_format=UPayloadFormat.JSON)
    event = to_json(message)
    json.dumps(event).encode()
    assert from_json(json.dumps(event)).attributes == message.attributes
    assert "data" not in event
    assert from_json(json.dumps(event)) == message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ttl": 2**31}, "ttl"),
        ({"permission_level": 2**31}, "plevel"),
        ({"payload_format": UPayloadFormat.SHM}, "pformat"),
        ({"priority": UPriority(9)}, "priority"),
        ({"type": UMessageType.UNSPECIFIED}, "type"),
        ({"id": None}, "id"),
        ({"source": None}, "source"),
    ],
)
def test_what_has_no_mapping_is_refused(changes: dict[str, Any], field: str) -> None:
    message = make.publish(TOPIC, b"x").with_attributes(**changes)
    for write in (to_json, to_protobuf):
        with pytest.raises(InvalidMessage) as caught:
            write(message)
        assert caught.value.field == field


GOOD = {
    "specversion": "1.0",
    "id": "018bcfe5-6800-7123-8000-000000abcdef",
    "source": "up://a/1/1/8000",
    "type": "up-pub.v1",
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"specversion": "0.3"}, "specversion"),
        ({"specversion": None}, "specversion"),
        ({"id": "x"}, "id"),
        ({"id": 5}, "id"),
        ({"source": "http://a"}, "source"),
        ({"type": "pub.v1"}, "type"),
        ({"type": []}, "type"),
        ({"sink": ""}, "sink"),
        ({"priority": "CS9"}, "priority"),
        ({"ttl": "5"}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": 5.0}, "ttl"),
        ({"ttl": 2**31}, "ttl"),
        ({"pformat": 8, "data_base64": ""}, "pformat"),
        ({"reqid": ""}, "reqid"),
        ({"token": None}, "token"),
        ({"token": "\ud800"}, "token"),
        ({"data": "x", "data_base64": ""}, "data"),
        ({"data": 5}, "data"),
        ({"data": "\ud800"}, "data"),
        ({"data": "\ud800", "pformat": 3}, "data"),
        ({"data_base64": "*"}, "data_base64"),
        ({"data_base64": 5}, "data_base64"),
        ({"data_base64": "ä"}, "data_base64"),
    ],
)
def test_a_bad_event_is_refused_by_its_member(changes: dict[str, Any], field: str) -> None:
    assert from_json(GOOD | {"extension": 1, "time": "2026-01-01T00:00:00Z"}).validate() == []
    with pytest.raises(InvalidMessage) as caught:
        from_json(GOOD | changes)
    assert caught.value.field == field


@pytest.mark.parametrize("name", list(GOOD))
def test_what_every_event_has_must_be_there(name: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        from_json({key: value for key, value in GOOD.items() if key != name})
    assert caught.value.field == name


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{", b"\xff", "[" * 100_000])
def test_what_is_not_a_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidMessage, match="JSON"):
        from_json(text)


def test_bad_protobuf_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="decode"):
        from_protobuf(b"\x0a")
    with pytest.raises(InvalidMessage, match="specversion"):
        from_protobuf(b"")
    event = proto.CloudEvent.FromString(to_protobuf(make.publish(TOPIC)))
    event.attributes["ttl"].ce_string = "5"
    with pytest.raises(InvalidMessage, match="ttl"):
        from_protobuf(event.SerializeToString())
    event.attributes["ttl"].ce_integer = 5
    event.proto_data.value = b"x"
    with pytest.raises(InvalidMessage, match="proto_data"):
        from_protobuf(event.SerializeToString())


@given(messages(shared_memory=False))
def test_protobuf_events_come_back(message: UMessage) -> None:
    assert from_protobuf(to_protobuf(message)) == without_ok(message)


@given(messages(shared_memory=False))
def test_json_events_come_back(message: UMessage) -> None:
    event = to_json(message)
    found = from_json(json.dumps(event))
    assert found.attributes == without_ok(message).attributes
    if message.attributes.payload_format != UPayloadFormat.JSON or "data_base64" in event:
        assert found.payload == message.payload


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=10,
)


@given(_VALUES)
def test_json_in_json_comes_back(value: Any) -> None:
    text = json.dumps(value)
    message = make.publish(TOPIC, text.encode(), payload_format=UPayloadFormat.JSON)
    found = from_json(json.dumps(to_json(message)))
    assert found.payload is not None
    assert json.loads(found.payload) == value
