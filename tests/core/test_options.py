from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, field_validator

from penstock.core.errors import InvalidOption
from penstock.core.options import Duration, Options, Size, parse_options
from penstock.core.url import URL


class ExampleOptions(Options):
    slots: Annotated[int, Field(ge=1)] = 1000
    size: Annotated[Size, Field(ge=32)] = 10 << 20
    wait: Duration = 0.0
    blocking: bool = False
    layout: Literal["classic", "wide"] | None = None
    name: str = ""

    @field_validator("name")
    @classmethod
    def _refuse_dots(cls, name: str) -> str:
        if "." in name:
            raise ValueError("has a dot")
        return name


class NeedyOptions(Options):
    topic: str
    size: Size = 1


def parse(query: str) -> ExampleOptions:
    return parse_options(URL.parse(f"example:/x?{query}"), ExampleOptions)


def refused(query: str) -> InvalidOption:
    with pytest.raises(InvalidOption) as caught:
        parse(query)
    return caught.value


def test_options_are_read_in_the_units_people_write() -> None:
    options = parse("slots=5&size=64k&wait=10ms&blocking=true&layout=wide")
    assert options == ExampleOptions(slots=5, size=65536, wait=0.01, blocking=True, layout="wide")


def test_options_not_given_have_their_defaults() -> None:
    assert parse("") == ExampleOptions()


def test_options_never_change() -> None:
    with pytest.raises(ValidationError):
        parse("").slots = 5


@pytest.mark.parametrize(
    ("query", "option", "value", "reason"),
    [
        ("slots=many", "slots", "many", "must be a whole number"),
        ("slots=0", "slots", "0", "greater than or equal to 1"),
        ("size=ten", "size", "ten", "expected a size such as"),
        ("size=1", "size", "1", "greater than or equal to 32"),
        ("wait=soon", "wait", "soon", "expected a duration such as"),
        ("blocking=perhaps", "blocking", "perhaps", "must be true or false"),
        ("layout=narrow", "layout", "narrow", "'classic' or 'wide'"),
        ("name=a.b", "name", "a.b", "has a dot"),
    ],
)
def test_a_value_that_does_not_fit_is_named_once_with_the_reason(
    query: str, option: str, value: str, reason: str
) -> None:
    error = refused(query)
    assert (error.option, error.value) == (option, value)
    assert reason in error.reason
    assert str(error) == f"option {option}={value!r}: {error.reason}"
    assert str(error).count("option") == 1


def test_an_unknown_option_gets_the_one_that_was_meant() -> None:
    error = refused("slot=5")
    assert str(error) == "option slot='5': example: has no such option"
    assert error.hint == "did you mean slots?"


def test_an_unknown_option_like_no_other_gets_all_there_are() -> None:
    assert refused("zzz=5").hint == "known options: blocking, layout, name, size, slots, wait"


def test_a_missing_option_is_named() -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options(URL.parse("example:/x?size=3"), NeedyOptions)
    assert caught.value.option == "topic"
    assert caught.value.value is None
    assert caught.value.reason == "example: needs this option"
