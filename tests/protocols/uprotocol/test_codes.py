"""The numbers of uProtocol are those of its schema (docs/specs/uprotocol.md 3.1)."""

from __future__ import annotations

import pickle
from enum import IntEnum

import pytest

from penstock.core.errors import PenstockError
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import (
    DeadLetterReason,
    SubscriptionStatus,
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
    UStatusError,
)
from penstock.protocols.uprotocol.errors import InvalidMessage


@pytest.mark.parametrize(
    ("enumeration", "message", "field", "prefix"),
    [
        (UCode, proto.UStatus, "code", ""),
        (UMessageType, proto.UAttributes, "type", "UMESSAGE_TYPE_"),
        (UPriority, proto.UAttributes, "priority", "UPRIORITY_"),
        (UPayloadFormat, proto.UAttributes, "payload_format", "UPAYLOAD_FORMAT_"),
        (SubscriptionStatus, proto.Subscription, "status", "STATUS_"),
        (DeadLetterReason, proto.DeadLetter, "reason", "DEAD_LETTER_REASON_"),
    ],
)
def test_names_and_numbers_are_those_of_the_schema(
    enumeration: type[IntEnum], message: type, field: str, prefix: str
) -> None:
    described = message.DESCRIPTOR.fields_by_name[field].enum_type  # type: ignore[attr-defined]
    assert {value.name: value.number for value in described.values} == {
        prefix + member.name: member.value for member in enumeration
    }


def test_codes_are_those_of_grpc() -> None:
    names = (
        "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS "
        "PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE "
        "UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
    )
    assert [code.name for code in UCode] == names.split()
    assert [code.value for code in UCode] == list(range(17))


def test_types_have_names_in_other_protocols() -> None:
    assert {type.name: type.ce_name for type in UMessageType} == {
        "UNSPECIFIED": "",
        "PUBLISH": "up-pub.v1",
        "REQUEST": "up-req.v1",
        "RESPONSE": "up-res.v1",
        "NOTIFICATION": "up-not.v1",
    }
    for type in UMessageType:
        if type:
            assert UMessageType.from_ce_name(type.ce_name) is type
    for name in ("", "pub.v1", "UP-PUB.V1"):
        with pytest.raises(InvalidMessage, match="not a type"):
            UMessageType.from_ce_name(name)


def test_a_class_is_one_less_than_its_number() -> None:
    for number in range(7):
        assert UPriority.from_name(f"CS{number}") == number + 1
        assert UPriority(number + 1).effective == number + 1
    assert UPriority.UNSPECIFIED.effective is UPriority.CS1
    for name in ("CS7", "cs1", "", "UNSPECIFIED", "UPRIORITY_CS1"):
        with pytest.raises(InvalidMessage, match="not a priority"):
            UPriority.from_name(name)


def test_formats_have_media_types() -> None:
    assert {format.value: format.mime_type for format in UPayloadFormat} == {
        0: "",
        1: "application/x-protobuf",
        2: "application/protobuf",
        3: "application/json",
        4: "application/x-someip",
        5: "application/x-someip_tlv",
        6: "application/octet-stream",
        7: "text/plain",
        8: "application/x-shm",
    }


def test_a_number_without_a_name_is_kept() -> None:
    unknown = UCode(99)
    assert unknown == 99
    assert unknown.name == "UNKNOWN_99"
    assert not unknown.is_known
    assert UCode.OK.is_known
    assert pickle.loads(pickle.dumps(unknown)) == unknown
    assert 99 not in set(UCode)
    for value in (1 << 31, -(1 << 31) - 1):
        with pytest.raises(ValueError):
            UCode(value)


def test_a_status_comes_back() -> None:
    for status in (UStatus(), UStatus(UCode.NOT_FOUND), UStatus(UCode.INTERNAL, "why")):
        assert UStatus.from_bytes(status.to_bytes()) == status
    assert (
        UStatus(UCode.UNAVAILABLE, "dispatcher").to_bytes().hex() == "080e120a64697370617463686572"
    )
    assert UStatus().is_ok
    with pytest.raises(InvalidMessage, match="UStatus"):
        UStatus.from_bytes(b"\x08")


def test_the_details_of_a_status_come_back() -> None:
    more = proto.Any_(
        type_url="type.googleapis.com/google.protobuf.StringValue", value=b"\x0a\x01x"
    )
    sent = proto.UStatus(code=3, message="why", details=[more, proto.Any_()]).SerializeToString()
    status = UStatus.from_bytes(sent)
    assert status.details == (more.SerializeToString(), b"")
    assert status.to_bytes() == sent
    assert UStatusError(status.code, status.message, details=status.details).status == status
    hash(status)


def test_an_error_carries_its_status_between_processes() -> None:
    error = UStatusError(UCode.NOT_FOUND, "nobody listens")
    assert isinstance(error, PenstockError)
    assert str(error) == "NOT_FOUND: nobody listens"
    again = pickle.loads(pickle.dumps(error))
    assert again.status == UStatus(UCode.NOT_FOUND, "nobody listens")
    assert str(UStatusError(UCode.ABORTED)) == "ABORTED"


@pytest.mark.parametrize("number", [0, 8, 99, -1, -(1 << 31)])
def test_a_priority_that_nobody_knows_counts_as_none(number: int) -> None:
    assert UPriority(number).effective == UPriority.CS1
