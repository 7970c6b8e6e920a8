"""A reader goes through the segments as through one queue, from wherever it is told to start."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock import Position, describe, open_reader
from penstock.aio import open_reader as open_async_reader
from penstock.core.errors import (
    Closed,
    InvalidOption,
    NotFound,
    PositionError,
    StorageError,
    Unsupported,
)
from penstock.queue.log.segments import look
from penstock.queue.waiting import wait_any
from support.log_files import SMALL, log_reader, log_writer, segment_files, url_of
from support.unprivileged import run_without_rights
from support.waiting import SOON, background, waits

COUNT = 50
STEP = 1_000_000


def number_of(payload: bytes) -> int:
    return int(payload.split()[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of 50 messages in 7 segments, appended a millisecond apart."""
    log = tmp_path / "log"
    with log_writer(log) as writer:
        for i in range(COUNT):
            writer.write(b"%d " % i * (i % 5 + 1), type=i % 3, created_ns=i * STEP)
    return log


# --- reading ------------------------------------------------------------------------------------


def test_messages_come_one_by_one_in_order(path: Path) -> None:
    with log_reader(path) as reader:
        messages = [reader.read(0) for _ in range(COUNT)]
        assert [m.seq for m in messages if m is not None] == list(range(COUNT))
        assert reader.read(0) is None
        assert reader.read(0.01) is None


@pytest.mark.parametrize("at_once", [1, 3, 8, 1000])
def test_messages_come_many_at_a_time(path: Path, at_once: int) -> None:
    with log_reader(path) as reader:
        seqs: list[int] = []
        while messages := reader.read_many(at_once):
            assert len(messages) <= at_once
            seqs += [message.seq for message in messages]
        assert seqs == list(range(COUNT))
        assert reader.read_many(0) == []


@pytest.mark.parametrize("at_once", [1, 3, 8, 1000])
def test_messages_come_as_batches(path: Path, at_once: int) -> None:
    with log_reader(path) as reader:
        seqs: list[int] = []
        while (batch := reader.read_batch(at_once)).num_rows:
            seqs += batch.column("seq").to_pylist()
            payloads = batch.column("payload").to_pylist()
            assert list(map(number_of, payloads)) == batch.column("seq").to_pylist()
        assert seqs == list(range(COUNT))


