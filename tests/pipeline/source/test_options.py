from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import InvalidOption, InvalidURL
from penstock.pipeline.source.options import SourceOptions, check_target, parse_spark_options


def asked(**options: Any) -> SourceOptions:
    chosen = parse_spark_options({"url": "fmq:/a", **options}, SourceOptions)
    chosen.check_together()
    return chosen


def test_places_have_names_in_json_too() -> None:
    text = '{"fmq:/a": "latest", "fmq:/b": "Earliest", "fmq:/c": 7, "fmq:/d": "8"}'
    assert asked(startingOffsets=text).startingOffsets == {
        "fmq:/a": -1,
        "fmq:/b": -2,
        "fmq:/c": 7,
        "fmq:/d": 8,
    }


@pytest.mark.parametrize("text", ["--7", "first", "[1]", '{"fmq:/a": "first"}', '{"fmq:/a": null}'])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="expected earliest, latest, a number, or JSON"):
        asked(startingOffsets=text)


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "50", "endingOffsets": "10"},
        {"startingSeq": "50", "endingOffsets": "10"},
        {"startingTime": "2030-01-01", "endingTime": "2001-01-01"},
    ],
)
def test_an_end_before_the_start_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidOption, match="is before the start"):
        asked(**options)
    asked(startingOffsets="50", endingOffsets="-1")  # which is `latest`


def test_where_losses_go_is_known_before_there_are_any() -> None:
    with pytest.raises(InvalidOption, match="no endpoint answers to lg:") as caught:
        asked(failOnDataLoss="false", lossUrl="lg:/losses")
    assert caught.value.hint == "did you mean log:?"


def test_a_list_of_urls_to_load_is_as_good_as_one() -> None:
    given = {"paths": '["fmq:/a", "log:/b"]'}
    assert parse_spark_options(given, SourceOptions).url == ["fmq:/a", "log:/b"]


def test_what_would_be_emptied_with_every_batch_is_no_target() -> None:
    check_target("fmq:/a?slots=10")
    with pytest.raises(InvalidOption, match="would empty it"):
        check_target("fmq:/a?create=always")
    check_target("jsonl:/a?replace=false")
    with pytest.raises(InvalidOption, match="would write over it") as caught:
        check_target("jsonl:/a?replace=true")
    assert "a log:" in str(caught.value.hint)
    with pytest.raises(InvalidURL):
        check_target("nowhere")


def test_the_words_of_kafka_mean_what_they_mean_there() -> None:
    given = {
        "url": "fmq:/a",
        "startingTimestamp": "1700000000000",
        "endingTimestamp": 1700000001000,
    }
    options = parse_spark_options(given, SourceOptions)
    assert options.start_time("fmq:/a") == 1_700_000_000 * 10**9
    assert options.end_time("fmq:/a") == 1_700_000_001 * 10**9
    each = {"url": "fmq:/a,fmq:/b", "startingOffsetsByTimestamp": '{"fmq:/a": 5}'}
    options = parse_spark_options(each, SourceOptions)
    assert (options.start_time("fmq:/a"), options.start_time("fmq:/b")) == (5_000_000, None)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"startingTimestamp": "2026-01-01"}, "startingTimestamp"),
        ({"startingOffsetsByTimestamp": "[1]"}, "startingOffsetsByTimestamp"),
        ({"startingTimestamp": "1", "startingOffsets": "latest"}, "startingTimestamp"),
        ({"startingTimestamp": "9", "endingTimestamp": "8"}, "endingTime"),
        ({"maxTriggerDelay": "1s"}, "maxTriggerDelay"),
        ({"minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger"),
    ],
)
def test_words_of_kafka_that_do_not_fit_are_refused(given: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_spark_options({"url": "fmq:/a", **given}, SourceOptions).check_together()
    assert caught.value.option == option
