"""Datagrams that are changed at random: the server stays up, its memory and its books in order."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed
from penstock.protocols.lhhttt import encode_bytes, join_frames, split_frames
from penstock.protocols.lhhttt._frames import fitting
from penstock.protocols.lhhttt.commands import (
    RELIABLE,
    BadRequest,
    format_tags,
    parse_reply,
    parse_tags,
)
from penstock.protocols.lhhttt.frames import Frames
from protocols.lhhttt.queues import HOST, Asker, assert_balanced, served
from support.until import until

SEEDS = [
    encode_bytes(command)
    for command in (
        b"PUT:hello",
        b"PUT:" + b"x" * 300,
        "PUT:zw\u00f6lf".encode(),
        b"GET",
        b"SIZE",
        b"CAPS",
        b"RPUT:a:17:message",
        b"RPUTS:a:18:" + join_frames([b"1", b"22", b"", b"4444"]),
        b"RGET:a:1:50",
        b"RGETS:b:2:10:50",
        b"ACK:a:1.0-3,1.7",
        b"NACK:b:1.5:20",
    )
]
#: Datagrams that may be under way: the kernel has room for them.
WINDOW = 200


def _mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if at < len(data):
                data[at] = rng.randrange(256)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(5))
            case 2:
                del data[at : at + rng.randrange(5)]
            case _:
                data[at:at] = b"%d" % rng.randrange(30)
    if rng.random() < 0.5 and len(data) > 2:  # a frame around a command that is wrong
        return encode_bytes(bytes(data[2:]))
    return bytes(data)


@pytest.mark.parametrize(
    "count",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_mutated_datagrams_harm_nothing(count: int) -> None:
    rng = random.Random(count)
    with served(capacity=1000) as server, Asker(server.port) as probe:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect((HOST, server.port))
            for at in range(0, count, WINDOW):
                for _ in range(WINDOW):
                    sender.send(_mutated(rng))
                probe.ask(b"SIZE")  # so that it keeps up
                if at == count // 2 // WINDOW * WINDOW:
                    half = _resident()
        until(lambda: server.statistics().queue.waiting == 0)
        grown = _resident() - half
        books = server.statistics()
        assert probe.ask(b"CAPS") == b"CAPS:1:lease,dedup,batch"
    assert books.datagrams.received + books.datagrams.dropped == count + count // WINDOW
    assert books.datagrams.received == books.malformed + books.queue.commands
    assert_balanced(books.queue)
    assert books.malformed > count // 10
    assert books.queue.bad_requests > count // 100
    assert grown < 64 << 20


def _resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file on a disk
        return int(file.read().split()[1]) * 4096


@given(st.sampled_from(sorted(RELIABLE)), st.binary(max_size=80))
def test_what_follows_a_verb_is_a_request_or_a_bad_one(verb: bytes, rest: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert len(RELIABLE[verb](rest).client) <= 64


@given(st.binary(max_size=80))
def test_an_answer_is_one_or_malformed(answer: bytes) -> None:
    for text in (answer, b"MSGS:" + answer, b"MSG:1:1.1:" + answer, b"ERR:" + answer):
        with contextlib.suppress(Malformed):
            assert parse_reply(text).about in text


@given(st.lists(st.binary(max_size=300)))
def test_frames_that_are_joined_are_split_again(payloads: list[bytes]) -> None:
    joined = join_frames(payloads)
    assert joined == b"".join(map(encode_bytes, payloads))
    assert split_frames(joined) == payloads
    assert join_frames(payloads, b"head:") == encode_bytes(b"head:" + joined)
    if joined:
        with pytest.raises(Malformed):
            split_frames(joined + b"3")


@given(st.lists(st.binary(max_size=300)), st.data())
def test_frames_are_a_sequence_of_their_bodies(payloads: list[bytes], data: st.DataObject) -> None:
    frames = Frames.located(join_frames(payloads))
    start, end = (data.draw(st.integers(-len(payloads), len(payloads))) for _ in range(2))
    for some, wanted in ((frames, payloads), (frames[start:end], payloads[start:end])):
        assert list(some) == wanted
        assert [some[at] for at in range(len(some))] == wanted
        assert some.size == sum(map(len, wanted))
    assert list(Frames.of_one(b"12")) == [b"12"]


@given(st.lists(st.binary(max_size=30)), st.integers(0, 30), st.integers(0, 300))
def test_as_many_payloads_are_taken_as_fit(payloads: list[bytes], start: int, room: int) -> None:
    count = fitting(payloads, start, 5, room, 9)
    rest = payloads[start : start + 5]
    needed = [sum(map(len, rest[: n + 1])) + 9 * n for n in range(len(rest))]
    assert count == next((n for n, size in enumerate(needed) if size > room), len(rest))


RUNS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 10**12), st.integers(0, 100))


@given(st.lists(RUNS, min_size=1, max_size=50))
def test_tags_name_the_messages_that_they_were_made_of(runs: list[tuple[int, int, int]]) -> None:
    tags = [(epoch, first, first + more) for epoch, first, more in runs]
    assert parse_tags(format_tags(tags)) == tags
