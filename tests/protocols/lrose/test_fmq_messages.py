"""Each short way to encode and decode messages gives what the general one does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import open_reader, open_writer
from penstock.core.errors import InvalidOption, Malformed, MessageTooLarge
from penstock.protocols.lrose import fmq_writer
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import (
    LARGEST_INFO,
    MOST,
    PAYLOAD_AT,
    Messages,
    _decode_any,
    decode_messages,
    decode_rows,
    encode_message,
    encode_messages,
    encode_rows,
    encode_write,
    encode_written,
    find_write,
    find_written,
    is_write,
    reply_header,
    split_rows,
    written_reply,
)
from penstock.protocols.lrose.fmq_wire import OURS, SOCKET_ID, Init, Op, OpenMode, encode_init
from penstock.protocols.lrose.sku import HTTP_REPLY, Decoder, Frame, encode
from protocols.lrose.serving import Caller, served
from protocols.lrose.test_fmq_fuzz import mutated
from protocols.lrose.test_fmq_wire import one_by_one

# --- messages of one length ---------------------------------------------------------------------

INT32 = st.integers(-(2**31), 2**31 - 1)
HEAD = DsMessage(Op.WRITE)


def alike(payloads: Sequence[bytes], type: int, subtype: int, time: int) -> Messages:
    count = len(payloads)
    plain = [len(payload) for payload in payloads]
    none = [0] * count
    kinds, times = ([type] * count, [subtype] * count), [time] * count
    return Messages(*kinds, none, plain, none, times, list(payloads))


@given(st.integers(2, 30), st.integers(0, 30), INT32, INT32, st.sampled_from([0, 1_700_000_000]))
def test_messages_alike_are_encoded_by_the_general_rules_and_come_back(
    count: int, size: int, type: int, subtype: int, time: int
) -> None:
    payloads = [bytes([n]) * size for n in range(count)]
    data = encode_messages(HEAD, payloads, types=type, subtypes=subtype, times=time)
    messages = alike(payloads, type, subtype, time)
    assert data == one_by_one(HEAD, messages)
    assert decode_messages(data) == (HEAD, messages)
    assert decode_rows(data, count) is not None
    assert list(split_rows(data, count, size)) == payloads


def test_payloads_that_are_not_bytes_are_left_as_they_are() -> None:
    payloads: list[bytearray | memoryview] = [
        bytearray(b"abc"),
        memoryview(b"def"),
        bytearray(b"ghi"),
    ]
    data = encode_messages(HEAD, payloads, types=1, subtypes=2)
    assert decode_messages(data)[1].payloads == [b"abc", b"def", b"ghi"]
    assert bytes(payloads[2]) == b"ghi"


@given(st.integers(2, 20), st.integers(0, 20), st.randoms(use_true_random=False))
def test_rows_are_encoded_by_the_general_rules(
    count: int, size: int, chance: random.Random
) -> None:
    infos = np.array(
        [[chance.randrange(-(2**31), 2**31) for _ in range(7)] for _ in range(count)], np.int64
    )
    infos[:, 2] = size
    payloads = [chance.randbytes(size) for _ in range(count)]
    rows = np.frombuffer(b"".join(payloads), np.uint8).reshape(count, size)
    data = encode_rows(reply_header(2 * count), infos, rows)
    types, subtypes, _, packed, plain, ids, times = infos.T.tolist()
    messages = Messages(types, subtypes, packed, plain, ids, times, payloads)
    head = DsMessage(Op.REPLY, Op.READ)
    assert data is not None
    assert bytes(data) == one_by_one(head, messages)
    assert decode_messages(bytes(data)) == (head, messages)


def test_lengths_that_differ_or_do_not_fit_each_other_take_the_long_way() -> None:
    data = encode_messages(HEAD, [b"x" * 9] * 7 + [b"y" * 10], types=1, subtypes=2)
    assert decode_rows(data, 8) is None
    assert decode_messages(data)[1].payloads[7] == b"y" * 10
    whole = encode_messages(HEAD, [b"x" * 9] * 8, types=1, subtypes=2)
    assert decode_rows(whole[:-1], 8) is None
    assert decode_rows(whole, MOST + 1) is None
    assert decode_rows(whole, 1) is None
    assert decode_rows(b"", 8) is None


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_fuzz_what_is_decoded_at_once_is_what_one_by_one_gives(count: int) -> None:
    chance = random.Random(13)
    seeds = [
        encode_messages(HEAD, [bytes([n]) * size for n in range(8)], types=1, subtypes=2)
        for size in (0, 1, 8, 30)
    ]
    at_once = refused = 0
    for _ in range(count):
        data = mutated(chance.choice(seeds), chance)
        try:
            expected = _decode_any(DsMessage.from_bytes(data))
        except Malformed:
            refused += 1
            with pytest.raises(Malformed):
                decode_messages(data)
            continue
        assert decode_messages(data)[1] == expected
        at_once += decode_rows(data, 8) is not None
    assert at_once
    assert refused


# --- through a server ---------------------------------------------------------------------------

KINDS = {
    "alike": [b"%04d" % n + bytes(300) for n in range(1200)],
    "empty": [b""] * 300,
    "mixed": [bytes([n % 256]) * (n * 31 % 700) for n in range(1500)],
    "large": [bytes([n]) * 150_000 for n in range(12)],
    "alike, then not": [bytes(64)] * 400 + [bytes(65)] + [bytes(64)] * 400,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compress", ["off", "gzip"])
@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_many_messages_of_all_kinds_arrive_in_order(
    tmp_path: Path, layout: str, compress: str, kind: str
) -> None:
    payloads = KINDS[kind]
    with served(tmp_path, layout=layout) as server:
        url = f"{server.url}/q"
        with open_writer(url, compress=compress, slots=2000, size="10M") as writer:
            assert writer.write_many(payloads, type=5, subtype=6) == len(payloads) - 1
            books = writer.statistics()
        with open_reader(url, start="start") as reader:
            found = list(reader.available())
        with open_reader(url, start="start", type=6, filter="server") as reader:
            assert list(reader.available()) == []
        counted = server.statistics()
    assert [m.payload for m in found] == payloads
    assert {(m.type, m.subtype) for m in found} == {(5, 6)}
    assert [m.seq for m in found] == list(range(len(payloads)))
    assert (books.messages, books.refused) == (len(payloads), 0)
    assert books.bytes == sum(map(len, payloads))
    assert counted.requests == counted.replies + counted.unanswered


@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=60))
def test_requests_are_no_larger_than_they_may_be_and_hold_every_message_once(
    lengths: list[int],
) -> None:
    rows = list(fmq_writer._requests(lengths))
    assert [n for part in rows for n in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in rows:
        size = sum(lengths[part]) + LARGEST_INFO * len(lengths[part])
        assert size <= fmq_writer._REQUEST_BYTES or len(lengths[part]) == 1


# --- requests to write one plain message --------------------------------------------------------


@given(st.binary(max_size=50), INT32, INT32, st.integers(1, 2**31 - 1))
def test_a_short_write_has_the_bytes_of_a_long_one(
    payload: bytes, type: int, subtype: int, seq: int
) -> None:
    message = encode_message(HEAD, payload, type, subtype, uncompressed_len=len(payload))
    whole = encode(Frame(SOCKET_ID, seq, message))
    assert encode_write(seq, payload, type, subtype) == whole
    end = PAYLOAD_AT + len(payload)
    assert find_write(bytearray(whole) + b"rest of a buffer", len(whole)) == (type, subtype, end)
    assert whole[PAYLOAD_AT:end] == payload


@given(INT32, st.integers(1, 2**31 - 1))
def test_a_short_reply_has_the_bytes_of_a_long_one(mode: int, seq: int) -> None:
    whole = encode(Frame(SOCKET_ID, seq, written_reply(mode)))
    assert encode_written(seq, mode) == whole
    assert find_written(whole, len(whole)) == mode
    assert find_written(whole, len(whole) - 1) is None


def test_what_is_not_the_usual_write_is_left_to_the_long_way() -> None:
    others = [
        encode_message(HEAD, b"abc", 1, 2, pre_compressed=1, uncompressed_len=9),
        encode_message(HEAD, b"abc", 1, 2, time=1_700_000_000),
        encode_message(HEAD._replace(flags=OURS), b"abc", 1, 2),
        encode_message(DsMessage(Op.READ), b"abc", 1, 2),
        HEAD.to_bytes(),
    ]
    for payload in others:
        whole = encode(Frame(SOCKET_ID, 1, payload))
        assert find_write(whole, len(whole)) is None
    two = encode_write(1, b"abc", 1, 2) + encode_write(2, b"def", 1, 2)
    assert find_write(two, len(two)) is None
    assert find_write(two[:100], 100) is None


def test_a_frame_is_not_looked_for_behind_the_end_of_a_buffer() -> None:
    whole = encode_write(1, b"abc", 1, 2)
    for find in (find_write, find_written):
        for size in (len(whole) + 1, -1, 2**62):
            with pytest.raises(IndexError):
                find(bytearray(whole), size)
    for type, subtype in ((2**31, 0), (0, -(2**31) - 1)):
        with pytest.raises(OverflowError):
            encode_write(1, b"abc", type, subtype)
    with pytest.raises(OverflowError):
        encode_written(1, 2**31)


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_fuzz_what_is_known_at_a_glance_is_what_the_long_way_finds(count: int) -> None:
    chance = random.Random(11)
    seeds = [encode_write(7, bytes(size), 3, 4) for size in (0, 1, 8, 60)]
    known = unknown = 0
    for _ in range(count):
        data = mutated(chance.choice(seeds), chance)
        found = find_write(bytearray(data), len(data))
        if found is None:
            unknown += 1
            continue
        known += 1
        type, subtype, end = found
        (frame,) = Decoder(1 << 16).feed(data)
        assert is_write(frame.payload)
        _, messages = decode_messages(frame.payload)
        assert messages.rows(0)._replace(uncompressed_lens=[], ids=[]) == (
            ([type], [subtype], [0], [], [], [0], [data[PAYLOAD_AT:end]])
        )
    assert known
    assert unknown


@pytest.mark.parametrize("count", [20_000])
def test_fuzz_a_reply_known_at_a_glance_is_what_the_long_way_finds(count: int) -> None:
    chance = random.Random(12)
    known = 0
    for _ in range(count):
        data = mutated(encode_written(3, 4), chance)
        mode = find_written(bytearray(data), len(data))
        if mode is not None:
            known += 1
            (frame,) = Decoder(1 << 16).feed(data)
            assert DsMessage.from_bytes(frame.payload) == DsMessage(Op.REPLY, Op.WRITE, mode)
    assert 0 < known < count


# --- through a server ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["classic", "wide"])
@pytest.mark.parametrize("compress", ["off", "gzip"])
def test_single_writes_of_all_kinds_arrive_in_order(
    tmp_path: Path, layout: str, compress: str
) -> None:
    payloads = [bytes([n % 256]) * (n * 37 % 300) for n in range(120)]
    with served(tmp_path, layout=layout) as server:
        with open_writer(f"{server.url}/q", compress=compress) as writer:
            for n, payload in enumerate(payloads):
                assert writer.write(payload, type=n, subtype=-n) == n
            books = writer.statistics()
        with open_reader(f"{server.url}/q", start="start") as reader:
            found = list(reader.available())
        counted = server.statistics()
    assert [(m.type, m.subtype, m.payload) for m in found] == [
        (n, -n, payload) for n, payload in enumerate(payloads)
    ]
    assert (books.messages, books.refused) == (120, 0)
    assert books.bytes == sum(map(len, payloads))
    assert counted.requests == counted.replies + counted.unanswered


def test_a_message_that_does_not_fit_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    with served(tmp_path) as server, open_writer(f"{server.url}/q?size=4096") as writer:
        writer.write(b"before")
        with pytest.raises(MessageTooLarge) as refusal:
            writer.write(bytes(5000))
        assert refusal.value.size == 5000
        with pytest.raises(InvalidOption):
            writer.write(b"x", type=2**31)
        assert writer.write(b"after") == 1
        books = writer.statistics()
        assert (books.messages, books.refused, books.bytes) == (2, 2, 11)


def test_writes_that_come_in_pieces_or_together_are_each_carried_out(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        opening = Init("fmqp:://localhost:5443:q", OpenMode.CREATE, 0, is_ours=True)
        assert caller.ask(encode_init(opening)).error == 0
        first, second, third, fourth = (encode_write(n, b"%d" % n, n, 0) for n in range(2, 6))
        for piece in (first[:10], first[10:90], first[90:] + second + third[:30]):
            caller.socket.sendall(piece)
        caller.socket.sendall(third[30:])
        modes = [caller.hear().mode for _ in range(3)]
        caller.socket.sendall(b"POST / HTTP/1.1\r\n\r\n")
        caller.socket.sendall(fourth)
        caller.socket.settimeout(10)
        assert caller.socket.recv(len(HTTP_REPLY)) == HTTP_REPLY
        modes.append(caller.hear().mode)
        assert modes == [0, 1, 2, 3]
        with open_reader(f"{server.url}/q", start="start") as reader:
            assert [m.payload for m in reader.available()] == [b"2", b"3", b"4", b"5"]
