from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ds_message import (
    Category,
    CommonPart,
    DsMessage,
    ErrorCode,
    Part,
    error_reply,
    int_part,
    is_known_category,
    text_part,
)
from protocols.lrose.recordings import RECORDINGS, frames_of, messages_of, recording

INT32 = st.integers(-(2**31), 2**31 - 1)
PARTS = st.lists(st.builds(Part, INT32, st.binary(max_size=60)), max_size=6).map(tuple)
MESSAGES = st.builds(
    DsMessage, INT32, INT32, INT32, INT32, INT32, INT32, INT32, INT32, INT32, PARTS
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_messages_encode_to_themselves(name: str) -> None:
    for frame in frames_of(recording(name)):
        assert DsMessage.from_bytes(frame.payload).to_bytes() == frame.payload


def test_the_recorded_opening_has_its_fields_and_parts() -> None:
    (opening, *_) = messages_of(recording("fmq_01.c2s"))
    assert opening.type == 43001
    assert opening.category == Category.START_GET
    assert [part.type for part in opening.parts] == [44001, CommonPart.URL]
    url = opening.part(CommonPart.URL)
    assert url is not None
    assert url.text == "fmqp:://localhost:15444:/tmp/fq/srv/rq"
    assert opening.part(12345) is None


@given(MESSAGES, st.booleans())
def test_a_message_comes_back_as_it_was_with_32_and_64_bit_headers(
    message: DsMessage, wide: bool
) -> None:
    data = message.to_bytes(wide=wide)
    assert DsMessage.from_bytes(data) == message
    if wide and message.parts:
        assert struct.unpack_from(">i", data, 40) == (1,)


@given(st.binary(max_size=60))
def test_a_part_is_padded_with_at_least_one_byte_to_a_multiple_of_8(data: bytes) -> None:
    assert len(DsMessage(0, parts=(Part(1, data),)).to_bytes()) == 88 + (len(data) // 8 + 1) * 8


def test_defaults_are_those_of_lrose() -> None:
    assert DsMessage(0) == messages_of(recording("fmq_00.c2s"))[0]._replace(
        category=Category.GENERIC
    )


def test_texts_end_with_a_nul_and_may_be_bytes_that_are_no_utf8() -> None:
    assert text_part(16, "été").data == "été\0".encode()
    assert Part(16, b"ab\0cd").text == "ab"
    assert Part(16, b"\xff").text.encode(errors="surrogateescape") == b"\xff"


def test_an_error_says_why() -> None:
    reply = error_reply(43010, 43007, ErrorCode.FAILED, "no such queue")
    assert DsMessage.from_bytes(reply.to_bytes()).error_text == "no such queue"
    assert DsMessage(0).error_text is None
    assert error_reply(0, 0, ErrorCode.NOT_SUPPORTED).to_bytes()[32:36] == b"\x80\0\0\0"


def test_categories_are_known_from_generic_on() -> None:
    assert [is_known_category(8389420 + n) for n in range(-1, 7)] == [False, *[True] * 6, False]


def _raw(n_parts: int, wide: int, rest: bytes) -> bytes:
    return struct.pack(">11i20x", 0, 0, 0, 0, 1, 0, 0, Category.GENERIC, 0, n_parts, wide) + rest


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "length"),
        (bytes(63), "length"),
        (_raw(-1, 0, b""), "nParts"),
        (_raw(2**31 - 1, 0, bytes(240)), "nParts"),
        (_raw(1, 0, bytes(23)), "nParts"),
        (_raw(1, 1, bytes(47)), "nParts"),
        (_raw(0, 2, b""), "partsAre64Bit"),
        (_raw(1, 0, struct.pack(">3i12x", 1, 88, -1)), "len of part 0"),
        (_raw(1, 0, struct.pack(">3i12x", 1, 88, 1)), "len of part 0"),
        (_raw(1, 0, struct.pack(">3i12x8x", 1, 87, 8)), "offset of part 0"),
        (_raw(1, 0, struct.pack(">3i12x8x", 1, 89, 8)), "offset of part 0"),
        (_raw(1, 0, struct.pack(">3i12x8x", 1, -1, 0)), "offset of part 0"),
        (_raw(1, 1, struct.pack(">3q24x8x", 1, 2**62, 8)), "offset of part 0"),
        (_raw(2, 0, struct.pack(">3i12x3i12x8x", 1, 112, 8, 1, 112, 8)), "len of part 1"),
    ],
)
def test_a_message_that_is_not_whole_and_right_is_refused(data: bytes, where: str) -> None:
    with pytest.raises(Malformed) as caught:
        DsMessage.from_bytes(data)
    assert caught.value.where == where


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidOption):
        DsMessage(2**31).to_bytes()
    with pytest.raises(InvalidOption):
        DsMessage(0, parts=(Part(2**31, b""),)).to_bytes()


def test_an_int_is_big_endian() -> None:
    assert int_part(5) == Part(CommonPart.INT, b"\0\0\0\5")
