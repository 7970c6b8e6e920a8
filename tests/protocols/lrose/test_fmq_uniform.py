"""Messages of one length travel as all others do, only sooner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import open_reader, open_writer
from penstock.core.errors import Malformed
from penstock.protocols.lrose import fmq_writer
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import (
    LARGEST_INFO,
    Messages,
    _decode_any,
    decode_messages,
    encode_messages,
)
from penstock.protocols.lrose.fmq_replies import reply_header
from penstock.protocols.lrose.fmq_uniform import MOST, decode_rows, encode_rows, split_rows
from penstock.protocols.lrose.fmq_wire import Op
from protocols.lrose.serving import served
from protocols.lrose.test_fmq_fuzz import mutated
from protocols.lrose.test_fmq_wire import one_by_one

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
