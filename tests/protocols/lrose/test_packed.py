"""Messages packed into one: they come out as they went in, and nothing else does."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ds_message import DsMessage, Part
from penstock.protocols.lrose.packed import (
    PACKED_SUBTYPE,
    PACKED_TYPE,
    PackedMessage,
    pack,
    unpack,
)

int32 = st.integers(-(2**31), 2**31 - 1)
messages = st.lists(st.builds(PackedMessage, int32, int32, st.binary(max_size=50)), max_size=5)


@given(messages)
def test_messages_come_out_as_they_went_in(given: list[PackedMessage]) -> None:
    assert unpack(pack(given)) == given


def test_the_bytes_are_those_of_the_specification() -> None:
    body = pack([PackedMessage(5, -6, b"abc")])
    assert struct.unpack_from(">i", body) == (888999,)
    assert struct.unpack_from(">3i", body, 64) == (777888, 88, 11)
    assert body[88:] == struct.pack(">2i", 5, -6) + b"abc" + bytes(5)


def test_the_bytes_are_those_of_lroses_library() -> None:
    body = pack([PackedMessage(5, -6, b"abc"), PackedMessage(0, 0, b"")])
    assert body == bytes.fromhex(
        "000d90a7 ffffffff ffffffff 00000000 00000001 00000000 ffffffff 00000000 00000000 00000002"
        "00000000 00000000 00000000 00000000 00000000 00000000"
        "000bdea0 00000070 0000000b 00000000 00000000 00000000"
        "000bdea0 00000080 00000008 00000000 00000000 00000000"
        "00000005 fffffffa 61626300 00000000 00000000 00000000 00000000 00000000"
    )


def test_parts_of_another_kind_are_passed_over() -> None:
    parts = (Part(1, b"url\0"), Part(PACKED_SUBTYPE, bytes(8)))
    assert unpack(DsMessage(PACKED_TYPE, parts=parts).to_bytes()) == [PackedMessage(0, 0, b"")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        DsMessage(43007).to_bytes(),
        DsMessage(PACKED_TYPE, parts=(Part(PACKED_SUBTYPE, bytes(7)),)).to_bytes(),
        pack([PackedMessage(1, 2, b"abc")])[:90],
    ],
)
def test_what_is_no_packed_message_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(body)


@given(st.binary(max_size=40), st.integers(0, 200), messages)
def test_changed_bytes_are_read_or_refused(
    change: bytes, at: int, given: list[PackedMessage]
) -> None:
    body = bytearray(pack(given))
    body[at : at + len(change)] = change
    try:
        found = unpack(bytes(body))
    except Malformed:
        return
    assert sum(len(each.payload) for each in found) <= len(body)


def test_a_type_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidOption):
        pack([PackedMessage(2**31, 0, b"")])
