from __future__ import annotations

import mmap
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed, MessageTooLarge
from penstock.protocols.psi import Chunker, Unchunker, decode_message
from penstock.protocols.psi.chunks import CHUNK_PAYLOAD, MAX_DATAGRAM, decode_chunk
from penstock.protocols.psi.handshake import decode_session_id, encode_session_id
from protocols.psi.recordings import expected, recording


def check_books(unchunker: Unchunker) -> None:
    books = unchunker.statistics()
    assert books.datagrams == books.used + books.refused + books.duplicate + books.late
    assert books.missing >= 0


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_a_recorded_session_datagram_is_read_and_written_again() -> None:
    data = recording("udp_session_datagram.bin")
    session = Unchunker().feed(data)
    assert session is not None
    assert Chunker().split(encode_session_id(decode_session_id(session))) == [data]


def test_recorded_datagrams_are_read_and_written_again() -> None:
    datagrams = [bytes.fromhex(one["hexHead"]) for one in expected("udp_datagrams.json")["basic"]]
    unchunker, chunker = Unchunker(), Chunker()
    for datagram in datagrams:
        message = unchunker.feed(datagram)
        assert message is not None
        assert decode_message(message).source_id in {2, 6}
        assert chunker.split(message) == [datagram]
    assert unchunker.statistics().completed == len(datagrams)
    assert unchunker.statistics().lost == 0


def test_a_large_message_is_cut_where_psi_cuts_it() -> None:
    recorded = expected("udp_datagrams.json")["bytes:65464"]
    head = bytes.fromhex(recorded[0]["hexHead"])[40:]
    message = head + bytes(28 + 65472 - len(head))
    datagrams = Chunker().split(message)
    assert [len(datagram) for datagram in datagrams] == [one["size"] for one in recorded[:2]]
    for datagram, one in zip(datagrams, recorded[:2], strict=True):
        assert datagram[:40] == bytes.fromhex(one["hexHead"])[:40]


def test_a_message_that_psis_own_chunker_cut_short_is_noticed() -> None:
    recorded = expected("udp_datagrams.json")["bytes:65444"]
    message = Unchunker().feed(bytes.fromhex(recorded[0]["hexHead"]))
    assert message is not None
    with pytest.raises(Malformed):
        decode_message(message)


@pytest.mark.parametrize(
    "size", [0, 1, 65455, 65456, 65457, 65495, 65496, 2 * 65456, 2 * 65496 - 1, 300_000]
)
def test_every_size_arrives_whole_also_those_that_psi_spoils(size: int) -> None:
    message = payload(size)
    datagrams = Chunker().split(message)
    assert all(len(datagram) <= MAX_DATAGRAM for datagram in datagrams)
    random.Random(2).shuffle(datagrams)
    unchunker = Unchunker()
    found = [whole for datagram in datagrams if (whole := unchunker.feed(datagram)) is not None]
    assert found == [message]
    check_books(unchunker)


def test_a_chunk_that_comes_twice_does_not_make_a_message() -> None:
    chunker, unchunker = Chunker(), Unchunker()
    first, second = chunker.split(payload(70_000))
    assert unchunker.feed(first) is None
    assert unchunker.feed(first) is None
    assert unchunker.feed(second) == payload(70_000)
    assert unchunker.feed(second) is None
    books = unchunker.statistics()
    assert (books.used, books.duplicate, books.late, books.completed) == (2, 1, 1, 1)
    check_books(unchunker)


def test_a_set_that_another_one_interrupts_is_lost_and_its_rest_does_no_harm() -> None:
    chunker, unchunker = Chunker(), Unchunker()
    lost = chunker.split(payload(70_000, 1))
    kept = chunker.split(payload(70_000, 2))
    assert unchunker.feed(lost[0]) is None
    assert unchunker.feed(kept[0]) is None
    assert unchunker.feed(lost[1]) is None
    assert unchunker.feed(kept[1]) == payload(70_000, 2)
    books = unchunker.statistics()
    assert (books.completed, books.abandoned, books.late, books.lost) == (1, 1, 1, 1)
    check_books(unchunker)


