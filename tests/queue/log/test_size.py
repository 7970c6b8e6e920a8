"""What a log costs does not grow with what it holds; its disk does not grow with what passed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import Position, describe
from penstock.queue.log.endpoint import check
from support.log_files import disk, log_reader, log_writer, segment_files, url_of

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = [pytest.mark.full, pytest.mark.timeout(900)]


def milliseconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call, also in the kernel: the median of some tries."""
    times = []
    for _ in range(9):
        began = time.process_time()
        call()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=LONG)])
def test_a_log_of_many_segments_opens_and_seeks_in_milliseconds(count: int, memory: Path) -> None:
    log = memory / "log"
    with log_writer(log, "segment=64k&segment_slots=512&sync=none") as writer:
        payloads = [b"x" * 64] * 512
        for _ in range(count):
            writer.write_many(payloads)
    total = count * 512
    assert len(segment_files(log)) == count
    with log_reader(log) as reader:
        reader.seek(total // 2)
        moment = reader.read_many(1)[0].created_ns
        costs = {
            "seq": milliseconds(lambda: reader.seek(total // 3)),
            "time": milliseconds(lambda: reader.seek(Position.time(moment))),
            "last": milliseconds(lambda: reader.seek("last")),
            "statistics": milliseconds(reader.statistics),
        }
        reader.seek(Position.time(moment))
        message = reader.read(0)
        assert message is not None
        assert message.created_ns == moment
        reader.seek(total // 2)
        assert reader.statistics().backlog == total - total // 2
    costs["open"] = milliseconds(lambda: log_reader(log, start=total // 2).close())
    costs["open to write"] = milliseconds(lambda: log_writer(log, "sync=none").close())
    # Looking at the names of a directory is all that grows.
    assert max(costs.values()) < 50 + count / 50, costs
    assert describe(url_of(log)).count == total


@pytest.mark.parametrize(
    ("passing", "retain"), [(64 << 20, 8 << 20), pytest.param(16 << 30, 256 << 20, marks=LONG)]
)
def test_a_log_with_a_limit_does_not_grow_whatever_passes(
    passing: int, retain: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    segment = retain // 8
    payload = bytes(range(256)) * 256  # 64 KiB
    at_once = [payload] * 16
    highest = read = 0
    with log_writer(log, f"segment={segment}&retain={retain}&sync=none") as writer:
        with log_reader(log, start="end") as reader:
            for _ in range(passing // (len(payload) * len(at_once))):
                writer.write_many(at_once)
                highest = max(highest, disk(*log.iterdir()))
                read += len(reader.read_many(4))  # too slow on purpose
            while messages := reader.read_many(100):
                read += len(messages)
            books = reader.statistics()
        assert books.messages == read
        assert books.messages + books.lost == passing // len(payload)
        assert books.lost > 0
    # One segment more than the limit may be there while the next begins, and its space ahead.
    assert highest <= retain + 2 * segment + (16 << 20)
    assert not any(checked.faults for checked in check(url_of(log)))
