"""A log that is created anew is another one: readers notice, and are told what they lost."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import create, describe
from penstock.core.errors import CursorInUse, Unsupported
from penstock.core.interfaces import Bounds
from penstock.core.overflow import DropReason
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.index import LOOK_AGAIN
from penstock.queue.log.retention import Limits
from support.interruption import Interrupted, interrupted_at_line
from support.log_files import SMALL, log_reader, log_writer, segment_files, stored, url_of
from support.waiting import SOON, background, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from penstock.queue.log.reader import LogReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of 20 messages in three segments."""
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many([b"old"] * 20)
    return log


def test_a_log_is_emptied_and_has_another_epoch(path: Path) -> None:
    before = describe(url_of(path)).details["epoch"]
    create(url_of(path, f"{SMALL}&crc=false"), replace=True)
    found = describe(url_of(path))
    assert found.details["epoch"] != before
    assert found.details["crc"] is False
    assert (found.count, found.details["segments"]) == (0, 1)
    assert [file.name for file in segment_files(path)] == ["00000000000000000000.fmq"]


def test_a_reader_that_had_everything_goes_on_with_the_new_log(path: Path) -> None:
    with log_reader(path) as reader:
        assert len(list(reader.available())) == 20
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([b"new"] * 10)
        assert [(m.seq, m.payload) for m in reader.available()] == [(i, b"new") for i in range(10)]
        books = reader.statistics()
        assert (books.messages, books.lost, books.restarts) == (30, 0, 1)


@pytest.mark.parametrize("read", [0, 5, 8, 13])
def test_a_reader_is_told_what_it_had_not_read(path: Path, read: int) -> None:
    with log_reader(path) as reader:
        assert [reader.read_many(1)[0].payload for _ in range(read)] == [b"old"] * read
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([b"new"] * 10)
        assert [m.payload for m in reader.available()] == [b"new"] * 10
        books = reader.statistics()
        assert (books.lost, books.restarts) == (20 - read, 1)
        assert {loss.reason for loss in books.losses} == {DropReason.RECREATED}


def test_what_retention_removed_from_the_new_log_already_is_lost_too(path: Path) -> None:
    with log_reader(path) as reader:
        assert len(reader.read_many(15)) == 15
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([b"new"] * 20)
        trim_log(url_of(path), Limits(before_seq=16))
        assert [m.seq for m in reader.available()] == [16, 17, 18, 19]
        books = reader.statistics()
        assert (books.lost, books.restarts) == (5 + 16, 1)
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (15, 19, DropReason.RECREATED),
            (0, 15, DropReason.RETENTION),
        ]


def test_a_reader_that_waits_wakes_for_the_new_log(path: Path) -> None:
    with log_reader(path, start="end") as reader, background(reader.read, 30) as reading:
        assert waits(reading)
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write(b"new")
        message = reading.result(SOON)
        assert message is not None
        assert message.seq == 0  # type: ignore[attr-defined]
        assert reader.statistics().restarts == 1


def test_a_log_that_was_removed_and_made_again_is_noticed(path: Path) -> None:
    with log_reader(path, start="end") as reader, background(reader.read, 30) as reading:
        assert waits(reading)
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write(b"new")
        message = reading.result(SOON)
        assert message is not None
        assert message.payload == b"new"  # type: ignore[attr-defined]
        assert reader.statistics().restarts == 1


@pytest.mark.parametrize("seeks", [False, True])
def test_a_log_that_is_replaced_at_any_line_of_looking_is_read_from_its_start(
    tmp_path: Path, seeks: bool
) -> None:
    def make(path: Path, payload: bytes) -> None:
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([payload] * 20)

    for line in itertools.count(1):
        path = tmp_path / f"{line}"
        with log_writer(path) as writer:
            writer.write_many([b"old"] * 20)
        with log_reader(path, start="end") as reader:
            make(path, b"next")
            trim_log(url_of(path), Limits(before_seq=16))  # its oldest message is not the first
            with at_line(line, partial(make, path, b"last")) as done:
                bounds = reader.bounds()
                if seeks:
                    reader.seek("start")
                found = [(m.seq, m.payload) for m in reader.available()]
            if not done:
                assert line > 20, "it looks at more than that"
                break
            found += [(m.seq, m.payload) for m in reader.available()]
            is_of_the_last = bounds.epoch == reader.bounds().epoch
        assert (bounds.oldest, bounds.end) == ((0, 20) if is_of_the_last else (16, 20))
        assert found[-20:] == [(i, b"last") for i in range(20)], f"at line {line}"
        assert {payload for _, payload in found[:-20]} <= {b"next"}


