"""How faults are asked for."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from penstock.core.errors import InvalidOption
from penstock.relay.faults import Faults, parse_address, parse_delay, parse_share


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.5 %", 0.005), ("100%", 1.0), ("0.05", 0.05), ("1", 1.0), (".25", 0.25)],
)
def test_a_share_is_written_in_percent_or_as_a_number(text: str, share: float) -> None:
    assert math.isclose(parse_share(text), share)


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "5", "nan", "1e-3", "5%%", "9" * 99])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_share(text)


def test_a_number_above_one_is_told_from_percent() -> None:
    with pytest.raises(InvalidOption) as error:
        parse_share("5")
    assert error.value.hint == "write 5% for percent"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10ms", (0.01, 0.0)),
        ("10ms±5ms", (0.01, 0.005)),
        ("10ms+-5ms", (0.01, 0.005)),
        ("1s ± 250ms", (1.0, 0.25)),
    ],
)
def test_a_delay_may_have_a_spread(text: str, meant: tuple[float, float]) -> None:
    assert parse_delay(text) == pytest.approx(meant)


@pytest.mark.parametrize("text", ["", "±5ms", "10ms±", "10ms±5ms±1ms", "10ms-5ms", "-1s"])
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="10ms±5ms"):
        parse_delay(text)


@pytest.mark.parametrize(
    "given",
    [
        {"drop": 1.5},
        {"garble": -0.1},
        {"reorder": math.nan},
        {"delay": -1.0},
        {"delay": math.inf},
        {"delay": 0.01, "jitter": 0.02},
        {"rate": 0},
        {"cut_every": 0.0},
        {"cut_every": math.nan},
        {"cut_after": -5},
        {"one_way": "sideways"},
        {"cut": "gently"},
    ],
)
def test_faults_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Faults(**given)


@pytest.mark.parametrize(
    ("transport", "given"),
    [
        ("tcp", {"duplicate": 0.1}),
        ("tcp", {"reorder": 0.1}),
        ("udp", {"half_open": True}),
        ("udp", {"cut_after": 10}),
        ("udp", {"refuse": 0.5}),
    ],
)
def test_faults_that_a_transport_cannot_have_are_refused(
    transport: Literal["udp", "tcp"], given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption) as error:
        Faults(**given).refuse_for(transport)
    assert error.value.hint


def test_faults_are_told_in_words() -> None:
    faults = Faults(drop=0.05, delay=0.01, jitter=0.005, rate=2048, one_way="up", cut_every=10)
    assert str(faults) == (
        "drop 5%, delay 10 ms ± 5 ms, at most 2.0 KiB/s, cut every 10 s, on the way up only"
    )
    assert str(Faults(one_way="up")) == "no faults"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("localhost:5443", ("localhost", 5443)),
        ("[::1]:53", ("::1", 53)),
        (":7", ("127.0.0.1", 7)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, meant: tuple[str, int]) -> None:
    assert parse_address(text, "to") == meant


@pytest.mark.parametrize("text", ["", "host", "80", "::1:53", "host:", "host:http", "a b:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="HOST:PORT"):
        parse_address(text, "to")
