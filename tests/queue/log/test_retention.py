"""Old segments go when they are too many or too old; their disk space is free; nobody is misled."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from penstock import describe
from penstock.core.errors import NotFound, Overrun
from penstock.core.overflow import DropReason
from penstock.queue.log.endpoint import segments, trim_log
from penstock.queue.log.retention import Limits
from penstock.queue.log.segments import open_segment, path_of
from support.log_files import (
    SMALL,
    disk,
    log_reader,
    log_writer,
    segment_files,
    stored,
    url_of,
)
from support.until import until

#: Segments of 64 KiB and 1 KiB of slots, each in a file of about 70 KiB.
PIECES = "segment=64k&segment_slots=16&sync=none"
PIECE = bytes(range(256)) * 32
HOUR = 3600 * 1_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def first_numbers(path: Path) -> list[int]:
    return [int(file.stem) for file in segment_files(path)]


# --- by size and by age -------------------------------------------------------------------------


def test_the_disk_that_a_log_takes_stays_below_its_limit(path: Path) -> None:
    with log_writer(path, f"{PIECES}&retain=500k") as writer:
        for i in range(300):
            writer.write(b"%d " % i + PIECE)
            # The segment that is written has space ahead.
            assert disk(*segment_files(path)[:-1]) <= 500 << 10
    assert disk(*segment_files(path)) <= 600 << 10
    payloads = stored(path)
    assert 40 <= len(payloads) <= 62
    assert [int(p.split()[0]) for p in payloads] == list(range(300 - len(payloads), 300))


def test_what_is_older_than_the_limit_goes_at_the_next_roll(path: Path) -> None:
    now = time.time_ns()
    with log_writer(path, f"{SMALL}&retain_age=1h") as writer:
        for i in range(20):
            writer.write(b"old", created_ns=now - 2 * HOUR + i)
        assert len(first_numbers(path)) == 1
        for _ in range(20):
            writer.write(b"new")
    payloads = stored(path)
    old = payloads.count(b"old")
    assert 0 < old < 8  # in one segment with new ones
    assert payloads == [b"old"] * old + [b"new"] * 20


def test_retention_is_applied_when_a_writer_opens_the_log(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([b"x"] * 50)
    log_writer(path, "retain=0").close()
    assert first_numbers(path) == [48]
    with log_writer(path) as writer:  # it is kept
        writer.write_many([b"x"] * 50)
    assert first_numbers(path) == [96]


def test_an_old_segment_that_fills_slowly_is_closed(path: Path) -> None:
    with log_writer(path, f"{SMALL}&retain_age=1s") as writer:
        writer.write(b"old", created_ns=time.time_ns() - 10_000_000_000)
        until(lambda: writer.write(b"new") > 0 and len(segment_files(path)) > 1)
        assert writer.statistics().refused == 0


def test_retention_works_in_the_background(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.queue.log.writer._BETWEEN_TRIMS", 0.1)
    with log_writer(path, f"{SMALL}&retain_age=500ms") as writer:
        writer.write_many([b"x"] * 20)
        assert len(first_numbers(path)) == 3
        until(lambda: first_numbers(path) == [16] or None)
        assert writer.write(b"y") == 20


def test_the_newest_segment_stays(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write(b"one")
        done = trim_log(url_of(path), Limits(retain=0, retain_age=0, before_seq=100))
        assert done.segments == 0
        assert done.left == disk(*segment_files(path))
        assert writer.write(b"two") == 1
    assert stored(path) == [b"one", b"two"]


# --- trimming by hand ---------------------------------------------------------------------------


def test_trimming_removes_whole_segments_before_a_message_or_a_moment(path: Path) -> None:
    with log_writer(path) as writer:
        for i in range(50):
            writer.write(b"%d" % i, created_ns=i)
    url = url_of(path)
    before = disk(*segment_files(path))
    done = trim_log(url, Limits(before_seq=17))
    assert (done.segments, done.messages) == (2, 16)
    assert done.bytes == before - disk(*segment_files(path))
    assert done.left == disk(*segment_files(path))
    assert first_numbers(path)[0] == 16
    assert trim_log(url, Limits(before_seq=17)).segments == 0
    assert trim_log(url, Limits(before_ns=24)).segments == 1
    assert first_numbers(path)[0] == 24
    assert trim_log(url).segments == 0  # it has no limits of its own
    assert trim_log(url, Limits(retain=0)).segments == 3
    assert stored(path) == [b"48", b"49"]
    with pytest.raises(NotFound):
        trim_log(url_of(path.with_name("another")), Limits(retain=0))


def test_a_log_can_be_trimmed_while_it_is_written_and_read(path: Path) -> None:
    stop = threading.Event()
    removed = 0

    def trim_on() -> None:
        nonlocal removed
        while not stop.is_set():
            removed += trim_log(url_of(path), Limits(retain=100 << 10)).messages

    with log_writer(path, PIECES) as writer, log_reader(path) as reader:
        trimming = threading.Thread(target=trim_on)
        trimming.start()
        try:
            for i in range(1500):
                writer.write(b"%d " % i + PIECE[: i % 4000])
                if i % 3 == 0:
                    for message in reader.read_many(2):
                        assert int(message.payload.split()[0]) == message.seq
        finally:
            stop.set()
            trimming.join()
        for message in reader.available():
            assert int(message.payload.split()[0]) == message.seq
        books = reader.statistics()
    assert books.messages + books.lost == 1500
    assert {loss.reason for loss in books.losses} <= {DropReason.RETENTION}
    assert removed > 0
    assert removed + len(stored(path)) == 1500


# --- readers of what is gone --------------------------------------------------------------------


def test_space_is_free_even_while_a_reader_maps_the_segment(path: Path) -> None:
    with log_writer(path, "segment=8M&sync=none") as writer:
        writer.write_many([bytes([i]) * (1 << 20) for i in range(20)])
        reader = log_reader(path)
        message = reader.read(0)
        assert message is not None
        descriptor = os.open(segment_files(path)[0], os.O_RDONLY)
        try:
            assert os.fstat(descriptor).st_blocks * 512 > 8 << 20
            trim_log(url_of(path), Limits(before_seq=8))
            status = os.fstat(descriptor)
            assert status.st_nlink == 0
            assert status.st_blocks * 512 <= 3 * 4096
            assert status.st_size > 8 << 20
        finally:
            os.close(descriptor)
        assert [m.seq for m in reader.available()] == list(range(8, 20))
        books = reader.statistics()
        assert (books.messages, books.lost, books.backlog) == (13, 7, 0)
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (1, 7, DropReason.RETENTION)
        ]
        assert message.payload == bytes(1 << 20)
        reader.close()


@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_a_filter_goes_on_behind_segments_that_were_removed(path: Path, compress: str) -> None:
    with (
        log_writer(path, f"{SMALL}&compress={compress}") as writer,
        log_reader(path, "type=2", start=0) as reader,
    ):
        for seq in range(12):
            writer.write(b"", 2 if seq == 9 else 0)
        assert trim_log(url_of(path), Limits(retain=0)).messages == 8
        assert [m.seq for m in reader.available()] == [9]
        assert reader.statistics().lost == 8


def test_a_slow_reader_is_told_what_it_lost_over_many_segments(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with log_writer(path) as writer, log_reader(path) as reader:
        writer.write_many([b"x"] * 100)
        assert reader.read(0) is not None
        trim_log(url_of(path), Limits(before_seq=90))
        assert reader.statistics().backlog == 100 - 1  # it knows of no loss yet
        with caplog.at_level(logging.WARNING):
            message = reader.read(0)
        assert message is not None
        assert message.seq == 88
        assert "7 messages lost (seq 1 to 7): retention" in caplog.text
        losses = reader.statistics().losses
        assert [(loss.first, loss.last) for loss in losses] == [(1, 87)]
        books = reader.statistics()
        assert books.messages + books.lost + books.backlog == 100


def test_a_slow_reader_may_go_on_with_the_newest_message(path: Path) -> None:
    with log_writer(path) as writer, log_reader(path, "resume=newest") as reader:
        writer.write_many([b"x"] * 100)
        assert reader.read(0) is not None
        trim_log(url_of(path), Limits(before_seq=50))
        assert [m.seq for m in reader.available()] == [99]
        books = reader.statistics()
        assert (books.messages, books.lost) == (2, 98)
        assert {loss.reason for loss in books.losses} == {DropReason.RETENTION}
        writer.write(b"y")
        assert [m.seq for m in reader.available()] == [100]


def test_a_message_that_was_removed_is_looked_for_and_counted(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([b"x"] * 50)
    trim_log(url_of(path), Limits(before_seq=30))
    with log_reader(path, start=10) as reader:
        message = reader.read(0)
        assert message is not None
        assert message.seq == 24
        assert reader.statistics().lost == 14
        reader.seek("1970-01-01")
        assert reader.read_many(1)[0].seq == 24
        reader.seek("start")
        assert reader.read_batch(1).column("seq").to_pylist() == [24]
        assert reader.statistics().lost == 14


def test_a_view_of_what_is_removed_is_taken_back(path: Path) -> None:
    with log_writer(path) as writer, log_reader(path) as reader:
        writer.write_many([b"x" * 500] * 50)
        with pytest.raises(Overrun), reader.view(0):
            trim_log(url_of(path), Limits(before_seq=30))
        assert [m.seq for m in reader.available()] == list(range(24, 50))
        books = reader.statistics()
        assert (books.messages, books.lost) == (26, 24)
        reader.seek(30)
        with pytest.raises(Overrun), reader.view_batch(5):
            trim_log(url_of(path), Limits(before_seq=45))
        assert {loss.reason for loss in reader.statistics().losses} == {DropReason.RETENTION}


def test_a_trim_that_was_killed_halfway_is_finished_by_the_next(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([b"x"] * 50)
    file = open_segment(path, 0, to_write=True)
    file.header["tail"] = file.field("head")  # and then it was killed
    file.close()
    with log_reader(path) as reader:
        assert [m.seq for m in reader.available()] == list(range(8, 50))
        assert reader.statistics().lost == 0  # the log began there
    assert describe(url_of(path)).count == 42
    assert trim_log(url_of(path)).segments == 1
    assert first_numbers(path)[0] == 8


def test_a_damaged_segment_goes_as_others_do(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([b"x"] * 50)
    path_of(path, 0).write_bytes(b"rubbish" * 1000)
    path_of(path, 8).write_bytes(b"")
    assert [listed.state for listed in segments(url_of(path))[:3]] == ["damaged"] * 2 + ["sealed"]
    done = trim_log(url_of(path), Limits(before_seq=30))
    assert (done.segments, done.messages) == (3, 8)
    assert first_numbers(path)[0] == 24


# --- held cursors -------------------------------------------------------------------------------


def test_what_a_held_cursor_has_not_passed_stays(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = f"{SMALL}&retain=0&hold=archive,display"
    with caplog.at_level(logging.WARNING), log_writer(path, options) as writer:
        writer.write_many([b"x"] * 30)
        assert caplog.text.count("keeps more than its limits, for the cursor archive") == 1
        assert first_numbers(path) == [0, 8, 16, 24]
        with log_reader(path, "cursor=archive") as archive:
            assert len(archive.read_many(16)) == 16
        assert trim_log(url_of(path)).held_by == "display"
        with log_reader(path, "cursor=display") as display:
            assert [m.seq for m in display.read_many(8)] == list(range(8))
            assert trim_log(url_of(path)).segments == 0  # not confirmed yet
            display.read(0)
            done = trim_log(url_of(path))
            assert (done.segments, done.held_by) == (1, "display")
            display.seek("end")
        done = trim_log(url_of(path))
        assert (done.segments, done.held_by) == (1, "archive")
        assert first_numbers(path) == [16, 24]
    with log_reader(path, "cursor=archive") as archive:
        assert [m.seq for m in archive.available()] == list(range(16, 30))
        assert archive.statistics().lost == 0
    with log_writer(path, "hold=") as writer:
        writer.write_many([b"x"] * 20)
    assert len(first_numbers(path)) == 1


def test_a_cursor_of_an_earlier_log_holds_everything(path: Path) -> None:
    with log_writer(path, f"{SMALL}&hold=archive&retain=0") as writer:
        writer.write_many([b"x"] * 30)
    with log_reader(path, "cursor=archive", start="end") as archive:
        archive.seek("end")
    with log_writer(path, f"{SMALL}&hold=archive&retain=0&create=always") as writer:
        writer.write_many([b"y"] * 30)
    assert first_numbers(path) == [0, 8, 16, 24]
    with log_reader(path, "cursor=archive") as archive:
        assert len(list(archive.available())) == 30
        assert archive.statistics().restarts == 1


def test_that_a_segment_cannot_be_removed_is_no_reason_not_to_write(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with log_writer(path, f"{SMALL}&retain=0") as writer:
        monkeypatch.setattr(Path, "unlink", refuse)
        with caplog.at_level(logging.WARNING):
            writer.write_many([b"x"] * 20)
        monkeypatch.undo()
        assert "old segments cannot be removed" in caplog.text
        assert writer.statistics().messages == 20
        writer.write_many([b"y"] * 8)
    assert len(first_numbers(path)) == 1


# --- a clock that jumps --------------------------------------------------------------------------

DAY = 24 * HOUR


class Clocks:
    """The clock on the wall, and how long the machine has been running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._began = time.time_ns()
        self.passed = 0
        self.ahead = 0
        monkeypatch.setattr(time, "time_ns", lambda: self._began + self.passed + self.ahead)
        monkeypatch.setattr(time, "clock_gettime_ns", lambda _: DAY + self.passed)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_a_clock_that_is_a_day_ahead_for_a_moment_removes_nothing(
    path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    options = f"{SMALL}&retain_age=1h"
    with log_writer(path, options) as writer:
        writer.write_many([b"x"] * 20)
    clocks.ahead = DAY
    with caplog.at_level(logging.WARNING), log_writer(path, options) as writer:
        writer.write_many([b"x"] * 20)
        assert trim_log(url_of(path)).segments == 0
    assert "the clock is 86,400 s ahead" in caplog.text
    clocks.ahead = 0
    with log_writer(path, options) as writer:
        writer.write(b"x")
    assert first_numbers(path)[0] == 0
    assert len(stored(path)) == 41


def test_a_clock_that_stays_ahead_is_believed_after_an_hour(
    path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    options = f"{SMALL}&retain_age=12h"
    with log_writer(path, options) as writer:
        writer.write_many([b"x"] * 20)
    clocks.ahead = DAY
    log_writer(path, options).close()
    clocks.passed += HOUR // 2
    log_writer(path, options).close()
    assert first_numbers(path)[0] == 0
    clocks.passed += HOUR
    with caplog.at_level(logging.WARNING):
        log_writer(path, options).close()
    assert "is believed" in caplog.text
    assert first_numbers(path) == [16]


def test_age_counts_also_while_nobody_writes(path: Path, clocks: Clocks) -> None:
    options = f"{SMALL}&retain_age=12h"
    with log_writer(path, options) as writer:
        writer.write_many([b"x"] * 20)
    clocks.passed += DAY
    log_writer(path, options).close()
    assert first_numbers(path) == [16]


def test_right_after_the_machine_started_nothing_is_removed_for_its_age(
    path: Path, clocks: Clocks
) -> None:
    options = f"{SMALL}&retain_age=12h"
    with log_writer(path, options) as writer:
        writer.write_many([b"x"] * 20)
    kept = json.loads((path / "clock").read_text())
    (path / "clock").write_text(json.dumps(kept | {"boot": "another"}))
    clocks.ahead = DAY  # nothing tells whether it was off for so long
    with log_writer(path, options) as writer:
        writer.write_many([b"x"] * 4)
    assert first_numbers(path)[0] == 0
    clocks.passed += 60_000_000_000
    log_writer(path, options).close()
    assert first_numbers(path) == [16]
