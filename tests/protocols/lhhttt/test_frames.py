from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.errors import Malformed, MessageTooLarge
from penstock.protocols.lhhttt import (
    LONGEST,
    FrameDecoder,
    decode,
    decode_bytes,
    encode,
    encode_bytes,
)
from penstock.protocols.lhhttt.frames import decode_all, group

VECTORS = Path(__file__).parents[2] / "vectors" / "streampy"
ENCODED = json.loads((VECTORS / "lhhttt_encode.json").read_text())["vectors"]
DECODED = json.loads((VECTORS / "lhhttt_decode.json").read_text())["vectors"]
#: Python's parser of numbers takes these. They are no frames.
LOOSE = ("space", "newline", "plus", "0x prefix", "underscore", "ARABIC")


@pytest.mark.parametrize("row", ENCODED, ids=lambda row: row["HH"] + " " + str(row["char_len"]))
def test_texts_become_the_bytes_of_the_prototype(row: dict[str, Any]) -> None:
    text = row["text"] if "text" in row else row["text_repeat"][0] * row["text_repeat"][1]
    frame = encode(text)
    assert len(frame) == row["total"]
    if "hex" in row:
        assert frame.hex() == row["hex"]
    else:
        assert frame.startswith(row["header"].encode())
    assert decode(frame) == text


@pytest.mark.parametrize("row", DECODED, ids=lambda row: row["note"])
def test_frames_are_read_as_the_prototype_reads_them_but_for_what_is_no_number(
    row: dict[str, Any],
) -> None:
    frame = bytes.fromhex(row["hex"])
    if row["ok"] and not any(word in row["note"] for word in LOOSE):
        assert decode(frame) == row["text"]
    else:
        with pytest.raises(Malformed):
            decode(frame)


@pytest.mark.parametrize(
    ("frame", "where", "found"),
    [
        (b"", "length", "0 bytes"),
        (b"1", "length", "1 bytes"),
        (b"0", "byte 0", "'0'"),
        (b"GET", "byte 0", "'G'"),
        (b"3 1a", "byte 1", "' '"),
        (b"2_1", "byte 1", "'_'"),
        (b"11", "length", "2 bytes"),
        (b"11a11b", "length", "6 bytes"),
        (b"12a\xff", "byte 3", "b'\\xff'"),
        (b"\xff", "byte 0", "'\\xff'"),
    ],
)
def test_an_error_says_where_and_what_was_found(frame: bytes, where: str, found: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(frame)
    assert (caught.value.where, caught.value.found) == (where, found)


class Endless(bytes):
    """Bytes of which there are too many to have them."""

    def __len__(self) -> int:
        return LONGEST + 1


def test_what_fifteen_digits_cannot_tell_is_refused() -> None:
    with pytest.raises(MessageTooLarge):
        encode_bytes(Endless())
    with pytest.raises(UnicodeEncodeError):
        encode("\ud800")


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.binary(max_size=300))
def test_all_bytes_come_back(data: bytes) -> None:
    assert decode_bytes(encode_bytes(data)) == data


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 40)))
def test_a_stream_of_frames_may_be_cut_anywhere(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(encode_bytes, payloads))
    decoder = FrameDecoder()
    found: list[bytes] = []
    at = 0
    for cut in [*cuts, len(stream)]:
        found += decoder.feed(stream[at : at + cut])
        at += cut
    assert found == payloads
    assert (decoder.position, decoder.pending) == (len(stream), 0)


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 40)))
@example([bytes(range(200)), b"short"], [4, 5, 100, 30])
def test_long_frames_that_are_skipped_leave_the_others_whole(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(encode_bytes, payloads))
    heads: list[bytes] = []

    def is_skipped(head: bytes) -> bool:
        heads.append(head)
        return True

    decoder = FrameDecoder(100, is_skipped)
    found: list[bytes] = []
    at = 0
    for cut in [*cuts, len(stream)]:
        found += decoder.feed(stream[at : at + cut])
        at += cut
    assert found == [payload for payload in payloads if len(payload) <= 100]
    long = [payload for payload in payloads if len(payload) > 100]
    assert len(heads) == len(long)
    assert heads == [payload[:128] for payload in long]  # whole, wherever the stream is cut
    assert (decoder.position, decoder.pending) == (len(stream), 0)


def test_frames_before_a_wrong_one_are_whole_and_its_place_is_told() -> None:
    decoder = FrameDecoder()
    found: list[bytes] = []
    with pytest.raises(Malformed) as caught:
        found.extend(decoder.feed(b"11a12bcxyz"))
    assert found == [b"a", b"bc"]
    assert caught.value.where == "byte 7 of the stream"


def test_a_length_beyond_the_limit_is_refused_before_anything_comes() -> None:
    decoder = FrameDecoder(limit=100)
    assert list(decoder.feed(encode_bytes(bytes(100)))) == [bytes(100)]
    with pytest.raises(Malformed, match="at most 100 bytes, found 101"):
        list(decoder.feed(b"265"))


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_fuzz_a_mutated_frame_is_one_text_or_a_typed_error(count: int) -> None:
    chance = random.Random(7)
    for _ in range(count):
        frame = bytearray(encode("é" * chance.randrange(20)))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(frame) + 1)
            frame[at : at + chance.randrange(2)] = chance.randbytes(chance.randrange(2))
        try:
            text = decode(frame)
        except Malformed:
            continue
        body = text.encode()
        digits = int(frame[:1], 16)
        assert bytes(frame[1 + digits :]) == body
        assert int(frame[1 : 1 + digits], 16) == len(body)


@given(st.lists(st.one_of(st.binary(max_size=20).map(encode_bytes), st.binary(max_size=20))))
def test_datagrams_are_decoded_by_many_as_each_alone(datagrams: list[bytes]) -> None:
    commands = []
    for number, datagram in enumerate(datagrams):
        with contextlib.suppress(Malformed):
            commands.append((decode_bytes(datagram), number))
    runs, malformed = decode_all(list(zip(datagrams, range(len(datagrams)), strict=True)))
    assert malformed == len(datagrams) - len(commands)
    assert group(commands) == runs
    parts = [(*command.partition(b":"), number) for command, number in commands]
    assert runs == [
        (verb, [rest for _, _, rest, _ in some], [number for *_, number in some])
        for verb, some in (
            (verb, list(run)) for verb, run in itertools.groupby(parts, lambda part: part[0])
        )
    ]
