"""Output streams: one writes, many read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.interfaces import Reader
from penstock.core.overflow import QueueFull
from penstock.queue.streams import OutputStream
from support.lives import Lives, Report
from support.streams import STREAM, payloads
from support.waiting import SOON, background, waits


def test_what_a_creator_writes_is_read_by_all_in_order() -> None:
    with OutputStream.create(STREAM, owner="me") as output:
        output.write(b"0", type=7)
        output.write_many([b"1", b"2"])
        with output.reserve(1) as place:
            place.buffer[:] = b"3"
        for _ in range(2):
            with OutputStream.open(STREAM) as reader:
                messages = list(reader.available())
                assert [m.payload for m in messages] == [b"0", b"1", b"2", b"3"]
                assert {m.stream for m in messages} == {STREAM}
        assert output.stream == STREAM
        assert output.statistics().messages == 4
    with OutputStream.open(STREAM, start="last") as reader:
        assert payloads(reader) == [b"3"]


def test_every_consumer_process_gets_all_that_the_producer_process_writes(
    lives: Lives, directory: str, report: Report, tmp_path: Path
) -> None:
    where = {"stream": str(STREAM), "directory": directory}
    reports = [Report(tmp_path / f"reader{number}") for number in range(3)]
    readers = [lives.start("open_and_read", **where, report=each.path) for each in reports]
    creator = lives.start("create_and_write", **where, report=report.path, owner="it", count=1500)
    assert creator.end() == (False, 0)
    written = [(number, seq) for _, number, seq in report.records(b"w")]
    assert written == [(number, number) for number in range(1500)]
    for reader, each in zip(readers, reports, strict=True):
        assert reader.end() == (False, 0)
        assert [(number, seq) for _, number, seq in each.records(b"m")] == written
        assert next(each.records(b"e")) == (0, 1501, 0)


def test_a_consumer_waits_for_a_stream_that_is_not_there_yet() -> None:
    with background(lambda: OutputStream.open(STREAM, wait=True)) as opening:
        assert waits(opening)
        with OutputStream.create(STREAM, owner="me") as output:
            output.write(b"x")
            reader = opening.result(SOON)
            assert isinstance(reader, Reader)
            with reader:
                assert payloads(reader) == [b"x"]


def test_a_held_consumer_is_waited_for() -> None:
    with (
        OutputStream.create(STREAM, owner="me", slots=4, hold="archive", policy="fail") as output,
        OutputStream.open(STREAM, hold="archive") as archive,
    ):
        output.write_many([b"x"] * 4)
        with pytest.raises(QueueFull):
            output.write(b"y")
        assert len(archive.read_many(4)) == 4
        archive.acknowledge()
        output.write(b"y")
