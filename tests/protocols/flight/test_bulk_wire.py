"""What goes over a bulk connection: each end reads what the other writes, and nothing else."""

from __future__ import annotations

import contextlib
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Batch, Message, StreamId, batch_from_messages
from penstock.core.errors import Malformed
from penstock.protocols.flight.arrivals import check_buffers
from penstock.protocols.flight.bulk_wire import (
    ANSWER,
    HEAD,
    HELLO,
    Pack,
    encode_answer,
    encode_hello,
    parse_answer,
    parse_answer_head,
    parse_head,
    parse_hello,
    unpack_batch,
)
from penstock.protocols.flight.wire import MAX_RECORD, Failure, Outcome, Piece

ID = "0123456789abcdef" * 2

messages = st.builds(
    Message,
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.none() | st.binary(min_size=16, max_size=16).map(StreamId),
    st.none() | st.binary(max_size=40),
    st.binary(max_size=200),
)


def sent(pack: Pack, batch: Batch, piece: Piece) -> bytes:
    return b"".join(bytes(part) for part in pack.encode(batch, piece))


@given(st.lists(st.lists(messages, max_size=8), min_size=1, max_size=3), st.integers(0, 3))
def test_a_piece_reads_what_it_wrote_also_when_it_is_part_of_a_batch(
    batches: list[list[Message]], start: int
) -> None:
    pack = Pack()
    for number, each in enumerate(batches, 1):
        batch = batch_from_messages(each).slice(start)
        data = sent(pack, batch, Piece(number=number))
        head = parse_head(data[: HEAD.size], 1 << 20)
        record = data[HEAD.size : HEAD.size + head.record]
        rest = data[HEAD.size + head.record :]
        assert Piece.from_bytes(record) == Piece(number=number)
        assert len(rest) == head.batch
        found = unpack_batch(pa.py_buffer(rest))
        check_buffers(found)
        assert found.equals(batch)


def test_messages_are_not_copied_to_be_sent() -> None:
    batch = batch_from_messages([Message(0, 0, 0, 0, 0, None, None, bytes(100_000))])
    payload = batch.column("payload").buffers()[2]
    parts = Pack().encode(batch, Piece(number=1))
    assert payload.address in {part.address for part in parts if isinstance(part, pa.Buffer)}


@pytest.mark.parametrize(
    ("mark", "record", "batch", "field"),
    [
        (0, 10, 10, "mark"),
        (0x4543_4950, MAX_RECORD + 1, 10, "record"),
        (0x4543_4950, 10, (1 << 20) + (64 << 10) + 1, "batch"),
        (0x4543_4950, 10, 2**64 - 1, "batch"),
    ],
)
def test_a_head_that_promises_too_much_is_malformed(
    mark: int, record: int, batch: int, field: str
) -> None:
    with pytest.raises(Malformed) as caught:
        parse_head(HEAD.pack(mark, record, batch), 1 << 20)
    assert caught.value.where == field


def test_a_hello_has_the_key_and_nothing_else_is_one() -> None:
    assert parse_hello(encode_hello(ID)) == ID
    with pytest.raises(Malformed):
        parse_hello(b"GET / HTTP/1.1".ljust(HELLO.size))


@pytest.mark.parametrize(
    "said",
    [None, Outcome(number=3, written=2, last_seq=7), Failure(kind="NotFound", message="gone")],
)
def test_an_answer_reads_what_it_wrote(said: Outcome | Failure | None) -> None:
    data = encode_answer(said)
    head, record = data[: ANSWER.size], data[ANSWER.size :]
    assert parse_answer_head(head).record == len(record)
    assert parse_answer(head, record) == said


@pytest.mark.parametrize("head", [bytes(8), encode_answer(None)[:4] + struct.pack("<I", 1 << 30)])
def test_an_answer_that_is_none_is_malformed(head: bytes) -> None:
    with pytest.raises(Malformed):
        parse_answer_head(head)


@given(st.binary(max_size=400))
def test_fuzz_bytes_that_are_no_batch_are_malformed_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        unpack_batch(pa.py_buffer(data))


@given(st.data())
def test_fuzz_a_changed_batch_is_read_or_malformed(data: st.DataObject) -> None:
    batch = batch_from_messages([Message(1, 2, 3, 4, 5, None, b"some", b"payload")] * 5)
    whole = bytearray(b"".join(bytes(p) for p in Pack().encode(batch, Piece(number=1))[2:]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    with contextlib.suppress(Malformed):
        check_buffers(unpack_batch(pa.py_buffer(bytes(whole[:cut] if cut % 2 else whole))))
