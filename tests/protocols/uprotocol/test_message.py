"""Whole messages: bytes that survive a hop, and new ones (docs/specs/uprotocol.md 3, 10.2)."""

from __future__ import annotations

import base64
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.uprotocol import message as make
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import (
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
)
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases, uuri

TOPIC, ENTITY, METHOD = UUri("a", 1, 1, 0x8000), UUri("b", 2, 1, 0), UUri("c", 3, 1, 1)
UNKNOWN = bytes.fromhex("c23e03616263")  # field 1000


@pytest.mark.parametrize("case", cases("umessages"))
def test_messages_of_the_vectors_come_back(case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    found = UMessage.from_bytes(data)
    fields = case["message"]["attributes"]
    assert found.to_bytes() == data
    assert str(found.attributes.id) == case["uuid"]
    assert f"UMESSAGE_TYPE_{found.attributes.type.name}" == fields["type"]
    assert found.attributes.source == uuri(fields["source"])
    assert found.payload == base64.b64decode(case["message"]["payload"])
    assert (found.validate() == []) == case["valid"]
    # the same from its values alone
    anew = UMessage(dataclasses.replace(found.attributes, _origin=None), found.payload)
    assert anew.to_bytes() == data
    assert UMessage.attributes_of(data) == found.attributes
    assert UMessage.attributes_of(data).to_bytes().hex() == case["zenoh"]["attachment_hex"][2:]


ERRORS = [case for case in cases("umessages") if case.values[0]["id"].startswith("response-error")]


@pytest.mark.parametrize("case", ERRORS)
def test_error_responses_are_those_of_the_vectors(case: Any) -> None:
    expected = UMessage.from_bytes(bytes.fromhex(case["hex"]))
    attributes = expected.attributes
    request = make.request(
        attributes.sink or ENTITY,
        attributes.source or METHOD,
        b"x",
        ttl=5000,
        token="secret",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        id=attributes.reqid,
    )
    code = attributes.commstatus
    assert code is not None
    found = make.error_response(request, code, "dispatcher", id=attributes.id)
    assert found.to_bytes() == bytes.fromhex(case["hex"])
    assert found.payload is not None
    assert UStatus.from_bytes(found.payload) == UStatus(code, "dispatcher")


@pytest.mark.parametrize("code", [code for code in UCode if code])
def test_an_error_response_is_valid_and_copies_class_and_ttl(code: UCode) -> None:
    request = make.request(ENTITY, METHOD, priority=UPriority.CS6, ttl=77)
    found = make.error_response(request, code)
    assert found.validate() == []
    assert found.attributes.id != request.attributes.id
    assert found.attributes == UAttributes(
        id=found.attributes.id,
        type=UMessageType.RESPONSE,
        source=METHOD,
        sink=ENTITY,
        priority=UPriority.CS6,
        ttl=77,
        commstatus=code,
        reqid=request.attributes.id,
        payload_format=UPayloadFormat.PROTOBUF,
    )


def test_a_request_that_breaks_a_rule_of_class_or_ttl_is_still_answered() -> None:
    request = make.request(ENTITY, METHOD).with_attributes(priority=UPriority.CS0, ttl=None)
    found = make.error_response(request, UCode.INVALID_ARGUMENT)
    assert found.validate() == []
    assert found.attributes.priority == UPriority.CS4


def test_only_a_request_gets_an_error_response() -> None:
    others = [
        make.publish(TOPIC),
        make.notification(TOPIC, ENTITY),
        make.response(make.request(ENTITY, METHOD)),
        UMessage(UAttributes()),
    ]
    for other in others:
        with pytest.raises(InvalidMessage, match="only a request"):
            make.error_response(other, UCode.UNAVAILABLE)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"id": UUID7.unchecked(1, 2)},
        {"source": None},
        {"sink": None},
        {"source": UUri.unchecked("A", 1, 1, 0)},
        {"sink": TOPIC},
    ],
)
def test_a_request_without_addresses_or_id_cannot_be_answered(changes: dict[str, Any]) -> None:
    request = make.request(ENTITY, METHOD).with_attributes(**changes)
    with pytest.raises(InvalidMessage) as caught:
        make.error_response(request, UCode.INVALID_ARGUMENT)
    assert caught.value.rules


def test_new_messages_are_valid_and_of_now() -> None:
    request = make.request(ENTITY, METHOD, b"x", token="t", permission_level=1)
    made = [
        make.publish(TOPIC, b"x", payload_format=UPayloadFormat.TEXT, ttl=5),
        make.publish(TOPIC, sink=UUri.parse("//cloud/FFFFFFFF/FF/FFFF")),
        make.notification(TOPIC, ENTITY, b"x", priority=UPriority.CS0),
        request,
        make.response(request, b"y", commstatus=UCode.OK),
    ]
    assert [message.validate() for message in made] == [[]] * len(made)
    assert len({message.attributes.id for message in made}) == len(made)
    assert made[3].attributes.ttl == make.DEFAULT_TTL_MS
    assert made[4].attributes.reqid == request.attributes.id
    assert made[4].attributes.ttl == request.attributes.ttl


