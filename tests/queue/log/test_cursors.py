"""A consumer's place survives it: what was not confirmed comes again, and nothing is left out."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from penstock import describe
from penstock.core.errors import CursorInUse, DamagedQueue, InvalidOption
from penstock.core.overflow import DropReason
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.retention import Limits
from support import self_describing
from support.lives import Lives, Report
from support.log_files import (
    SMALL,
    after_power_failure,
    log_reader,
    log_writer,
    segment_files,
    url_of,
)
from support.log_lives import LAST_TYPE

COUNT = 50


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of 50 messages in 7 segments."""
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many([b"%d" % i for i in range(COUNT)])
    return log


def next_seq(path: Path, name: str = "me") -> int:
    cursors = describe(url_of(path)).details["cursors"]
    found: int = next(cursor["next_seq"] for cursor in cursors if cursor["name"] == name)
    return found


def test_a_consumer_goes_on_where_the_one_before_ended(path: Path) -> None:
    for first in (0, 10, 20):
        with log_reader(path, "cursor=me") as reader:
            assert [reader.read_many(1)[0].seq for _ in range(10)] == list(range(first, first + 10))
    with log_reader(path, "cursor=other", start=40) as reader:
        assert len(list(reader.available())) == 10
    with log_reader(path, "cursor=me", start="end") as reader:  # it has a place already
        assert reader.statistics().next_seq == 30


