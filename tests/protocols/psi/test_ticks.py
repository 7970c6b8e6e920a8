from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.ticks import (
    MAX_NS,
    MAX_TICKS,
    MIN_NS,
    UNIX_EPOCH_TICKS,
    DateTime,
    DateTimeKind,
    TimeSpan,
    ns_to_raw,
    ns_to_ticks,
    numpy_to_raw,
    raw_to_ns,
    raw_to_numpy,
    ticks_to_ns,
)

NS = st.integers(MIN_NS + 100, MAX_NS - 100)


@given(NS)
def test_a_time_keeps_its_tick(time_ns: int) -> None:
    assert ticks_to_ns(ns_to_ticks(time_ns)) == time_ns // 100 * 100
    assert raw_to_ns(ns_to_raw(time_ns)) == time_ns // 100 * 100


@given(st.integers(0, MAX_TICKS), st.sampled_from(DateTimeKind))
def test_every_time_of_psi_becomes_one_that_fits_in_64_bits(ticks: int, kind: DateTimeKind) -> None:
    raw = DateTime(ticks, kind).raw
    assert MIN_NS <= raw_to_ns(raw) <= MAX_NS
    assert DateTime.from_raw(raw) == (ticks, kind)
    assert DateTime.from_raw(raw).time_ns == raw_to_ns(raw)


def test_the_first_and_the_last_time_are_the_ends() -> None:
    assert raw_to_ns(0) == MIN_NS
    assert raw_to_ns(MAX_TICKS) == MAX_NS
    assert ns_to_raw(MIN_NS) == 0
    assert ns_to_raw(MAX_NS) == MAX_TICKS
    assert raw_to_ns(0x48DC0B3F7ACF02C0) == 1_704_164_645_100_000_000
    assert ns_to_raw(1_704_164_645_100_000_000) == 0x48DC0B3F7ACF02C0


def test_the_ends_of_64_bits_do_not_wrap() -> None:
    first = UNIX_EPOCH_TICKS - 2**63 // 100
    last = UNIX_EPOCH_TICKS + (2**63 - 1) // 100
    assert ticks_to_ns(first) == -(2**63 // 100) * 100
    assert ticks_to_ns(first - 1) == MIN_NS
    assert ticks_to_ns(last) == (2**63 - 1) // 100 * 100
    assert ticks_to_ns(last + 1) == MAX_NS


def test_a_time_behind_the_last_one_is_refused() -> None:
    with pytest.raises(Malformed):
        raw_to_ns(MAX_TICKS + 1)
    with pytest.raises(Malformed):
        DateTime.from_raw(MAX_TICKS + 1)


def test_times_of_python_and_numpy_become_the_same() -> None:
    wanted = DateTime(638397614450000000, DateTimeKind.UTC)
    moment = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    for value in (
        wanted,
        moment,
        moment.astimezone(timezone(timedelta(hours=5))),
        np.datetime64("2024-01-02T03:04:05"),
        1_704_164_645_000_000_000,
        np.int64(1_704_164_645_000_000_000),
    ):
        assert DateTime.of(value) == wanted
    assert wanted.datetime == moment
    naive = DateTime.of(moment.replace(tzinfo=None))
    assert naive == DateTime(wanted.ticks, DateTimeKind.UNSPECIFIED)
    for wrong in (True, "2024", 1.5, np.timedelta64(1, "s"), DateTime(-1)):
        with pytest.raises(InvalidOption):
            DateTime.of(wrong)


def test_durations_of_python_and_numpy_become_the_same() -> None:
    for value in (TimeSpan(15), 1500, np.timedelta64(1500, "ns"), np.int32(1500)):
        assert TimeSpan.of(value) == TimeSpan(15)
    assert TimeSpan.of(timedelta(microseconds=-1)) == TimeSpan(-10)
    assert TimeSpan(-10).timedelta == timedelta(microseconds=-1)
    assert TimeSpan(2**62).ns == MAX_NS
    for wrong in (True, "1", 1.5, np.timedelta64("NaT"), TimeSpan(2**63)):
        with pytest.raises(InvalidOption):
            TimeSpan.of(wrong)


@given(st.lists(NS, max_size=20))
def test_many_times_become_what_each_becomes(times: list[int]) -> None:
    raw = np.array([ns_to_raw(time) for time in times], np.uint64)
    found = raw_to_numpy(raw)
    assert found.astype(np.int64).tolist() == [raw_to_ns(int(one)) for one in raw]
    assert numpy_to_raw(found).tolist() == raw.tolist()


def test_many_times_saturate_and_none_becomes_not_a_time() -> None:
    raw = np.array([0, MAX_TICKS], np.uint64)
    found = raw_to_numpy(raw)
    assert found.astype(np.int64).tolist() == [MIN_NS + 1, MAX_NS]
    assert numpy_to_raw(found).tolist() == raw.tolist()
    assert numpy_to_raw(np.array(["NaT"], "datetime64[ns]")).tolist() == [0]
    with pytest.raises(InvalidOption):
        numpy_to_raw(np.array(["3000-01-01"], "datetime64[s]"))
