from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

INT32 = st.integers(-(2**31), 2**31 - 1)
NANOSECONDS = st.integers(-(2**63), 2**63 - 1)

MESSAGES = st.builds(
    Message,
    seq=st.integers(0, 2**64 - 1),
    time_ns=NANOSECONDS,
    created_ns=NANOSECONDS,
    type=INT32,
    subtype=INT32,
    stream=st.none() | st.binary(min_size=16, max_size=16).map(StreamId.from_bytes),
    attributes=st.none() | st.binary(),
    payload=st.binary(),
)

DEAD_LETTERS = st.builds(
    DeadLetter,
    original=MESSAGES,
    code=st.sampled_from(Code),
    reason=st.text(),
    receiver=st.text(),
    attempts=st.integers(0, 2**31),
    first_attempt_ns=NANOSECONDS,
    last_attempt_ns=NANOSECONDS,
    dead_ns=NANOSECONDS,
)

LETTER = DeadLetter(
    original=Message(
        seq=7,
        time_ns=100,
        created_ns=200,
        type=1,
        subtype=2,
        stream=StreamId.from_bytes(bytes(range(16))),
        attributes=b"\x00\xff",
        payload=b"payload",
    ),
    code=Code.UNAVAILABLE,
    reason="no route to «vehicle1»",
    receiver="up://vehicle1/100D/2/8001",
    attempts=3,
    first_attempt_ns=300,
    last_attempt_ns=400,
    dead_ns=500,
)


@given(DEAD_LETTERS)
def test_a_dead_letter_comes_back_from_its_message_as_it_was(letter: DeadLetter) -> None:
    assert DeadLetter.from_message(letter.to_message()) == letter


@given(DEAD_LETTERS, st.integers(0, 2**63 - 1), NANOSECONDS)
def test_the_place_in_the_dead_letter_queue_does_not_change_the_letter(
    letter: DeadLetter, seq: int, created_ns: int
) -> None:
    stored = letter.to_message()._replace(seq=seq, created_ns=created_ns)
    assert DeadLetter.from_message(stored) == letter


def test_the_carrier_looks_like_the_original_but_for_its_attributes() -> None:
    carrier = LETTER.to_message()
    assert carrier == LETTER.original._replace(seq=0, created_ns=500, attributes=carrier.attributes)


def test_the_attributes_are_compact_json_with_a_version() -> None:
    attributes = LETTER.to_message().attributes
    assert attributes is not None
    assert attributes.decode() == (
        '{"penstock_dead_letter":1,"code":14,"reason":"no route to «vehicle1»",'
        '"receiver":"up://vehicle1/100D/2/8001","attempts":3,"first_attempt_ns":300,'
        '"last_attempt_ns":400,"dead_ns":500,"original":{"seq":7,"time_ns":100,'
        '"created_ns":200,"type":1,"subtype":2,"stream":"000102030405060708090a0b0c0d0e0f",'
        '"attributes":"AP8="}}'
    )


def test_codes_have_the_numbers_of_google_rpc() -> None:
    assert [code.value for code in Code] == list(range(17))
    assert (Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE) == (4, 8, 14)


def letter_with(reason: str, receiver: str) -> DeadLetter:
    return DeadLetter(LETTER.original, Code.INTERNAL, reason, receiver, 1, 0, 0, 0)


def test_texts_that_are_too_long_are_cut_with_an_ellipsis() -> None:
    letter = letter_with("é" * 5_000, "r" * 5_000)
    assert letter.reason == "é" * 1_023 + "…"
    assert letter.receiver == "r" * 511 + "…"
    assert DeadLetter.from_message(letter.to_message()) == letter


def test_texts_just_within_the_limit_are_kept() -> None:
    letter = letter_with("a" * 1_024, "r" * 512)
    assert (letter.reason, letter.receiver) == ("a" * 1_024, "r" * 512)


def test_a_text_that_utf8_cannot_carry_does_not_stop_the_letter() -> None:
    letter = letter_with("no file caf\udce9", "\ud800")
    assert (letter.reason, letter.receiver) == ("no file caf?", "?")
    assert DeadLetter.from_message(letter.to_message()) == letter


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(LETTER.to_message().attributes or b"") | changes).encode()


def changed_original(**changes: Any) -> bytes:
    original = json.loads(LETTER.to_message().attributes or b"")["original"]
    return changed(original=original | changes)


@pytest.mark.parametrize(
    ("attributes", "where"),
    [
        (None, "attributes"),
        (b"", "attributes"),
        (b"{", "attributes"),
        (b"\xff\xfe", "attributes"),
        (b"[]", "attributes"),
        (b"[" * 100_000, "attributes"),
        (b"{}", "attributes.penstock_dead_letter"),
        (changed(penstock_dead_letter=2), "attributes.penstock_dead_letter"),
        (changed(code=17), "attributes.code"),
        (changed(code="14"), "attributes.code"),
        (changed(attempts=-1), "attributes.attempts"),
        (changed(attempts=1.5), "attributes.attempts"),
        (changed(dead_ns=2**63), "attributes.dead_ns"),
        (changed(reason=None), "attributes.reason"),
        (changed(extra=1), "attributes.extra"),
        (changed(original=None), "attributes.original"),
        (changed_original(seq=-1), "attributes.original.seq"),
        (changed_original(type=2**31), "attributes.original.type"),
        (changed_original(stream="00"), "original.stream"),
        (changed_original(attributes="A"), "original.attributes"),
        (changed_original(attributes="é==="), "original.attributes"),
    ],
)
def test_attributes_of_anything_else_are_malformed_and_say_where(
    attributes: bytes | None, where: str
) -> None:
    with pytest.raises(Malformed) as caught:
        DeadLetter.from_message(LETTER.original._replace(attributes=attributes))
    assert caught.value.where == where


@given(st.binary())
def test_no_bytes_do_worse_than_being_malformed(attributes: bytes) -> None:
    with pytest.raises(Malformed):
        DeadLetter.from_message(LETTER.original._replace(attributes=attributes))
