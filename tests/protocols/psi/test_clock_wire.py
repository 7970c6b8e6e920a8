from __future__ import annotations

import struct

import pytest

from penstock.core.errors import Malformed
from penstock.protocols.psi import Truncated, WrongVersion
from penstock.protocols.psi.clock import (
    ClockReply,
    ClockReplyDecoder,
    ClockRequestDecoder,
    clock_offset_ns,
    encode_clock_request,
)
from penstock.protocols.psi.ticks import MAX_TICKS, ticks_to_ns
from protocols.psi.recordings import recording


def test_a_recorded_reply_is_read_and_written_again() -> None:
    data = recording("clock.s2c.bin")
    (reply,) = ClockReplyDecoder().feed(data)
    assert reply.machine == "vm"
    assert reply.time_ns == ticks_to_ns(int.from_bytes(data[:8], "little"))
    assert reply.to_bytes() == data


def test_a_request_is_a_version() -> None:
    assert ClockRequestDecoder().feed(encode_clock_request()) == [0]
    with pytest.raises(WrongVersion):
        ClockRequestDecoder().feed(b"\x01\x00")


def test_a_long_name_has_two_bytes_of_length() -> None:
    reply = ClockReply(0, "m" * 300)
    decoder = ClockReplyDecoder()
    found = [one for byte in reply.to_bytes() for one in decoder.feed(bytes([byte]))]
    assert found == [reply]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<q", -1),
        struct.pack("<q", MAX_TICKS + 1),
        struct.pack("<q", 0) + b"\xff\xff",
        struct.pack("<q", 0) + b"\x01\xff",
    ],
)
def test_a_reply_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        ClockReplyDecoder().feed(data)


def test_a_reply_that_breaks_off_is_truncated() -> None:
    decoder = ClockReplyDecoder()
    decoder.feed(recording("clock.s2c.bin")[:-1])
    with pytest.raises(Truncated):
        decoder.finish()


def test_half_of_the_round_trip_is_the_way_back() -> None:
    assert clock_offset_ns(server_ns=5_000, sent_ns=1_000, received_ns=1_400) == 3_800