def test_a_small_message_between_the_chunks_of_a_large_one_costs_nothing() -> None:
    chunker, unchunker = Chunker(), Unchunker()
    large = chunker.split(payload(70_000))
    (small,) = chunker.split(b"small")
    assert unchunker.feed(large[0]) is None
    assert unchunker.feed(small) == b"small"
    assert unchunker.statistics().under_way == 1
    assert unchunker.feed(large[1]) == payload(70_000)
    assert unchunker.statistics().lost == 0


def test_messages_of_which_nothing_came_are_missing_until_they_come() -> None:
    chunker, unchunker = Chunker(), Unchunker()
    datagrams = [chunker.split(bytes([number]))[0] for number in range(6)]
    for number in (0, 4):
        unchunker.feed(datagrams[number])
    assert unchunker.statistics().missing == 3
    assert unchunker.feed(datagrams[2]) == b"\x02"
    assert unchunker.statistics().missing == 2


def test_the_end_of_a_connection_abandons_what_is_under_way() -> None:
    unchunker = Unchunker()
    unchunker.feed(Chunker().split(payload(70_000))[0])
    unchunker.abandon()
    unchunker.abandon()
    assert unchunker.statistics().abandoned == 1
    assert unchunker.statistics().under_way == 0


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        bytes(39),
        struct.pack("<qHH28x", -1, 1, 0),
        struct.pack("<qHH28x", 2**62, 1, 0),
        struct.pack("<qHH28x", 0, 0, 0),
        struct.pack("<qHH28x", 0, 1, 1),
        struct.pack("<qHH28x", 0, 2, 0) + b"short",
        struct.pack("<qHH28x", 0, 1, 0) + bytes(CHUNK_PAYLOAD + 1),
        struct.pack("<qHH28x", 0, 65535, 65534),
    ],
)
def test_garbage_is_counted_and_what_is_under_way_survives_it(datagram: bytes) -> None:
    chunker, unchunker = Chunker(), Unchunker(1 << 20)
    first, second = chunker.split(payload(70_000))
    unchunker.feed(first)
    assert unchunker.feed(datagram) is None
    assert unchunker.last_fault is not None
    assert unchunker.feed(second) == payload(70_000)
    assert unchunker.statistics().refused == 1
    check_books(unchunker)


def test_a_chunk_of_the_same_set_with_another_count_is_refused() -> None:
    unchunker = Unchunker()
    unchunker.feed(Chunker().split(payload(70_000))[0])
    assert unchunker.feed(struct.pack("<qHH28x", 0, 1, 0) + b"x") is None
    assert unchunker.statistics().refused == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60))
def test_the_books_add_up_whatever_comes(order: list[tuple[int, int]]) -> None:
    chunker = Chunker()
    messages = [payload(size, size) for size in (10, 70_000, 140_000, 65456, 20, 66_000)]
    sets = [chunker.split(message) for message in messages]
    unchunker = Unchunker()
    delivered = 0
    for which, number in order:
        whole = unchunker.feed(sets[which][number % len(sets[which])])
        if whole is not None:
            assert whole == messages[which]
            delivered += 1
    books = unchunker.statistics()
    check_books(unchunker)
    assert books.completed == delivered
    seen = max((which for which, _ in order), default=-1) + 1
    assert books.completed + books.abandoned + books.missing + books.under_way == seen


def test_what_cannot_be_cut_is_refused() -> None:
    # Pages that nobody touches take no memory.
    with (
        mmap.mmap(-1, 65535 * CHUNK_PAYLOAD + 1) as pages,
        memoryview(pages) as huge,
        pytest.raises(MessageTooLarge),
    ):
        Chunker().split(huge)
    with pytest.raises(InvalidOption):
        Unchunker(0)


def test_a_chunk_tells_what_it_is() -> None:
    (datagram,) = Chunker(7).split(b"abc")
    assert decode_chunk(datagram) == (7, 1, 0, b"abc")
