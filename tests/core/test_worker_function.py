"""Functions of workers: what they make of a message, and which output gets a result."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.functions import FunctionNotFound
from penstock.core.message import Message
from penstock.core.worker_function import (
    BadResult,
    Output,
    To,
    load_worker_function,
    outputs_of,
    place_of,
    stable_hash,
    worker,
)


def message(payload: bytes) -> Message:
    return Message(1, 2, 3, 4, 5, None, None, payload)


@worker
def plain(text: str, more: str = "") -> str:
    return text + more


@worker(takes="bytes")
def of_bytes(data: bytes) -> bytes:
    return data[::-1]


@worker(takes="message")
def of_message(given: Message) -> int:
    return given.type


@worker(state=Counter)
def counting(text: str, state: Counter[str]) -> int:
    state[text] += 1
    return state[text]


def unmarked(text: str) -> str:
    return text


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, []),
        ("", [b""]),
        (0, [b"0"]),
        (0.0, [b"0.0"]),
        (b"", [b""]),
        ("häh", ["häh".encode()]),
        ([], []),
        (["a", None, 0, ""], [b"a", b"0", b""]),
        ((number for number in (0, 1)), [b"0", b"1"]),
    ],
)
def test_a_result_of_zero_or_nothing_is_not_lost(result: object, expected: list[bytes]) -> None:
    assert [output.payload for output in outputs_of(result, ["out"])] == expected


def test_a_result_goes_to_all_outputs_to_that_of_its_key_or_to_the_one_it_names() -> None:
    edges = ["a", "b"]
    assert list(outputs_of("x", edges)) == [Output("a", b"x"), Output("b", b"x")]
    assert list(outputs_of([(0, "x"), (3, "y")], edges)) == [Output("a", b"x"), Output("b", b"y")]
    (first,) = outputs_of(("key", "x"), edges)
    assert [first] == list(outputs_of((b"key", b"x"), edges))
    assert list(outputs_of(To("b", 0), edges)) == [Output("b", b"0")]


@pytest.mark.parametrize(
    ("result", "edges", "said"),
    [
        ({}, ["a"], "returned dict"),
        ([["x"]], ["a"], "returned list"),
        (("a", "b", "c"), ["a"], "a key and a result"),
        (To("aa", "x"), ["ab", "b"], "no output is called 'aa'"),
        ("x", [], "no output"),
    ],
)
def test_what_nobody_can_send_is_refused(result: Any, edges: list[str], said: str) -> None:
    with pytest.raises(BadResult, match=said):
        list(outputs_of(result, edges))


def test_a_marked_function_is_called_as_before_and_gets_what_it_takes() -> None:
    assert plain("a", more="b") == "ab"
    assert plain.function.__name__ == "plain"
    assert plain.bound({"more": "!"})(message("é".encode())) == "é!"
    assert of_bytes.bound({})(message(b"\xff\x00")) == b"\x00\xff"
    assert of_message.bound({})(message(b"")) == 4
    with pytest.raises(UnicodeDecodeError):
        plain.bound({})(message(b"\xff"))
    with pytest.raises(BadResult, match="unexpected keyword"):
        plain.bound({"mor": "!"})


def test_each_worker_has_a_state_of_its_own() -> None:
    one, other = counting.bound({}), counting.bound({})
    assert [one(message(b"a")), one(message(b"a")), other(message(b"a"))] == [1, 2, 1]


def test_a_function_is_found_by_its_name_if_it_is_marked() -> None:
    here = __name__
    assert load_worker_function(f"{here}:plain") is plain
    for name, said in (
        (f"{here}:unmarked", "is no worker"),
        (f"{here}:plane", "has no function plane"),
        ("no_such_module:x", "there is no module no_such_module"),
    ):
        with pytest.raises(FunctionNotFound, match=said):
            load_worker_function(name)


# --- keys ---------------------------------------------------------------------------------------

KEYS = [f"key {number}" for number in range(2000)]


def test_a_key_has_the_same_place_in_every_process() -> None:
    code = (
        "from penstock.core.worker_function import place_of, stable_hash\n"
        "print([place_of(k, 7) for k in ('', 'a', 'häh', b'a')], stable_hash('a'))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {"[6, 3, 4, 3] 3405396810240292928\n"}, said  # and so it stays, for ever
    assert stable_hash(b"a") == stable_hash("a")


def test_keys_are_spread_and_few_move_when_there_is_one_place_more() -> None:
    before = {key: place_of(key, 4) for key in KEYS}
    after = {key: place_of(key, 5) for key in KEYS}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    moved = [key for key in KEYS if before[key] != after[key]]
    assert 300 < len(moved) < 500
    assert {after[key] for key in moved} == {4}


@given(st.one_of(st.text(), st.binary(), st.integers()), st.integers(1, 1000))
def test_a_place_is_one_of_those_that_there_are(key: str | bytes | int, count: int) -> None:
    assert 0 <= place_of(key, count) < count


def test_a_number_is_a_place_itself() -> None:
    assert [place_of(number, 3) for number in (0, 1, 2, 3, -1)] == [0, 1, 2, 0, 2]