@contextlib.contextmanager
def at_line(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Act before a line of the readers is run, counted from now on; it yields whether it came."""
    lines = itertools.count(1)
    done: list[int] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith(("log/reader.py", "log/index.py")):
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            done.append(number)
            act()
        return trace

    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(None)


def test_a_seek_finds_the_new_log(path: Path) -> None:
    for position, expected in (("start", 0), (3, 3), ("last", 9), ("1970-01-01", 0)):
        with log_reader(path) as reader:
            with log_writer(path, f"{SMALL}&create=always") as writer:
                writer.write_many([b"new"] * 10)
            reader.seek(position)
            message = reader.read(0)
            assert message is not None
            assert (message.seq, message.payload) == (expected, b"new")
            assert reader.statistics().restarts == 1


def test_the_bounds_are_those_of_the_log_that_is_there(path: Path) -> None:
    with log_reader(path) as reader:
        old = describe(url_of(path)).details["epoch"]
        assert reader.bounds() == Bounds(old, 0, 20)
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([b"new"] * 10)
            new = describe(url_of(path)).details["epoch"]
            assert reader.bounds() == Bounds(new, 0, 10)
            trim_log(url_of(path), Limits(before_seq=9))
            assert reader.bounds() == Bounds(new, 8, 10)


def test_a_cursor_of_the_log_before_starts_anew(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.read_many(5)
    with log_writer(path, f"{SMALL}&create=always") as writer:
        writer.write_many([b"new"] * 10)
    with log_reader(path, "cursor=me") as reader:
        assert [m.seq for m in reader.read_many(3)] == [0, 1, 2]
        assert reader.statistics().restarts == 1
    with log_reader(path, "cursor=me") as reader:
        assert reader.statistics().next_seq == 3
        assert reader.statistics().restarts == 0


def test_a_consumer_notices_while_it_reads(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        assert len(list(reader.available())) == 20
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write_many([b"new"] * 10)
        assert len(list(reader.available())) == 10
    with log_reader(path, "cursor=me") as reader:
        assert (reader.statistics().next_seq, reader.statistics().restarts) == (10, 0)


def test_other_compression_needs_another_reader(path: Path) -> None:
    with log_reader(path) as reader:
        list(reader.available())
        with log_writer(path, f"{SMALL}&create=always&compress=lz4") as writer:
            writer.write(b"new")
        with pytest.raises(Unsupported, match="compression"):
            reader.read(0)
    assert stored(path) == [b"new"]


# --- removed while it is used -------------------------------------------------------------------


def remove_while_written(path: Path, reader: LogReader, timeout: float) -> tuple[int, list[bytes]]:
    """Remove a log under its writer and a reader, which asks again and again.

    Return how many messages were written, and those that came.
    """
    found: list[bytes] = []

    def take() -> None:
        while (message := reader.read(timeout)) is not None:
            found.append(message.payload)

    with log_writer(path) as writer:
        for number in range(1500):
            writer.write(b"%d" % number)
            if number == 500:
                take()
                shutil.rmtree(path)
            if number > 500:
                time.sleep(0.001)
                if number % 50 == 0:
                    take()
        written = writer.statistics().messages
        deadline = time.monotonic() + SOON
        while found[-1] != b"1499" and time.monotonic() < deadline:
            take()
    return written, found


@pytest.mark.parametrize(("timeout", "options"), [(0.02, ""), (0, "cursor=me")])
def test_a_reader_with_little_patience_finds_the_log_that_was_made_anew(
    tmp_path: Path, timeout: float, options: str
) -> None:
    path = tmp_path / "log"
    log_writer(path).close()
    with log_reader(path, options) as reader:
        written, found = remove_while_written(path, reader, timeout)
        books = reader.statistics()
    assert found[-1] == b"1499"
    assert found == sorted(set(found), key=int)
    assert books.restarts == 1
    assert written == 1500
    assert books.lost + len(found) == written
    if options:  # its place is kept in the new log
        with log_reader(path, options) as reader:
            assert reader.read(0) is None
            assert reader.statistics().restarts == 0


def test_what_is_left_in_a_removed_log_comes_first(path: Path) -> None:
    with log_reader(path, start=17) as reader:
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write_many([b"new"] * 10)
            found = [*reader.read_many(100), *reader.read_many(100)]
            assert [(m.seq, m.payload == b"new") for m in found] == [
                (17, False),
                (18, False),
                (19, False),
                *((i, True) for i in range(10)),
            ]
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("damaged", ["fail", "skip"])
@pytest.mark.parametrize("by", ["many", "batch"])
def test_a_call_returns_messages_of_one_log_only(path: Path, by: str, damaged: str) -> None:
    def read() -> list[int]:
        if by == "many":
            return [message.seq for message in reader.read_many(100)]
        found: list[int] = reader.read_batch(100).column("seq").to_pylist()
        return found

    with log_reader(path, f"damaged={damaged}", start=17) as reader:
        epoch = reader.epoch
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write_many([b"new"] * 10)
        assert read() == [17, 18, 19]
        assert reader.epoch == epoch
        assert [*read(), *read()] == list(range(10))
        assert reader.epoch != epoch
        assert (reader.statistics().lost, reader.statistics().restarts) == (0, 1)


# What is raised within a finalizer gets to nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("left", "lost"), [((17, 18, 19), 0), ((5, 6, 7), 12)])
def test_a_read_that_is_interrupted_while_it_finds_the_new_log_takes_nothing(
    tmp_path: Path, left: tuple[int, ...], lost: int
) -> None:
    for line in itertools.count(1, 31):
        path = tmp_path / f"{line}"
        with log_writer(path) as writer:
            writer.write_many([b"old"] * 20)
        with log_reader(path, start=left[0]) as reader:
            shutil.rmtree(path)
            with log_writer(path) as writer:
                writer.write_many([b"new"] * 10)
            found: list[int] = []
            is_interrupted = True
            with contextlib.suppress(Interrupted), interrupted_at_line(line, "penstock/queue"):
                for _ in range(3):
                    found += [message.seq for message in reader.read_many(100)]
                is_interrupted = False
            while len(found) < 13 and (taken := reader.read_many(100, timeout=SOON)):
                found += [message.seq for message in taken]
            assert found == [*left, *range(10)], f"at line {line}"
            books = reader.statistics()
            assert (books.messages, books.lost, books.restarts) == (13, lost, 1), f"at line {line}"
        if not is_interrupted:
            return


def test_what_was_in_other_segments_of_a_removed_log_is_counted(path: Path) -> None:
    with log_reader(path) as reader:
        assert len(reader.read_many(3)) == 3
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write(b"new")
            assert [m.seq for m in reader.read_many(100)] == [3, 4, 5, 6, 7]
            assert [m.seq for m in reader.read_many(100)] == [0]
        assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
            (8, 19, DropReason.RECREATED)
        ]


@pytest.mark.parametrize(
    "look",
    [lambda reader: reader.statistics(), lambda reader: reader.newest_seq()],
    ids=["statistics", "newest_seq"],
)
def test_a_look_at_the_new_log_does_not_hide_what_was_lost_of_the_removed_one(
    path: Path, look: Callable[[LogReader], object]
) -> None:
    with log_reader(path) as reader:
        assert len(reader.read_many(3)) == 3
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write(b"new")
            time.sleep(2 * LOOK_AGAIN)
            look(reader)
            assert [m.seq for m in reader.read_many(100)] == [3, 4, 5, 6, 7]
            assert [m.seq for m in reader.read_many(100)] == [0]
        assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
            (8, 19, DropReason.RECREATED)
        ]


def test_counters_that_are_read_before_the_new_log_do_not_add_to_what_is_lost(path: Path) -> None:
    with log_reader(path) as reader:
        assert sum(1 for _ in reader.available()) == 20
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write_many([b"new"] * 30)
        time.sleep(2 * LOOK_AGAIN)
        reader.statistics()
        assert [m.seq for m in reader.available()] == list(range(30))
        assert (reader.statistics().lost, reader.statistics().restarts) == (0, 1)


def test_a_reader_whose_name_another_has_in_the_new_log_waits_until_it_is_free(path: Path) -> None:
    def message_of(reader: LogReader) -> bytes | None:
        message = reader.read(2 * LOOK_AGAIN)
        return None if message is None else message.payload

    with log_reader(path, "hold=me", start=17) as reader:
        assert len(reader.read_many(3)) == 3
        shutil.rmtree(path)
        with log_writer(path) as writer:
            writer.write_many([b"new"] * 3)
            with log_reader(path, "hold=me") as owner:
                assert message_of(owner) == b"new"
                for _ in range(3):
                    with pytest.raises(CursorInUse):
                        message_of(reader)
                assert reader.statistics().restarts == 0
            assert [message_of(reader) for _ in range(4)] == [b"new"] * 3 + [None]
        assert (reader.statistics().lost, reader.statistics().restarts) == (0, 1)
    with log_reader(path, "hold=me") as reader:
        assert reader.read(0) is None  # its place was kept in the new log


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_reader_goes_on_when_the_newest_segment_alone_was_replaced(
    path: Path, is_restored: bool
) -> None:
    with log_writer(path, "sync=none") as writer, log_reader(path) as reader:
        assert len(list(reader.available())) == 20
        newest = segment_files(path)[-1]
        copy = newest.read_bytes()
        newest.unlink()
        if is_restored:
            newest.write_bytes(copy)
        time.sleep(1.1)  # its writer looks once a second
        first = 20 if is_restored else 16  # what was removed is lost with its numbers
        for number in range(first, 30):  # also into the next segment
            assert writer.write(b"%d" % number) == number
            message = reader.read(SOON)
            assert message is not None
            assert (message.seq, message.payload) == (number, b"%d" % number)
        assert reader.statistics().lost == 0


def test_a_writer_whose_segment_is_full_makes_the_removed_log_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_writer(path, f"{SMALL}&retain=1G").close()
    with log_writer(path, "sync=none") as writer:
        assert writer.write_many([b"x"] * 8) == 7
        shutil.rmtree(path)
        assert writer.write_many([b"y"] * 3) == 2
    assert stored(path) == [b"y"] * 3
    details = describe(url_of(path)).details
    assert details["retain"] == 1 << 30  # like the one before
