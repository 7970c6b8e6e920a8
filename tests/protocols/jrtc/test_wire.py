"""Datagrams and frames, by the vectors of the original and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.batch import messages_from_batch
from penstock.core.errors import Malformed, MessageTooLarge
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.wire import (
    LARGEST_DATAGRAM,
    LARGEST_FRAME,
    FrameDecoder,
    batch_of_datagrams,
    pack,
    pack_frame,
    schema_key,
    unpack,
)
from protocols.jrtc.forwarded import STATUS, UP, VECTORS, stream_of

IDS = st.binary(min_size=16, max_size=16).map(StreamId)
SENT = [vector for vector in VECTORS["vectors"] if vector.get("datagram")]


@pytest.mark.parametrize("vector", SENT, ids=lambda vector: vector["case"])
def test_datagrams_of_the_original_are_an_id_and_a_payload(vector: dict[str, str]) -> None:
    datagram = bytes.fromhex(vector["datagram"])
    stream, payload = unpack(datagram)
    assert stream.hex() == vector["stream_id"]
    assert pack(stream, payload) == datagram


def test_a_datagram_shorter_than_an_id_is_malformed() -> None:
    for size in range(16):
        with pytest.raises(Malformed, match=f"{size} bytes"):
            unpack(bytes(size))
    assert unpack(STATUS) == (STATUS, b"")


def test_what_does_not_fit_a_datagram_is_refused_and_not_cut() -> None:
    assert len(pack(STATUS, bytes(LARGEST_DATAGRAM - 16))) == LARGEST_DATAGRAM
    with pytest.raises(MessageTooLarge):
        pack(STATUS, bytes(LARGEST_DATAGRAM - 15))


def test_a_schema_is_of_the_path_and_the_name_alone() -> None:
    keys = {
        schema_key(StreamId.generate(dst, device, "a/path", "a-name", ver))
        for dst, device, ver in ((2, 1, 0), (1, 126, 0), (4, 5, 63), (None, None, 0))
    }
    assert len(keys) == 1
    (key,) = keys
    assert (key.ver, key.fwd_dst, key.device_id) == (0, 0, 0)
    assert key.path == stream_of("x").from_bytes(key).path
    assert schema_key(stream_of("one-name")) != schema_key(stream_of("another-name"))


@given(st.lists(st.tuples(IDS, st.binary(max_size=50)), max_size=20))
def test_a_batch_of_datagrams_is_what_each_of_them_says(sent: list[tuple[StreamId, bytes]]) -> None:
    batch = batch_of_datagrams([pack(*each) for each in sent], 7, 99)
    messages = list(messages_from_batch(batch))
    assert [(m.stream, m.payload) for m in messages] == sent
    assert [m.seq for m in messages] == list(range(7, 7 + len(sent)))
    assert {m.time_ns for m in messages} <= {99}


@given(st.lists(st.tuples(IDS, st.binary(max_size=300)), max_size=8), st.data())
def test_frames_are_found_however_they_are_cut(
    sent: list[tuple[StreamId, bytes]], data: st.DataObject
) -> None:
    whole = b"".join(pack_frame(*each) for each in sent)
    decoder, found, at = FrameDecoder(), [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, 400))
        found += list(decoder.feed(whole[at : at + size]))
        at += size
    assert found == sent
    assert decoder.is_empty


def test_lengths_of_frames_are_not_signed_bytes() -> None:
    frame = pack_frame(STATUS, bytes(0x90))  # a length with a byte above 0x7f
    assert frame[:2] == b"\xa0\x00"
    assert list(FrameDecoder().feed(frame)) == [(STATUS, bytes(0x90))]
    largest = bytes(LARGEST_FRAME - 16)
    assert list(FrameDecoder().feed(pack_frame(STATUS, largest))) == [(STATUS, largest)]
    with pytest.raises(MessageTooLarge):
        pack_frame(STATUS, largest + b"x")


def test_a_frame_shorter_than_an_id_ends_a_stream() -> None:
    found = FrameDecoder().feed(pack_frame(STATUS, UP) + b"\x0f\x00" + bytes(15))
    assert next(found) == (STATUS, UP)
    with pytest.raises(Malformed):
        next(found)
