from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption
from penstock.core.units import (
    format_duration,
    format_size,
    format_time,
    parse_duration,
    parse_moment,
    parse_size,
    parse_time,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("12B", 12),
        ("64k", 64 * 1024),
        ("10M", 10 * 1024**2),
        ("1G", 1024**3),
        ("2t", 2 * 1024**4),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("64kib", 64 * 1024),
        ("10MB", 10_000_000),
        ("2 TB", 2_000_000_000_000),
        (" 1KB ", 1000),
        ("0.1k", 102),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_a_size_is_read_in_the_units_people_write(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M",
        "ten",
        "10X",
        "10 M B",
        "1.5",
        "-1",
        "-1k",
        "1e3",
        "nan",
        "inf",
        "0x10",
        "٣",
        "9" * 99,
        True,
        -1,
        2**63,
        "8388608T",
        "9" * 29,
    ],
)
def test_what_is_not_a_size_is_refused_with_the_text(text: str | int) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_size(text)
    assert caught.value.option == "size"
    assert caught.value.value == text


@given(st.integers(0, 2**60))
@example(1023)
@example(1024**2 - 1)
@example(1024**3 - 1)
def test_a_size_for_people_is_right_to_the_digits_shown(size: int) -> None:
    text = format_size(size)
    unit = parse_size("1 " + text.split()[1])
    assert abs(parse_size(text) - size) <= 0.05 * unit + 1


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_a_size_just_below_a_unit_is_shown_in_that_unit(power: int) -> None:
    assert format_size(1024**power - 1) == ("1023 B" if power == 1 else format_size(1024**power))


def test_a_size_for_people_has_one_decimal_above_the_bytes() -> None:
    shown = [format_size(n) for n in (0, 1023, 1024, 10 * 1024**2, 1024**5)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "10.0 MiB", "1024.0 TiB"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (5, 5.0),
        (0.25, 0.25),
        ("5", 5.0),
        ("5s", 5.0),
        ("1.5s", 1.5),
        ("10ms", 0.01),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        ("1ns", 1e-9),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1d", 86400.0),
        ("1 s", 1.0),
        ("0", 0.0),
    ],
)
def test_a_duration_is_read_in_the_units_people_write(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "soon",
        "5 S",
        "1M",
        "5x",
        "-1s",
        "nan",
        "inf",
        "1h30",
        "1e3",
        "9223372037s",
        True,
        -0.5,
        float("inf"),
        1e300,
        10**30,
    ],
)
def test_what_is_not_a_duration_is_refused_with_the_text(text: str | float) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_duration(text)
    assert caught.value.option == "duration"
    assert caught.value.value == text


def test_not_a_number_is_no_duration() -> None:
    with pytest.raises(InvalidOption):
        parse_duration(float("nan"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-9, "1 ns"),
        (0.00025, "250 us"),
        (0.01, "10 ms"),
        (0.9999, "1 s"),
        (1.5, "1.5 s"),
        (12.345, "12.3 s"),
        (59.99, "1 m"),
        (90, "1.5 m"),
        (7200, "2 h"),
        (86_399.9, "1 d"),
        (86_400 * 12_345, "12345 d"),
        (-1.5, "-1.5 s"),
    ],
)
def test_a_duration_for_people_has_one_unit_and_three_digits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(1e-9, 9e9))
def test_a_duration_for_people_reads_back_within_its_digits(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.006)


@given(INT64)
@example(0)
@example(-1)
@example(-(2**63))
@example(2**63 - 1)
def test_every_time_reads_back_to_the_nanosecond(time_ns: int) -> None:
    assert parse_time(format_time(time_ns)) == time_ns


@given(
    st.datetimes(
        dt.datetime(1700, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
        dt.datetime(2200, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
        timezones=st.integers(-1439, 1439).map(
            lambda minutes: dt.timezone(dt.timedelta(minutes=minutes))
        ),
    )
)
def test_a_time_means_what_the_standard_library_says(moment: dt.datetime) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    expected = (moment - epoch) // dt.timedelta(microseconds=1) * 1000
    assert parse_time(moment.isoformat()) == expected


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_500_000_000, "1970-01-01T00:00:01.5Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
    ],
)
def test_a_time_has_as_many_decimals_as_it_needs(time_ns: int, text: str) -> None:
    assert format_time(time_ns) == text


def test_a_time_without_a_zone_is_utc() -> None:
    expected = parse_time("2026-11-15T08:55:00Z")
    same = ["2026-11-15T08:55", "2026-11-15 08:55:00", "2026-11-15T09:55+01:00"]
    same += ["2026-11-15T03:25:00-0530", " 2026-11-15T08:55:00.000Z "]
    assert [parse_time(text) for text in same] == [expected] * len(same)
    assert parse_time("2026-11-15") == parse_time("2026-11-15T00:00:00Z")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-02-30",
        "2026-01-01T24:00:01Z",
        "2026-01-01T23:59:60Z",
        "2026-01-01T08:55.5Z",
        "2026-01-01T00:00:00.1234567891Z",
        "2026-01-01T00:00+99:00",
        "2026-01-01Z",
        "0001-01-01T00:00+23:59",
        "2262-04-11T23:47:16.854775808Z",
        "٢٠٢٦-01-01",
    ],
)
def test_what_is_not_a_time_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_time(text)
    assert caught.value.option == "time"
    assert caught.value.value == text


def test_a_time_beyond_64_bits_cannot_be_shown() -> None:
    with pytest.raises(InvalidOption):
        format_time(2**63)


@given(st.text(max_size=40))
def test_no_text_does_worse_than_being_refused(text: str) -> None:
    for parse in (parse_size, parse_duration, parse_time):
        try:
            parse(text)
        except InvalidOption as error:
            assert error.value == text  # noqa: PT017 - most texts are refused, some are not


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", "2026-05-02T10:20:30Z"),
        ("-10m", "2026-05-02T10:10:30Z"),
        ("-1.5h", "2026-05-02T08:50:30Z"),
        ("today", "2026-05-02"),
        ("Yesterday", "2026-05-01"),
        ("9:05", "2026-05-02T09:05"),
        ("12:00:30.5", "2026-05-02T12:00:30.5Z"),
        ("yesterday 12:00", "2026-05-01T12:00"),
        ("2026-01-01T00:00:01+01:00", "2025-12-31T23:00:01Z"),
    ],
)
def test_a_moment_is_told_as_people_say_it(text: str, moment: str) -> None:
    assert parse_moment(text, parse_time("2026-05-02T10:20:30Z")) == parse_time(moment)


@pytest.mark.parametrize("text", ["", "-10", "-", "tomorrow", "25:00", "yesterday noon", "-5x"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_moment(text, 0)
