from __future__ import annotations

import pytest

from penstock.core.errors import InvalidOption
from penstock.pipeline.graph.fields import AVAILABLE_NOW, Trigger, parse_interval, spark_interval


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("500ms", 0.5),
        ("10 seconds", 10),
        ("1 Minute", 60),
        ("1.5 hours", 5400),
        ("250 milliseconds", 0.25),
        (2, 2),
        (0, 0),
        ("1 day", 86400),
    ],
)
def test_an_interval_is_written_short_or_in_the_words_of_spark(
    text: object, seconds: float
) -> None:
    assert parse_interval(text) == seconds


@pytest.mark.parametrize("text", ["soon", "", "10 parsecs", "-1s", "1..5s", None, True, "1 2 s"])
def test_what_is_no_interval_is_refused(text: object) -> None:
    with pytest.raises(InvalidOption, match="such as 1s"):
        parse_interval(text)


def test_an_interval_shorter_than_spark_has_is_refused() -> None:
    with pytest.raises(InvalidOption, match="milliseconds"):
        parse_interval("250us")


@pytest.mark.parametrize("text", ["available now", "availableNow", "once", "AVAILABLE-NOW"])
def test_a_trigger_may_take_what_is_there_and_end(text: str) -> None:
    assert Trigger.parse(text) is AVAILABLE_NOW
    assert AVAILABLE_NOW.as_spark() == {"availableNow": True}
    assert str(AVAILABLE_NOW) == "available now"


def test_a_trigger_may_be_an_interval() -> None:
    assert Trigger.parse("1 minute").as_spark() == {"processingTime": "60000 milliseconds"}
    assert str(Trigger.parse("1.5s")) == "1.5 s"
    assert str(Trigger()) == "as soon as possible"
    assert parse_interval(spark_interval(0.001)) == 0.001


def test_a_trigger_that_is_neither_says_what_it_could_be() -> None:
    with pytest.raises(InvalidOption) as caught:
        Trigger.parse("continuous")
    assert caught.value.hint == "or: available now"