def test_what_was_returned_is_confirmed_by_the_next_call(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.read(0)
        assert next_seq(path) == 0
        reader.read(0)
        assert next_seq(path) == 1
        reader.acknowledge()
        assert next_seq(path) == 2
        assert len(reader.read_many(4)) == 4
        assert next_seq(path) == 2
        reader.read_batch(3)
        assert next_seq(path) == 6
        with reader.view(0):
            assert next_seq(path) == 9
        with reader.view_batch(3):
            assert next_seq(path) == 10
        for message in reader.available():
            assert next_seq(path) == message.seq
            if message.seq == 30:
                break
        reader.seek(5)
        assert next_seq(path) == 5
    assert next_seq(path) == 5


def test_a_clean_end_confirms_and_an_error_does_not(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.read_many(8)
    assert next_seq(path) == 8

    def fail() -> None:
        with log_reader(path, "cursor=me") as reader:
            reader.read_many(3)
            reader.read_many(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert next_seq(path) == 11


def test_a_name_has_one_reader_at_a_time(path: Path) -> None:
    with log_reader(path, "cursor=me"):
        with pytest.raises(CursorInUse) as caught:
            log_reader(path, "cursor=me")
        assert caught.value.pid == os.getpid()
        log_reader(path, "cursor=another").close()
        log_reader(path).close()
    log_reader(path, "cursor=me").close()
    for name in ("", "x" * 100, "%C3%A4" * 50):
        with pytest.raises(InvalidOption):
            log_reader(path, f"cursor={name}")


def test_a_forked_process_has_not_the_parents_place(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.read_many(5)
        child = os.fork()
        if child == 0:
            try:
                reader.read(0)
            except Exception:  # noqa: BLE001 - it is closed here
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert next_seq(path) == 0
        reader.read(0)
        assert next_seq(path) == 5


def test_a_consumer_that_was_away_is_told_what_it_lost(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.read_many(5)
    trim_log(url_of(path), Limits(before_seq=30))
    with log_reader(path, "cursor=me") as reader:
        assert [m.seq for m in reader.available()] == list(range(24, COUNT))
        books = reader.statistics()
        assert books.lost == 19
        assert {loss.reason for loss in books.losses} == {DropReason.RETENTION}


def test_an_error_at_opening_does_not_move_the_place(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.seek(10)
    segment = segment_files(path)[1]
    whole = segment.read_bytes()
    segment.write_bytes(b"rubbish" + whole[7:])
    with pytest.raises(DamagedQueue):
        log_reader(path, "cursor=me")
    assert next_seq(path) == 10
    segment.write_bytes(whole)
    with log_reader(path, "cursor=me") as reader:
        assert reader.read_many(1)[0].seq == 10


def test_cursors_are_described_with_how_far_behind_they_are(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.seek(20)
        (cursor,) = describe(url_of(path)).details["cursors"]
        assert cursor == {
            "name": "me", "pid": os.getpid(), "alive": True, "next_seq": 20, "behind": 30,
        }  # fmt: skip
    (cursor,) = describe(url_of(path)).details["cursors"]
    assert (cursor["pid"], cursor["alive"]) == (None, False)


def test_a_compressed_log_has_consumers_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log_writer(log, f"{SMALL}&compress=lz4") as writer:
        writer.write_many([b"%d" % i * 50 for i in range(30)])
    for first in (0, 12):
        with log_reader(log, "cursor=me") as reader:
            for i in range(first, first + 12):
                message = reader.read(0)
                assert message is not None
                assert message.payload == b"%d" % i * 50
    assert next_seq(log) == 24


# --- killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rounds", [15, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_every_message_comes_at_least_once_to_a_consumer_that_is_killed(
    rounds: int, memory: Path, tmp_path: Path, lives: Lives
) -> None:
    chance = random.Random(rounds)
    log = memory / "log"
    url = url_of(log)
    log_writer(log).close()
    produced = Report(tmp_path / "producer")
    producer = lives.start(
        "produce", url=url, report=produced.path, writer=1, batch=20, largest=500, pause=0.001
    )
    produced.wait_for(b"w")
    seen: list[int] = []
    confirmed = 0
    for life in range(rounds):
        report = Report(tmp_path / f"consumer {life}")
        worker = lives.start(
            "work", url=f"{url}?cursor=me", report=report.path, at_once=chance.choice([1, 5, 50])
        )
        _, _, start = report.wait_for(b"r")
        # From what was confirmed, or what was returned and is no more being worked on.
        assert confirmed <= start <= max([*seen, -1]) + 1
        ended = worker.ended(chance.uniform(0, 0.05))
        assert ended is None, "it ended by itself"
        worker.kill()
        got = [seq for _, _, seq in report.records(b"m")]
        assert got == list(range(start, start + len(got)))
        seen += got
        confirmed = max([confirmed, *(seq for _, _, seq in report.records(b"c"))])
    producer.kill()
    with log_writer(log) as writer:
        end = writer.write(b"", type=LAST_TYPE)
    report = Report(tmp_path / "the last consumer")
    worker = lives.start("work", url=f"{url}?cursor=me", report=report.path, at_once=100)
    worker.end(timeout=300)  # the longer the rounds took, the more is left
    seen += [seq for _, _, seq in report.records(b"m")]
    assert set(seen) == set(range(end))
    with log_reader(log) as reader:
        for message in reader.available():
            if message.type != LAST_TYPE:
                self_describing.check(message.payload)


@pytest.mark.parametrize("seq", [51, 2**62, 2**63 - 2])
def test_a_cursor_beyond_the_end_is_an_error_that_names_it(path: Path, seq: int) -> None:
    with log_reader(path, "cursor=me") as reader:
        epoch = reader.bounds().epoch
    with CursorFile(str(path / "cursors")) as cursors, cursors.claim("me") as cursor:
        cursor.move(seq, epoch)
    for _ in range(2):  # it is not moved by that
        with pytest.raises(DamagedQueue, match="cursor me") as caught:
            log_reader(path, "cursor=me")
        assert "another hold=NAME" in (caught.value.hint or "")
    with log_reader(path, "cursor=you") as reader:
        assert reader.read(0) is not None


def test_recovery_believes_no_cursor(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        epoch = reader.bounds().epoch
    with CursorFile(str(path / "cursors")) as cursors, cursors.claim("me") as cursor:
        cursor.move(2**63 - 2, epoch)
    after_power_failure(path)
    with log_writer(path, "") as writer:
        assert writer.write(b"new") == 50
    with log_reader(path, "cursor=me") as reader:
        assert [m.seq for m in reader.available()] == [50]


@pytest.mark.parametrize("byte", [8, 12, 16, 17, 18, 20, 23, 32, 120, 123, 127])
def test_one_changed_byte_of_a_cursor_passes_over_nothing(path: Path, byte: int) -> None:
    """Its place is known all the same, or it is an error, or another name: never further on."""
    with log_reader(path, "cursor=me") as reader:
        assert len(reader.read_many(10)) == 10
    file = path / "cursors"
    data = bytearray(file.read_bytes())
    data[4096 + byte] ^= 0x40
    file.write_bytes(data)
    try:
        with log_reader(path, "cursor=me") as reader:
            assert next(m.seq for m in reader.available()) <= 10
            assert reader.statistics().lost == 0
    except DamagedQueue as error:
        found = error.offset, bool(error.hint)
    else:
        return
    assert found == (4096, True)  # the entry, in the file
