"""Named readers that leave, are killed and come back: their positions, and what they are told."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from penstock import describe
from penstock.core.errors import CursorInUse, InvalidOption
from support.held_readers import fill, taken
from support.lives import Lives, Report
from support.self_describing import Maker
from support.until import until
from support.waiting import SOON, background, waits
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import ReaderEntry, list_queue

if TYPE_CHECKING:
    from pathlib import Path


def row_of(url: str, name: str) -> ReaderEntry:
    path = url.removeprefix("fmq:") + ".fmq"
    [row] = [row for row in list_queue(path).readers if row.name == name]
    return row


# --- readers that are not there -------------------------------------------------------------------


def test_without_keep_a_reader_that_left_is_not_waited_for_and_told_on_return(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        with wide_reader(f"{url}?hold=a") as reader:
            fill(writer)
            assert len(reader.read_many(2)) == 2
        fill(writer, 6)  # 2, 3, 4 and 5 are lost to it
        assert row_of(url, "a").position == 2
        with wide_reader(f"{url}?hold=a") as again:
            assert again.statistics().next_seq == 2
            assert taken(again) == [6, 7, 8, 9]
            [loss] = again.statistics().losses
            assert (loss.first, loss.last) == (2, 5)
            with background(writer.write, b"it is waited for again") as write:
                assert waits(write)
                again.acknowledge()
                assert write.result(SOON) == 10


def test_a_writer_that_waits_goes_on_when_the_reader_leaves(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        reader = wide_reader(f"{url}?hold=a")
        fill(writer)
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            reader.close()
            assert write.result(SOON) == 4
        assert row_of(url, "a").position == 0


def test_with_keep_the_writer_waits_for_a_reader_that_is_not_there(url: str) -> None:
    with wide_writer(f"{url}?hold=archive&keep=true") as writer:
        fill(writer)
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            with wide_reader(f"{url}?hold=archive") as reader:
                assert taken(reader) == [0, 1, 2, 3]
                assert waits(write)
                reader.acknowledge()
                assert write.result(SOON) == 4
            assert taken(wide_reader(f"{url}?hold=archive")) == [4]


def test_a_reader_that_comes_later_begins_where_the_writer_began(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=8&size=16384") as writer:
        fill(writer, 3)
    with wide_writer(f"{url}?hold=late") as writer:
        fill(writer, 2)
        with wide_reader(f"{url}?hold=late", start="end") as reader:
            assert taken(reader) == [0, 1, 2, 3, 4]
            assert reader.statistics().lost == 0


def test_a_reader_that_comes_in_the_middle_is_waited_for_from_then_on(url: str) -> None:
    with wide_writer(f"{url}?hold=late") as writer:
        fill(writer, 10)
        with (
            wide_reader(f"{url}?hold=late") as reader,
            background(writer.write, b"one too many") as write,
        ):
            assert waits(write)
            assert taken(reader) == [6, 7, 8, 9]
            assert reader.statistics().lost == 6
            reader.acknowledge()
            assert write.result(SOON) == 10


# --- positions ------------------------------------------------------------------------------------


def test_a_position_survives_a_clean_restart_and_everything_read_is_done(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        fill(writer)
        for expected in range(4):
            with wide_reader(f"{url}?hold=a") as reader:
                message = reader.read(0)
                assert message is not None
                assert message.seq == expected
        assert row_of(url, "a").position == 4


def test_what_was_being_worked_on_when_an_error_came_is_delivered_again(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        fill(writer)
    with contextlib.suppress(ZeroDivisionError), wide_reader(f"{url}?hold=a") as reader:
        assert reader.read(0)
        assert reader.read(0)
        raise ZeroDivisionError
    with wide_reader(f"{url}?hold=a") as again:
        assert taken(again) == [1, 2, 3]


def test_a_position_survives_also_without_a_writer_that_names_it(url: str) -> None:
    with wide_writer(url) as writer:
        fill(writer)
    with wide_reader(f"{url}?hold=a") as reader:
        assert len(reader.read_many(3)) == 3
    with wide_reader(f"{url}?hold=a") as again:
        assert taken(again) == [3]


def test_a_message_is_delivered_again_after_a_kill(url: str, lives: Lives, tmp_path: Path) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        report = Report(tmp_path / "report")
        consumer = lives.start(
            "consume", url=f"{url}?hold=a", report=report.path, at_once=2, pause=60
        )
        report.wait_for(b"r")
        maker = Maker(1, 0, 100)
        writer.write_many([maker.make(number) for number in range(4)])
        until(lambda: list(report.records(b"m")))
        assert consumer.kill().killed
        delivered = [seq for *_, seq in report.records(b"m")]
        assert delivered[0] == 0
        with wide_reader(f"{url}?hold=a") as again:
            assert taken(again) == [0, 1, 2, 3]


def test_a_killed_reader_holds_the_writer_for_less_than_a_second(
    url: str, lives: Lives, tmp_path: Path
) -> None:
    with wide_writer(f"{url}?hold=a&timeout=60") as writer:
        fill(writer)
        report = Report(tmp_path / "report")
        reader = lives.start("open_and_wait", url=f"{url}?hold=a", report=report.path)
        report.wait_for(b"r")
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            began = time.monotonic()
            assert reader.kill().killed
            assert write.result(SOON) == 4
            assert time.monotonic() - began < 1
        row = row_of(url, "a")
        assert (row.position, row.pid) == (0, reader.pid)
        with wide_reader(f"{url}?hold=a") as again:
            assert taken(again) == [1, 2, 3, 4]
            assert again.statistics().lost == 1


# --- names ----------------------------------------------------------------------------------------


def test_a_name_in_use_is_refused_with_the_process_that_has_it(
    url: str, lives: Lives, tmp_path: Path
) -> None:
    report = Report(tmp_path / "report")
    other = lives.start("open_and_wait", url=f"{url}?hold=a", report=report.path)
    report.wait_for(b"r")
    with pytest.raises(CursorInUse) as caught:
        wide_reader(f"{url}?hold=a")
    assert (caught.value.name, caught.value.pid) == ("a", other.pid)
    with wide_reader(f"{url}?hold=b"), pytest.raises(CursorInUse):
        wide_reader(f"{url}?hold=b")
    other.kill()
    wide_reader(f"{url}?hold=a").close()


def test_a_reader_has_one_name(url: str) -> None:
    with pytest.raises(InvalidOption, match="one name"):
        wide_reader(f"{url}?hold=a,b")


def test_who_is_waited_for_is_shown(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=a"):
        fill(writer)
        info = describe(url)
        assert info.blocking
        [reader] = info.details["readers"]
        assert (reader["name"], reader["pid"]) == ("a", os.getpid())


# --- a queue that is created anew -----------------------------------------------------------------


def test_a_held_reader_goes_over_to_a_queue_that_was_created_anew(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        fill(writer, 3)
    with wide_reader(f"{url}?hold=a") as reader:
        assert taken(reader) == [0, 1, 2]
        with wide_writer(f"{url}?create=always&slots=4&size=16384&hold=a") as writer:
            assert writer.write(b"new") == 0
            message = reader.read(SOON)
            assert message is not None
            assert (message.seq, message.payload) == (0, b"new")
            assert reader.statistics().restarts == 1
            fill(writer, 3)
            with background(writer.write, b"one too many") as write:
                assert waits(write), "it is not waited for in the new queue"
                reader.acknowledge()
                assert write.result(SOON) == 4


def test_a_held_reader_that_returns_to_a_queue_created_anew_begins_at_its_start(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer:
        fill(writer, 3)
    with wide_reader(f"{url}?hold=a") as reader:
        assert len(reader.read_many(2)) == 2
    with wide_writer(f"{url}?create=always&slots=4&size=16384") as writer:
        fill(writer, 3)
    with wide_reader(f"{url}?hold=a") as again:
        assert taken(again) == [0, 1, 2]
        assert again.statistics().lost == 0


@pytest.mark.parametrize("way", ["read", "read_many", "read_batch", "view", "view_batch"])
def test_a_row_says_that_what_was_overwritten_is_done_when_nothing_else_is_there(
    queue_path: str, way: str
) -> None:
    url = f"fmq:{queue_path}"
    with (
        wide_writer(f"{url}?slots=4&size=4096") as writer,
        wide_reader(f"{url}?hold=archive") as reader,
    ):
        writer.write_many([b"one", b"two"])
        writer.reserve(4096).abort()  # what had to go for it is gone
        match way:
            case "read":
                assert reader.read(timeout=0) is None
            case "read_many":
                assert reader.read_many(10) == []
            case "read_batch":
                assert len(reader.read_batch(10)) == 0
            case "view":
                with reader.view(timeout=0) as message:
                    assert message is None
            case _:
                with reader.view_batch(10) as batch:
                    assert len(batch) == 0
        assert reader.statistics().lost == 2
        assert row_of(url, "archive").position == 2