def test_messages_can_be_used_in_place(path: Path) -> None:
    with log_reader(path) as reader:
        for i in range(COUNT // 2):
            with reader.view(0) as message:
                assert message is not None
                assert number_of(bytes(message.payload)) == i
        seen = COUNT // 2
        while True:
            with reader.view_batch(7) as batch:
                if not batch.num_rows:
                    break
                assert batch.column("seq")[0].as_py() == seen
                seen += batch.num_rows
        assert seen == COUNT


def test_what_is_there_is_read_and_no_more(path: Path) -> None:
    with log_reader(path) as reader, log_writer(path, "") as writer:
        seqs = []
        for message in reader.available():
            seqs.append(message.seq)
            writer.write(b"more")
        assert seqs == list(range(COUNT))


def test_a_type_is_picked_out(path: Path) -> None:
    with log_reader(path, "type=1") as reader:
        assert [m.seq for m in reader.available()] == list(range(1, COUNT, 3))
        books = reader.statistics()
        assert books.messages + books.filtered == COUNT
        assert books.filtered == COUNT - len(range(1, COUNT, 3))
    with log_reader(path, "type=9") as reader:
        assert reader.read_many(5) == []
        assert reader.read_batch(5).num_rows == 0
        assert reader.statistics().filtered == COUNT


def test_iterating_follows_the_log(path: Path) -> None:
    with log_reader(path, start="end") as reader, log_writer(path, "") as writer:
        writer.write(b"first")
        for i, message in enumerate(reader):
            assert message.seq == COUNT + i
            if i == 30:
                break
            writer.write(b"next")


# --- seeking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [0, 1, 7, 8, 9, 16, 33, 49])
def test_a_number_is_found_in_its_segment(path: Path, seq: int) -> None:
    with log_reader(path, start=seq) as reader:
        message = reader.read(0)
        assert message is not None
        assert message.seq == number_of(message.payload) == seq
        reader.seek("end")
        reader.seek(seq)
        assert [m.seq for m in reader.available()] == list(range(seq, COUNT))


@pytest.mark.parametrize("seq", [1, 3, 7, 8, 30, 0])
def test_a_reader_skips_to_any_message_as_if_it_had_read_to_there(path: Path, seq: int) -> None:
    with log_reader(path) as reader:
        assert reader.read(0) is not None
        reader.skip_to(seq)
        assert [m.seq for m in reader.available()] == list(range(seq, COUNT))
        assert reader.statistics().lost == 0
        with pytest.raises(PositionError):
            reader.skip_to(COUNT + 1)


@pytest.mark.parametrize("late", [0, -STEP + 1])
@pytest.mark.parametrize("seq", [0, 1, 7, 8, 9, 16, 33, 49])
def test_a_moment_is_found_in_its_segment(path: Path, seq: int, late: int) -> None:
    with log_reader(path, start=Position.time(seq * STEP + late)) as reader:
        message = reader.read(0)
        assert message is not None
        assert message.seq == seq


def test_moments_before_and_behind_all_are_found(path: Path) -> None:
    with log_reader(path) as reader:
        reader.seek(Position.time(-(2**63)))
        assert reader.statistics().next_seq == 0
        reader.seek(datetime(2026, 1, 1, tzinfo=UTC))
        assert reader.statistics().next_seq == COUNT
        reader.seek("1970-01-01T00:00:00.02Z")
        assert reader.statistics().next_seq == 20


def test_the_named_places_are_found(path: Path) -> None:
    with log_reader(path, start="last") as reader:
        message = reader.read(0)
        assert message is not None
        assert message.seq == COUNT - 1
        reader.seek("start")
        assert [m.seq for m in reader.read_many(2)] == [0, 1]
        reader.seek("end")
        assert reader.read(0) is None
        assert reader.newest_seq() == COUNT - 1
        with pytest.raises(PositionError):
            reader.seek(-1)
        with pytest.raises(PositionError):
            reader.seek("somewhere")


def test_the_last_message_is_found_when_the_newest_segment_has_none(path: Path) -> None:
    with log_writer(path, "") as writer:
        while writer.write(b"x") % 8 != 7:
            pass
        last = writer.statistics().last_seq
        writer._roll()
        assert look(path, int(segment_files(path)[-1].stem)).count == 0
    assert last is not None
    with log_reader(path, start="last") as reader:
        message = reader.read(0)
        assert message is not None
        assert message.seq == last
        assert reader.newest_seq() == last
    with log_reader(path, start=Position.time(2**62)) as reader:
        assert reader.statistics().next_seq == last + 1


@pytest.mark.parametrize("beyond", [1, 20, 2**63 - 2 - COUNT])
def test_a_place_beyond_the_next_message_is_refused(path: Path, beyond: int) -> None:
    with pytest.raises(PositionError, match=f"the next is {COUNT}"):
        log_reader(path, start=COUNT + beyond)
    with log_reader(path, start=COUNT) as reader, log_writer(path, "") as writer:
        with pytest.raises(PositionError):
            reader.seek(COUNT + beyond)
        assert writer.write(b"x") == COUNT
        message = reader.read(0)
        assert message is not None
        assert message.seq == COUNT
        assert reader.statistics().lost == 0


def test_many_are_as_many_as_there_are_over_all_segments(path: Path) -> None:
    for count in (1, 7, 8, 9, 25, COUNT):
        with log_reader(path) as reader:
            assert [m.seq for m in reader.read_many(count)] == list(range(count))
        with log_reader(path) as reader:
            assert reader.read_batch(count)["seq"].to_pylist() == list(range(count))
    with log_reader(path) as reader:
        assert len(reader.read_many(COUNT + 10)) == COUNT
        assert reader.read_many(1) == []


def test_an_empty_log_has_a_start_and_an_end(tmp_path: Path) -> None:
    log = tmp_path / "empty"
    log_writer(log).close()
    for start in ("start", "end", "last", "2020-01-01", 0):
        with log_reader(log, start=start) as reader:
            assert reader.read(0) is None
            assert list(reader.available()) == []
            assert reader.newest_seq() is None
            assert reader.statistics().next_seq == 0


# --- waiting ------------------------------------------------------------------------------------


def test_a_waiting_reader_goes_on_when_the_segment_does(path: Path) -> None:
    """A reader that sleeps on a full segment's futex is woken for the next one."""
    slowest = 0.0
    with log_writer(path, "") as writer:
        for _ in range(3):
            while (writer.statistics().last_seq or 0) % 8 != 7:
                writer.write(b"fill up")
            with log_reader(path, start="end") as reader, background(reader.read, 30) as reading:
                assert waits(reading)
                began = time.monotonic()
                seq = writer.write(b"in a new segment")
                message = reading.result(SOON)
                slowest = max(slowest, time.monotonic() - began)
                assert message is not None
                assert message.seq == seq  # type: ignore[attr-defined]
    assert slowest < 0.9, "it slept on for its second"


@pytest.mark.parametrize("call", ["read_many", "read_batch"])
def test_all_forms_of_reading_wait(path: Path, call: str) -> None:
    with log_writer(path, "") as writer, log_reader(path, start="end") as reader:
        while (writer.statistics().last_seq or 0) % 8 != 7:
            writer.write(b"fill up")
        reader.seek("end")
        with background(getattr(reader, call), 5, 30) as reading:
            assert waits(reading)
            writer.write(b"x")
            assert len(reading.result(SOON)) == 1  # type: ignore[arg-type]


def test_many_logs_are_waited_for_at_once(tmp_path: Path) -> None:
    logs = [tmp_path / f"log{i}" for i in range(3)]
    writers = [log_writer(log) for log in logs]
    readers = [log_reader(log) for log in logs]
    try:
        assert wait_any(readers, 0) == []
        for i in range(20):  # over segments
            which = i % 3
            with background(wait_any, readers, 30) as waiting:
                writers[which].write(b"x")
                assert waiting.result(SOON) == [readers[which]]
            assert len(readers[which].read_many(10)) == 1
    finally:
        for one in (*readers, *writers):
            one.close()


def test_a_reader_in_asyncio_goes_over_segments(path: Path) -> None:
    async def read() -> list[int]:
        with log_writer(path, "") as writer:
            async with open_async_reader(url_of(path), "end") as reader:
                seqs = []
                for _ in range(30):
                    writer.write(b"x")
                    message = await reader.read(10)
                    assert message is not None
                    seqs.append(message.seq)
                return seqs

    assert asyncio.run(read()) == list(range(COUNT, COUNT + 30))


def test_a_reader_waits_for_the_log(tmp_path: Path) -> None:
    log = tmp_path / "later"
    with pytest.raises(NotFound, match="there is no log"):
        log_reader(log)
    with pytest.raises(NotFound):
        log_reader(log, "wait=50ms")
    with pytest.raises(NotFound):
        describe(url_of(log))

    def make() -> None:
        with log_writer(log) as writer:
            writer.write(b"x")

    making = threading.Timer(0.2, make)
    making.start()
    with log_reader(log, "wait=true") as reader:
        assert reader.read(10) is not None
    making.join()


# --- books --------------------------------------------------------------------------------------


def test_the_books_add_up_at_every_step(path: Path) -> None:
    with log_reader(path, "type=1") as reader:
        while True:
            books = reader.statistics()
            assert books.messages + books.filtered + books.lost + books.backlog == COUNT
            if not reader.read_many(2):
                break
        assert books.messages == len(range(1, COUNT, 3))
    assert reader.statistics().backlog == 0


def test_a_closed_reader_says_so(path: Path) -> None:
    reader = log_reader(path)
    reader.read(0)
    reader.close()
    reader.close()
    assert reader.statistics().messages == 1
    for use in (lambda: reader.read(0), lambda: reader.read_many(1), lambda: reader.seek(0)):
        with pytest.raises(Closed):
            use()


@pytest.mark.parametrize("options", ["retain=5", "sync=none", "policy=wait", "slots=7"])
def test_an_option_for_writers_is_refused(path: Path, options: str) -> None:
    with pytest.raises(InvalidOption):
        log_reader(path, options)


def test_a_reader_needs_no_rights_but_to_read(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir="/dev/shm") as place:
        log = shutil.copytree(path, Path(place) / "log")
        for file in (Path(place), log, *log.iterdir()):
            file.chmod(0o555 if file.is_dir() else 0o444)

        def check() -> None:
            with log_reader(log) as reader:
                assert len(list(reader.available())) == COUNT
                assert reader.read(0.05) is None
            assert describe(url_of(log)).count == COUNT
            with pytest.raises(StorageError, match="Permission denied"):
                log_reader(log, "cursor=mine")
            with pytest.raises(StorageError, match="Permission denied"):
                log_writer(log)

        run_without_rights(check)


def test_a_segment_can_be_read_as_a_queue(path: Path) -> None:
    file = segment_files(path)[2]
    with open_reader(f"fmq:{file}") as reader:
        assert [m.seq for m in reader.available()] == list(range(16, 24))


def test_a_compressed_log_is_not_used_in_place(tmp_path: Path) -> None:
    with log_writer(tmp_path / "log", f"{SMALL}&compress=zstd") as writer:
        writer.write_many([b"x" * 100] * 20)
    with log_reader(tmp_path / "log") as reader, pytest.raises(Unsupported):
        reader.view().__enter__()
