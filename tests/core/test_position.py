from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PositionError
from penstock.core.position import Position, PositionLike, check_seek

NOON = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)
NOON_NS = 1_777_636_800_000_000_000


@pytest.mark.parametrize(
    ("place", "position"),
    [
        ("start", Position.START),
        ("END", Position.END),
        (" last ", Position.LAST),
        (Position.END, Position.END),
        (0, Position("seq", 0)),
        (17, Position("seq", 17)),
        ("17", Position("seq", 17)),
        (str(2**63 - 1), Position("seq", 2**63 - 1)),
        (NOON, Position("time", NOON_NS)),
        ("2026-05-01T12:00:00Z", Position("time", NOON_NS)),
        ("2026-05-01T14:00:00+02:00", Position("time", NOON_NS)),
        ("2026-05-01 12:00:00.000000001", Position("time", NOON_NS + 1)),
    ],
)
def test_a_position_is_written_as_people_write_it(place: PositionLike, position: Position) -> None:
    assert Position.of(place) == position


@pytest.mark.parametrize(
    "text", ["", "begin", "-1", "1.5", "٣", "2026-13-01", "9" * 5000, "3000-01-01T00:00:00Z"]
)
def test_text_that_is_no_position_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(PositionError, match="is not a position") as caught:
        Position.of(text)
    assert caught.value.hint is not None
    assert "start, end, last" in caught.value.hint


@pytest.mark.parametrize("seq", [-1, 2**63, str(2**63)])
def test_a_sequence_number_out_of_range_is_refused(seq: int | str) -> None:
    with pytest.raises(PositionError, match="sequence number"):
        Position.of(seq)


def test_a_time_without_a_zone_is_refused_with_a_hint() -> None:
    with pytest.raises(PositionError, match="no time zone") as caught:
        Position.of(NOON.replace(tzinfo=None))
    assert caught.value.hint == "use datetime(..., tzinfo=UTC)"


@pytest.mark.parametrize("moment", [2**63, -(2**63) - 1, dt.datetime.max.replace(tzinfo=dt.UTC)])
def test_a_moment_that_does_not_fit_in_64_bits_is_refused(moment: int | dt.datetime) -> None:
    with pytest.raises(PositionError, match="1677 to 2262"):
        Position.time(moment)


@given(
    st.datetimes(
        min_value=dt.datetime(1700, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
        max_value=dt.datetime(2200, 1, 1),  # noqa: DTZ001
        timezones=st.timezones(),
    )
)
def test_a_datetime_is_taken_to_the_microsecond_in_any_zone(moment: dt.datetime) -> None:
    nanoseconds = Position.of(moment).value
    assert nanoseconds % 1000 == 0
    found = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=nanoseconds // 1000)
    assert found == moment.astimezone(dt.UTC)


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (Position.START, "start"),
        (Position.END, "end"),
        (Position.LAST, "last"),
        (Position.sequence(5), "seq 5"),
        (Position.time(NOON_NS), "2026-05-01T12:00:00Z"),
        (Position.time(-(2**63)), "1677-09-21T00:12:43.145224192Z"),
    ],
)
def test_a_position_reads_as_text(position: Position, text: str) -> None:
    assert str(position) == text


def test_positions_are_values() -> None:
    assert len({Position.of("5"), Position.of(5), Position.sequence(5), Position.END}) == 2


@pytest.mark.parametrize("seq", [0, 9, 10, 15, 20])
def test_a_reader_may_stand_at_any_number_up_to_the_next_one(seq: int) -> None:
    assert check_seek("fmq:a", seq, 10, 20) == seq


@pytest.mark.parametrize("seq", [21, 2**63 - 2])
def test_a_number_beyond_the_end_is_refused_and_the_error_says_both(seq: int) -> None:
    with pytest.raises(PositionError, match=rf"{seq} .* 10 to 19, .* 20$") as caught:
        check_seek("fmq:a", seq, 10, 20)
    error = caught.value
    assert (error.seq, error.oldest, error.end) == (seq, 10, 20)
    assert error.hint is not None


def test_of_an_empty_stream_only_the_next_number_is_in_range() -> None:
    assert check_seek("fmq:a", 7, 7, 7) == 7
    with pytest.raises(PositionError, match="has none, and the next is 7"):
        check_seek("fmq:a", 8, 7, 7)
    with pytest.raises(PositionError, match="not negative"):
        check_seek("fmq:a", -1, 7, 7)