def test_a_new_message_that_would_break_a_rule_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="publish-source") as caught:
        make.publish(METHOD)
    assert caught.value.rules == ("publish-source",)
    with pytest.raises(InvalidMessage, match="payload-format-without-payload"):
        make.publish(TOPIC, payload_format=UPayloadFormat.RAW)
    with pytest.raises(InvalidMessage, match="request-priority"):
        make.request(ENTITY, METHOD, priority=UPriority.CS1)
    with pytest.raises(InvalidMessage, match="request-ttl"):
        make.request(ENTITY, METHOD, ttl=0)


def test_no_payload_is_not_an_empty_one() -> None:
    without, empty = make.publish(TOPIC), make.publish(TOPIC, b"")
    assert UMessage.from_bytes(without.to_bytes()).payload is None
    assert UMessage.from_bytes(empty.to_bytes()).payload == b""
    # where a transport does not tell, a format does
    assert UMessage.from_parts(without.attributes, b"").payload is None
    raw = without.attributes.replace(payload_format=UPayloadFormat.RAW)
    assert UMessage.from_parts(raw, b"").payload == b""
    assert UMessage.from_parts(raw, b"x").payload == b"x"


def test_unknown_fields_survive_every_change() -> None:
    origin = make.request(ENTITY, METHOD, b"payload", token="t")
    attributes = origin.attributes.to_bytes() + UNKNOWN
    data = bytes([0x0A, len(attributes)]) + attributes + b"\x12\x07payload" + UNKNOWN
    found = UMessage.from_bytes(data)
    assert found == origin
    assert found.to_bytes() == data
    assert found.replace(payload=b"payload").to_bytes() == data
    stripped = found.with_attributes(token=None).to_bytes()
    assert stripped.count(UNKNOWN) == 2
    assert UMessage.from_bytes(stripped).attributes.token is None
    assert UMessage.from_bytes(stripped).payload == b"payload"
    emptied = found.replace(payload=None).to_bytes()
    assert emptied.count(UNKNOWN) == 2
    assert UMessage.from_bytes(emptied).payload is None


def test_a_streamers_sink_comes_and_goes_without_a_trace() -> None:
    data = make.publish(TOPIC, b"x", ttl=3).to_bytes()
    plain = UMessage.from_bytes(data)
    sent = plain.with_attributes(sink=UUri.parse("//cloud/FFFFFFFF/FF/FFFF"))
    arrived = UMessage.from_bytes(sent.to_bytes())
    assert arrived.validate() == []
    assert arrived.with_attributes(sink=None).to_bytes() == data


def test_other_layouts_of_the_same_message_are_read() -> None:
    message = make.publish(TOPIC, b"xyz", ttl=3)
    attributes = message.attributes.to_bytes()
    first = bytes([0x0A, len(attributes)]) + attributes
    last = b"\x12\x03xyz"
    layouts = [
        first + last,
        last + first,
        b"\x12\x01a" + first + last,  # the last payload counts
        first + first + last,  # attributes are merged
        b"\x0a" + bytes([len(attributes) | 0x80, 0]) + attributes + last,  # long lengths
        first + b"\x12\x83\x00xyz",
        first + b"\x12\x83\x80\x80\x80\x00xyz",
        UNKNOWN + first + last,
        first + UNKNOWN + last,
        b"\x0a\x00" + first + last,
    ]
    for data in layouts:
        found = UMessage.from_bytes(data)
        assert found == message, data.hex()
        assert found.to_bytes() == data
        assert UMessage.attributes_of(data) == message.attributes


@pytest.mark.parametrize(
    "hex",
    [
        "0a",
        "0a05",
        "0a8080",
        "ff",
        "0a0112",
        "0a001205",
        "0a0012",
        "0a0012ffffffffff7f",
        "0a00120100ff",
    ],
)
def test_bytes_that_do_not_decode_are_refused(hex: str) -> None:
    with pytest.raises(InvalidMessage, match="decode"):
        UMessage.from_bytes(bytes.fromhex(hex))
    with pytest.raises(InvalidMessage, match="decode"):
        UMessage.attributes_of(bytes.fromhex(hex))


def test_nothing_is_a_message_without_attributes() -> None:
    found = UMessage.from_bytes(b"")
    assert found == UMessage(UAttributes())
    assert found.validate() == ["id", "type"]


@given(messages())
def test_read_and_write_are_inverse(message: UMessage) -> None:
    data = message.to_bytes()
    found = UMessage.from_bytes(data)
    assert found == message
    assert found.to_bytes() == data
    assert UMessage.from_bytes(memoryview(data)) == message  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(found)) == message
    theirs = proto.UMessage.FromString(data)
    assert theirs.SerializeToString(deterministic=True) == data
    assert theirs.HasField("payload") == (message.payload is not None)


@given(st.binary(max_size=80))
def test_any_bytes_are_read_as_protobuf_reads_them(data: bytes) -> None:
    try:
        expected = proto.UMessage.FromString(data)
    except proto.UNDECODABLE:
        with pytest.raises(InvalidMessage):
            UMessage.from_bytes(data)
        return
    found = UMessage.from_bytes(data)
    assert found.payload == (expected.payload if expected.HasField("payload") else None)
    assert found.attributes == UAttributes.from_bytes(expected.attributes.SerializeToString())
