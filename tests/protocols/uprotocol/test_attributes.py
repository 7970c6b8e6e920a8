"""Attributes: their bytes, which survive a hop (docs/specs/uprotocol.md 3.1, R9)."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.uprotocol import message as module
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import validate
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases

UNKNOWN = bytes.fromhex("c23e03616263")  # field 1000
KNOWN: dict[str, Any] = {
    "id": UUID7.parse("018bcfe5-6800-7123-8000-000000abcdef"),
    "type": UMessageType.REQUEST,
    "source": UUri("a", 1, 1, 0),
    "sink": UUri("b", 2, 1, 3),
    "priority": UPriority.CS4,
    "ttl": 5000,
    "permission_level": 2,
    "commstatus": UCode.OK,
    "reqid": UUID7.parse("018bcfe5-660c-7456-8000-000000000042"),
    "token": "tok",
    "traceparent": "",
    "payload_format": UPayloadFormat.TEXT,
}


@pytest.mark.parametrize("case", cases("attributes_validation"))
def test_attributes_of_the_vectors_decode_and_keep_their_bytes(case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    for found in (UAttributes.from_bytes(data), UAttributes._from_any_bytes(data)):
        assert found.to_bytes() == data
        fields = case["attributes"]
        assert found.ttl == fields.get("ttl")
        assert found.token == fields.get("token")
        assert found.traceparent == fields.get("traceparent")
        assert found.permission_level == fields.get("permission_level")
        assert (found.sink is None) == ("sink" not in fields)
        assert (found.source is None) == ("source" not in fields)
        assert (found.commstatus is None) == ("commstatus" not in fields)
        if "id" in fields:
            assert found.id is not None
            assert (found.id.msb, found.id.lsb) == tuple(map(int, fields["id"].values()))
        # made anew from its values, field by field
        assert dataclasses.replace(found, _origin=None).to_bytes() == data


def test_every_field_comes_back_with_its_type() -> None:
    given = UAttributes(**KNOWN)
    found = UAttributes.from_bytes(given.to_bytes())
    assert found == given
    for name, value in KNOWN.items():
        assert type(getattr(found, name)) is type(value), name


def test_absent_is_not_zero() -> None:
    absent = UAttributes.from_bytes(b"")
    assert absent == UAttributes()
    assert (absent.ttl, absent.token, absent.commstatus, absent.source) == (None,) * 4
    there = UAttributes.from_bytes(bytes.fromhex("1a00220030003800400052005a00"))
    assert there.source == there.sink == UUri()
    assert (there.ttl, there.permission_level, there.commstatus) == (0, 0, UCode.OK)
    assert there.token == there.traceparent == ""
    assert dataclasses.replace(there, _origin=None).to_bytes() == there.to_bytes()


@pytest.mark.parametrize("name", list(KNOWN))
def test_a_change_leaves_everything_else_as_it_was(name: str) -> None:
    origin = UAttributes(**KNOWN).to_bytes() + UNKNOWN
    given = UAttributes.from_bytes(origin)
    absent = getattr(UAttributes(), name)
    for changed in (given.replace(**{name: absent}), dataclasses.replace(given, **{name: absent})):
        data = changed.to_bytes()
        assert data != origin
        assert UNKNOWN in data
        found = UAttributes.from_bytes(data)
        assert found == changed
        assert getattr(found, name) == absent
        assert found.replace(**{name: KNOWN[name]}) == given


def test_unknown_fields_of_an_address_survive_a_change_of_another() -> None:
    source = UUri("a", 1, 1, 0x8000).to_bytes() + bytes.fromhex("7a0101")
    data = bytes([0x1A, len(source)]) + source + b"\x52\x03tok"
    changed = UAttributes.from_bytes(data).replace(token=None)
    assert changed.to_bytes() == data[: len(source) + 2]
    message = proto.UAttributes.FromString(changed.replace(ttl=3).to_bytes())
    assert message.source.SerializeToString() == source


def test_there_is_no_change_of_what_is_no_field() -> None:
    with pytest.raises(TypeError, match="colour"):
        UAttributes().replace(colour=1)


def test_a_change_is_judged_anew() -> None:
    data = UMessage.from_bytes(bytes.fromhex(cases("umessages")[0].values[0]["hex"])).to_bytes()
    valid = UMessage.attributes_of(data)
    assert validate(valid, has_payload=True) == []
    assert validate(valid.replace(source=None), has_payload=True) == ["publish-source"]
    assert validate(valid, has_payload=True) == []


def test_a_change_to_the_same_keeps_the_bytes() -> None:
    backwards = b"\x30\x05\x10\x01"  # ttl before type, which no encoder writes
    given = UAttributes.from_bytes(backwards)
    assert given.replace(ttl=5).to_bytes() == backwards
    assert given.replace(ttl=6).to_bytes() == b"\x10\x01\x30\x06"


def test_a_second_id_is_merged_as_protobuf_does() -> None:
    first = UAttributes(id=KNOWN["id"]).to_bytes()
    data = first + b"\x0a\x09\x09" + bytes(range(8))
    found = UAttributes.from_bytes(data)
    message = proto.UAttributes.FromString(data)
    assert found.id == UUID7.unchecked(message.id.msb, message.id.lsb)
    assert found.id.lsb == KNOWN["id"].lsb
    assert found.to_bytes() == data


def test_numbers_without_a_name_are_kept() -> None:
    data = bytes.fromhex("1009281940636063")
    found = UAttributes.from_bytes(data)
    assert (found.type, found.priority, found.commstatus) == (9, 25, 99)
    assert found.type.name == "UNKNOWN_9"
    assert not found.type.is_known
    assert found.payload_format.mime_type == ""
    assert dataclasses.replace(found, _origin=None).to_bytes() == data
    assert "type" in validate(found, has_payload=True)
    assert pickle.loads(pickle.dumps(found)).type == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"ttl": -1},
        {"ttl": 1 << 32},
        {"permission_level": 1 << 32},
        {"token": "\ud800"},
        {"traceparent": 5},
        {"source": UUri.unchecked("a", 1 << 32, 0, 0)},
    ],
)
def test_a_value_that_does_not_fit_is_refused_when_written(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage) as caught:
        UAttributes(**changes).to_bytes()
    assert caught.value.field == next(iter(changes))


@pytest.mark.parametrize("hex", ["0a", "0a12", "5201ff", "ff", "0a0a" + "00" * 4, "08"])
def test_bytes_that_do_not_decode_are_refused(hex: str) -> None:
    with pytest.raises(InvalidMessage, match="decode"):
        UAttributes.from_bytes(bytes.fromhex(hex))


def test_bytes_after_a_good_id_are_not_trusted() -> None:
    good = UAttributes(id=KNOWN["id"]).to_bytes()
    assert len(good) == 20
    for rest in (b"\x52\x01\xff", b"\x1a\x05a", b"\xff"):
        with pytest.raises(InvalidMessage, match="decode"):
            UAttributes.from_bytes(good + rest)


def test_a_token_is_not_shown_nor_remembered() -> None:
    given = UAttributes(**KNOWN)
    assert "tok'" not in repr(given)
    data = given.to_bytes()
    UAttributes.from_bytes(data)
    assert data[20:] not in module._remembered


def test_what_is_remembered_is_bounded() -> None:
    for number in range(10_000):
        source = UUri("a", number, 1, 0x8000)
        data = UAttributes(id=UUID7.new(), type=UMessageType.PUBLISH, source=source).to_bytes()
        assert UAttributes.from_bytes(data).source == source
    assert len(module._remembered) <= 4096
    long = UUri.unchecked("a" * 600, 1, 1, 0x8000)
    data = UAttributes(id=UUID7.new(), type=UMessageType.PUBLISH, source=long).to_bytes()
    assert UAttributes.from_bytes(data).source == long
    assert data[20:] not in module._remembered


@given(messages())
def test_read_and_write_are_inverse(message: UMessage) -> None:
    data = message.attributes.to_bytes()
    found = UAttributes.from_bytes(data)
    assert found == message.attributes
    assert found == UAttributes._from_any_bytes(data)
    assert found.to_bytes() == data
    assert pickle.loads(pickle.dumps(found)) == found


@given(st.binary(max_size=60))
def test_the_short_way_reads_what_the_long_way_reads(rest: bytes) -> None:
    data = UAttributes(id=KNOWN["id"]).to_bytes() + rest
    try:
        expected = UAttributes._from_any_bytes(data)
    except InvalidMessage:
        with pytest.raises(InvalidMessage):
            UAttributes.from_bytes(data)
    else:
        assert UAttributes.from_bytes(data) == expected
