"""Options of queues and logs: what people write, and what they are told when it does not fit."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from penstock import InvalidOption
from penstock.core.url import URL
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.log.options import LogOptions
from penstock.queue.options import Creation, QueueOptions
from penstock.queue.wide.layout import Compression
from penstock.queue.wide.options import Policy, WideOptions


def wide(query: str) -> WideOptions:
    return WideOptions.of(URL.parse(f"fmq:/x?{query}"))


def test_options_are_read_in_the_units_people_write() -> None:
    found = wide(
        "slots=64&size=64k&wait=true&timeout=10ms&crc=yes&compress=on&hold=a, b&policy=drop"
        "&create=never&mode=0640&sync=5ms&type=-1&lease=2m"
    )
    assert found == WideOptions(
        slots=64,
        size=65536,
        wait=float("inf"),
        timeout=0.01,
        crc=True,
        compress=Compression.ZSTD,
        hold=("a", "b"),
        policy=Policy.DROP,
        create=Creation.NEVER,
        mode=0o640,
        sync=0.005,
        type=-1,
        lease=120.0,
    )
    assert isinstance(found.compress, Compression)
    assert isinstance(found.policy, Policy)


def test_those_not_given_have_their_defaults_and_are_not_among_the_given() -> None:
    assert wide("") == WideOptions()
    assert wide("").given == frozenset()
    assert wide("slots=64&crc=false").given == {"slots", "crc"}


def test_values_given_in_python_are_taken_as_they_are() -> None:
    given = {"slots": 64, "crc": True, "sync": 0.5, "hold": ("a",), "wait": False}
    url = URL("fmq:/x", "fmq", None, None, "/x", given)  # type: ignore[arg-type]
    expected = WideOptions(slots=64, crc=True, sync=0.5, hold=("a",), wait=0.0)
    assert WideOptions.of(url) == expected


def test_options_never_change() -> None:
    with pytest.raises(FrozenInstanceError):
        wide("").slots = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("slots=many", "should be a whole number"),
        ("slots=1.5", "should be a whole number"),
        ("slots=1", "should be from 2 to 1099511627776"),
        ("slots=9999999999999", "should be from 2 to 1099511627776"),
        ("size=ten", "expected a size such as"),
        ("size=0", "should be from 1 to"),
        ("timeout=soon", "expected a duration such as"),
        ("wait=soon", "expected a duration such as"),
        ("crc=perhaps", "should be true or false"),
        ("writers=two", "should be 'one' or 'many'"),
        ("policy=hope", "should be 'wait', 'fail' or 'drop'"),
        ("layout=narrow", "should be 'wide'"),
        ("compress=gzip", "gzip and bzip2 are for layout=classic"),
        ("compress=lzw", "should be 'none', 'lz4' or 'zstd'"),
        ("mode=999", "is a number of chmod"),
        ("hold=a,,b", "is a list of names"),
        ("group=a b", "should be up to 64 letters"),
        ("deliveries=0", "should be 1 or more"),
        ("lease=0", "should be more than 0"),
        ("sync=often", "expected a duration such as"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_the_reason(query: str, reason: str) -> None:
    name, _, value = query.partition("=")
    with pytest.raises(InvalidOption) as caught:
        wide(query)
    assert (caught.value.option, caught.value.value) == (name, value)
    assert reason in caught.value.reason


def test_an_unknown_option_gets_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidOption, match="fmq: has no such option") as caught:
        wide("slot=64")
    assert caught.value.hint == "did you mean slots?"


def test_a_log_has_limits_that_can_be_taken_away() -> None:
    found = LogOptions.of(URL.parse("log:/x?retain=none&retain_age=1d&hold="))
    assert (found.retain, found.retain_age, found.hold) == (None, 86400.0, ())
    assert found.given == {"retain", "retain_age", "hold"}


@pytest.mark.parametrize("kind", [WideOptions, ClassicOptions, LogOptions])
def test_every_field_is_an_option_that_can_be_read(kind: type[QueueOptions]) -> None:
    unread = {one.name for one in fields(kind) if "parse" not in one.metadata}
    assert unread == {"given"}
