from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import (
    Envelope,
    MessageDecoder,
    PsiMessage,
    Truncated,
    UnknownStream,
    decode_message,
    encode_message,
    encode_messages,
)
from penstock.protocols.psi.ticks import MAX_NS, MAX_TICKS, MIN_NS

INT32 = st.integers(-(2**31), 2**31 - 1)
TIMES = st.sampled_from([MIN_NS, MAX_NS]) | st.integers(-(10**16), 10**16).map(lambda n: n * 100)
MESSAGES = st.lists(
    st.builds(PsiMessage, INT32, INT32, TIMES, TIMES, st.binary(max_size=100)), max_size=8
)
MESSAGE = PsiMessage(2, 1, 1000, 2000, b"abcd")


@given(MESSAGES, st.lists(st.integers(1, 60), max_size=30))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(
    messages: list[PsiMessage], cuts: list[int]
) -> None:
    data = encode_messages(messages)
    assert data == b"".join(map(encode_message, messages))
    decoder = MessageDecoder(100)
    found = []
    for cut in cuts:
        found += decoder.feed(bytearray(data[:cut]))
        data = data[cut:]
    found += decoder.feed(memoryview(data))
    assert found == messages
    decoder.finish()


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, 101])
def test_a_length_that_is_not_allowed_is_refused_at_once(length: int) -> None:
    decoder = MessageDecoder(100)
    data = encode_message(MESSAGE)
    good = encode_message(MESSAGE)
    assert decoder.feed(good + data[:24] + struct.pack("<i", length)) == [MESSAGE]
    with pytest.raises(Malformed, match="payload length"):
        decoder.feed(b"")


def test_a_length_of_2_gib_costs_no_memory() -> None:
    data = encode_message(MESSAGE)[:24] + struct.pack("<i", 2**31 - 1)
    decoder = MessageDecoder(2**31)
    tracemalloc.start()
    try:
        decoder.feed(data + bytes(1000))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert decoder.held == 1028
    with pytest.raises(Truncated):
        decoder.finish()


def test_a_source_that_nobody_announced_is_refused() -> None:
    announced = {2}
    decoder = MessageDecoder(known=announced)
    other = MESSAGE._replace(source_id=6)
    assert decoder.feed(encode_message(MESSAGE)) == [MESSAGE]
    announced.add(6)
    assert decoder.feed(encode_message(other)) == [other]
    with pytest.raises(UnknownStream) as caught:
        decoder.feed(encode_message(other._replace(source_id=7)))
    assert caught.value.stream == 7


@pytest.mark.parametrize("field", [8, 16])
def test_a_time_behind_the_last_one_is_refused(field: int) -> None:
    data = bytearray(encode_message(MESSAGE))
    data[field : field + 8] = struct.pack("<Q", MAX_TICKS + 1)
    with pytest.raises(Malformed, match="ticks"):
        MessageDecoder().feed(data)
    with pytest.raises(Malformed, match="ticks"):
        Envelope.from_bytes(data)


def test_the_kind_of_a_time_does_not_matter() -> None:
    data = bytearray(encode_message(MESSAGE))
    for kind in range(4):
        data[15] = data[15] & 0x3F | kind << 6
        assert MessageDecoder().feed(data) == [MESSAGE]


def test_a_datagram_holds_one_message_and_nothing_else() -> None:
    data = encode_message(MESSAGE)
    assert decode_message(data) == MESSAGE
    for wrong in (b"", data[:-1], data + data, data + b"x", data[:10]):
        with pytest.raises(Malformed):
            decode_message(wrong)


@given(MESSAGES)
def test_an_envelope_comes_out_as_it_went_in(messages: list[PsiMessage]) -> None:
    for message in messages:
        assert Envelope.from_bytes(message.envelope.to_bytes()) == message.envelope
    with pytest.raises(Truncated):
        Envelope.from_bytes(bytes(23))


def test_numbers_that_do_not_fit_are_not_sent() -> None:
    with pytest.raises(InvalidOption):
        encode_message(MESSAGE._replace(source_id=2**31))
    with pytest.raises(InvalidOption):
        MESSAGE.envelope._replace(sequence_id=2**31).to_bytes()
