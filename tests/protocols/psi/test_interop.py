from __future__ import annotations

import struct

import pytest

from penstock.core.errors import InvalidOption, Malformed
from penstock.core.units import parse_time
from penstock.protocols.psi import Truncated
from penstock.protocols.psi.interop import (
    FrameDecoder,
    InteropMessage,
    decode_json,
    decode_timed_text,
    encode_frame,
    encode_json,
    encode_timed_text,
)
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS
from protocols.psi.recordings import recording


def test_recorded_json_is_read_and_written_again_to_the_tick() -> None:
    decoder = FrameDecoder()
    frames = decoder.feed(recording("tcpwriter_json.s2c.bin"))
    messages = [decode_json(frame) for frame in frames]
    assert [message.message for message in messages] == [43.5, 44.5, 45.5, 46.5, 47.5, 48.5]
    assert messages[0].originating_ns == parse_time("2026-11-15T08:55:22.1924398Z")
    assert [encode_json(message) for message in messages] == frames
    assert decoder.held == 0
    with pytest.raises(Truncated):  # it was recorded until somebody stopped it
        decoder.finish()


def test_recorded_texts_are_read_and_written_again() -> None:
    data = recording("tcpwriter_format_string.s2c.bin")
    frames = FrameDecoder().feed(data)
    messages = [decode_timed_text(frame) for frame in frames]
    assert [message.message for message in messages] == [f"v{n}.5" for n in range(50, 56)]
    assert b"".join(encode_frame(encode_timed_text(*message)) for message in messages) == data


def test_a_time_that_64_bits_cannot_hold_is_the_nearest_that_they_can() -> None:
    for text, time_ns in [
        ("0001-01-01T00:00:00", MIN_NS),
        ("1600-02-29T00:00:00.5Z", MIN_NS),
        ("9999-12-31T23:59:59.9999999Z", MAX_NS),
    ]:
        frame = f'{{"originatingTime":"{text}","message":1}}'.encode()
        assert decode_json(frame) == InteropMessage(time_ns, 1)
    first = encode_json(InteropMessage(MIN_NS, 1))
    assert b'"0001-01-01T00:00:00.0000000Z"' in first
    assert decode_json(first).originating_ns == MIN_NS


@pytest.mark.parametrize("length", [-1, 2**31 - 1, 1001])
def test_a_length_that_is_not_allowed_is_refused(length: int) -> None:
    with pytest.raises(Malformed):
        FrameDecoder(1000).feed(struct.pack("<i", length))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"originatingTime":5,"message":1}',
        b'{"originatingTime":"x","message":1}',
        b"[" * 100_000,
    ],
)
def test_json_that_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_json(data)
    with pytest.raises(InvalidOption):
        encode_json(InteropMessage(0, object()))
