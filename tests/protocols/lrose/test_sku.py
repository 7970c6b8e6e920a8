from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.sku import (
    HTTP_REPLY,
    LARGEST_HTTP_HEADER,
    Decoder,
    Frame,
    encode,
    encode_header,
)
from protocols.lrose.recordings import RECORDINGS, frames_of, recording

INT32 = st.integers(-(2**31), 2**31 - 1)
FRAMES = st.lists(
    st.builds(Frame, INT32, INT32, st.binary(max_size=200), st.just(False)), max_size=8
)
POST = b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_bytes_are_frames_numbered_from_1_and_encode_to_themselves(name: str) -> None:
    frames = frames_of(recording(name))
    assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1))
    assert b"".join(map(encode, frames)) == recording(name)


@given(FRAMES, st.lists(st.integers(1, 50), max_size=30))
def test_frames_come_out_as_they_went_in_however_the_bytes_are_cut(
    frames: list[Frame], cuts: list[int]
) -> None:
    data = b"".join(map(encode, frames))
    decoder = Decoder(200)
    found = []
    for cut in cuts:
        found += decoder.feed(data[:cut])
        data = data[cut:]
    found += decoder.feed(data)
    assert found == frames
    assert decoder.held == 0


@given(INT32, INT32, st.binary(max_size=100))
def test_the_64_bit_form_is_read_a_byte_at_a_time(id: int, seq: int, payload: bytes) -> None:
    data = encode_header(id, seq, len(payload), wide=True) + payload
    assert data[:8] == b"\xf6" * 8
    assert len(data) == 32 + len(payload)
    decoder = Decoder(100)
    found = [frame for byte in data for frame in decoder.feed(bytes([byte]))]
    assert found == [Frame(id, seq, payload)]


def test_a_payload_that_32_bits_cannot_count_gets_the_64_bit_header() -> None:
    assert encode_header(1, 1, 2**31 - 2)[:8] == b"\xf0" * 8
    assert encode_header(1, 1, 2**31 - 1)[:8] == b"\xf6" * 8
    assert struct.unpack(">q", encode_header(1, 1, 2**31 - 1)[16:24]) == (2**31 - 1,)


def test_an_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidOption):
        encode_header(2**31, 1, 0)


def test_numbers_of_frames_begin_again_below_zero_as_those_of_c_do() -> None:
    assert encode_header(1, 2**31 - 1, 0)[16:20] == b"\x7f\xff\xff\xff"
    assert encode_header(1, 2**31, 0)[16:20] == b"\x80\0\0\0"
    assert encode_header(1, 2**32, 0)[16:20] == bytes(4)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", [-1, 101, 2**31 - 1])
def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come(wide: bool, size: int) -> None:
    cookie = b"\xf6" * 8 if wide else b"\xf0" * 8
    decoder = Decoder(100)
    with pytest.raises(Malformed, match="len should be 0 to 100") as caught:
        decoder.feed(cookie + struct.pack(">3q" if wide else ">3i", 0, size, 1))
    assert caught.value.found == size
    with pytest.raises(Malformed):
        decoder.feed(b"")
    assert decoder.held == 0


def test_frames_before_a_fault_are_delivered_and_then_the_fault() -> None:
    good = Frame(1, 1, b"good")
    decoder = Decoder(100)
    assert decoder.feed(encode(good) + b"rubbish, and more of it") == [good]
    assert decoder.fault is not None
    with pytest.raises(Malformed, match="cookie"):
        decoder.feed(b"")


@pytest.mark.parametrize("data", [b"G", b"\x00" * 40, b"\xf0" * 7 + b"\x01" * 20])
def test_bytes_that_are_no_frame_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(Malformed, match="cookie"):
        Decoder(100).feed(data)


@given(st.lists(st.integers(1, 30), max_size=10))
def test_a_server_takes_a_frame_behind_an_http_header_and_says_so(cuts: list[int]) -> None:
    frames = [Frame(5, 1, b"tunnelled", is_tunnelled=True), Frame(5, 2, b"plain")]
    data = POST + encode(Frame(5, 1, b"tunnelled")) + encode(frames[1])
    decoder = Decoder(100, allow_http=True)
    found = []
    for cut in cuts:
        found += decoder.feed(data[:cut])
        data = data[cut:]
    assert found + decoder.feed(data) == frames


def test_the_reply_to_a_tunnelled_frame_is_read_back_by_a_decoder_that_allows_it() -> None:
    frame = Frame(5, 1, b"reply", is_tunnelled=True)
    assert encode(frame).startswith(HTTP_REPLY)
    assert Decoder(100, allow_http=True).feed(encode(frame)) == [frame]
    with pytest.raises(Malformed, match="cookie"):
        Decoder(100).feed(encode(frame))


def test_an_http_header_without_an_end_is_refused() -> None:
    decoder = Decoder(100, allow_http=True)
    decoder.feed(b"GET / HTTP/1.1\r\n" + b"x" * 100)
    with pytest.raises(Malformed, match="HTTP header"):
        decoder.feed(b"x" * LARGEST_HTTP_HEADER)


def test_two_http_headers_in_a_row_are_refused() -> None:
    with pytest.raises(Malformed, match="cookie"):
        Decoder(100, allow_http=True).feed(POST + POST)


def test_a_decoder_holds_no_more_than_the_frame_that_is_not_whole() -> None:
    decoder = Decoder(1 << 20)
    whole = encode(Frame(1, 1, bytes(100_000)))
    for _ in range(20):
        assert len(decoder.feed(whole + whole[:30])) == 1
        assert len(decoder.feed(whole[30:])) == 1
        assert len(decoder._buffer) < 300_000
