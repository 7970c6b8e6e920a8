"""A recording is played back as fast as it was recorded, whatever stream it is in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import open_reader, open_writer
from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidOption
from penstock.relay import Relay, relay_options
from penstock.relay.pacing import Pacer, parse_speed

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 1_000_000_000


class Still:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def times(*seconds: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([int(each * SECOND) for each in seconds], np.int64)


def test_messages_go_when_they_are_due() -> None:
    clock = Still()
    pacer = Pacer(10.0, clock)  # type: ignore[arg-type]
    assert pacer.next(times(50, 50.05, 60)) == (2, 0.0)
    assert pacer.next(times(60, 70)) == pytest.approx((1, 1.0))
    clock.now += 2.5  # late: what should have gone by now goes at once
    assert pacer.next(times(70, 75, 80)) == (2, 0.0)
    assert pacer.next(times(80)) == pytest.approx((1, 0.5))


def test_times_that_go_back_begin_anew() -> None:
    clock = Still()
    pacer = Pacer(1.0, clock)  # type: ignore[arg-type]
    assert pacer.next(times(1000, 20)) == (1, 0.0)
    assert pacer.next(times(20, 21)) == (1, 0.0)
    assert pacer.next(times(21)) == pytest.approx((1, 1.0))


def test_a_speed_is_a_number_or_max() -> None:
    assert (parse_speed("1"), parse_speed("0.5"), parse_speed("max")) == (1.0, 0.5, None)
    for wrong in ("0", "-1", "fast", "nan", "inf", ""):
        with pytest.raises(InvalidOption, match="speed"):
            parse_speed(wrong)


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_a_recording_takes_as_long_as_it_took(tmp_path: Path, kind: str) -> None:
    source, target = f"{kind}:{tmp_path}/in", f"fmq:{tmp_path}/out"
    with open_writer(source) as writer:
        for i in range(41):
            writer.write(b"%d" % i, time_ns=1000 * SECOND + i * SECOND // 20)
    options = relay_options(source=source, target=target, follow=False, speed="4")
    began = time.monotonic()
    with open_reader(source) as reader, open_writer(target) as writer:
        books = Relay(reader, writer, options, clock=SYSTEM_CLOCK).run()
    took = time.monotonic() - began
    assert books.copied == 41
    assert 0.5 <= took < 3
    with open_reader(target) as reader:
        created = [message.created_ns for message in reader.available()]
    steps = np.diff(created) / SECOND
    assert np.median(steps) == pytest.approx(0.0125, abs=0.006)


def test_max_waits_for_nothing(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/in", f"fmq:{tmp_path}/out"
    with open_writer(source) as writer:
        for i in range(10):
            writer.write(b"x", time_ns=i * 3600 * SECOND)
    options = relay_options(source=source, target=target, follow=False, speed="max")
    with open_reader(source) as reader, open_writer(target) as writer:
        assert Relay(reader, writer, options).run().copied == 10
