"""Processes are killed at random, also while a segment begins: nothing published is lost."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from penstock.queue.log.endpoint import check, segments
from penstock.queue.log.segments import begin_segment, open_segment, path_of, seal
from penstock.queue.log.settings import load_settings
from support import self_describing
from support.lives import Lives, Report
from support.log_files import SMALL, log_reader, log_writer, segment_files, stored, url_of
from support.log_lives import LAST_TYPE
from support.waiting import SOON

MANY = [pytest.mark.full, pytest.mark.timeout(900)]


def check_whole(path: Path) -> None:
    for checked in check(url_of(path)):
        assert checked.faults == (), checked


def states(path: Path) -> list[str]:
    return [listed.state for listed in segments(url_of(path))]


# --- killed for real ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 30], ids=["single", "batches"])
@pytest.mark.parametrize("options", [SMALL, f"{SMALL}&compress=lz4"], ids=["plain", "compressed"])
@pytest.mark.parametrize("rounds", [12, pytest.param(100, marks=MANY)])
def test_after_a_kill_every_published_message_is_there(
    rounds: int, options: str, batch: int, memory: Path, tmp_path: Path, lives: Lives
) -> None:
    chance = random.Random(f"{rounds} {options} {batch}")
    log = memory / "log"
    log_writer(log, options).close()
    follower = Report(tmp_path / "follower")
    following = lives.start("consume", url=url_of(log), report=follower.path, at_once=50)
    follower.wait_for(b"r")
    written: dict[int, tuple[int, int]] = {}
    for life in range(rounds):
        report = Report(tmp_path / f"writer {life}")
        writer = lives.start(
            "produce", url=url_of(log), report=report.path, writer=life, batch=batch, largest=2000
        )
        report.wait_for(b"w")
        assert writer.ended(chance.uniform(0, 0.03)) is None, "it ended by itself"
        writer.kill()
        written |= {seq: (life, number) for _, number, seq in report.records(b"w")}
        check_whole(log)
    with log_writer(log) as last:
        assert last.recovery.cut == 0
        assert last.recovery.set_aside == []
        end = last.write(b"", type=LAST_TYPE)
    assert states(log).count("live") == 1
    following.end()
    found = {}
    with log_reader(log) as reader:
        for message in reader.available():
            if message.type != LAST_TYPE:
                found[message.seq] = tuple(self_describing.check(message.payload))
        assert reader.statistics().lost == 0
    assert list(found) == list(range(end))  # no number is missing, none is there twice
    assert written.items() <= found.items()
    # Of each life a message, or a batch, may be there that it did not get to report.
    assert len(found) - len(written) <= rounds * batch
    # And somebody who was there all the time got the same.
    assert {seq: (writer, n) for writer, n, seq in follower.records(b"m")} == found
    (books,) = follower.records(b"e")
    assert books[1:] == (end + 1, 0)


@pytest.mark.parametrize("rounds", [25, pytest.param(200, marks=MANY)])
def test_a_writer_that_is_killed_while_it_opens_leaves_a_log(
    rounds: int, memory: Path, tmp_path: Path, lives: Lives
) -> None:
    chance = random.Random(rounds)
    log = memory / "log"
    confirmed = 0
    for life in range(rounds):
        report = Report(tmp_path / f"{life}")
        writer = lives.start("open_again_and_again", url=url_of(log, SMALL), report=report.path)
        assert writer.ended(chance.uniform(0, 0.03)) is None, "it ended by itself"
        writer.kill()
        confirmed += len(list(report.records(b"w")))
        with log_writer(log) as own:
            assert own.recovery.cut == 0
            assert own.recovery.set_aside == []
            own.write(b"own")
        check_whole(log)
        assert confirmed + life + 1 <= len(stored(log)) <= confirmed + 2 * (life + 1)
    assert confirmed > 0
    with log_reader(log) as reader:
        assert [m.seq for m in reader.available()] == list(range((reader.newest_seq() or 0) + 1))
    assert not list(log.glob(".*"))


def test_a_process_that_trims_is_killed_and_the_log_is_whole(
    memory: Path, tmp_path: Path, lives: Lives
) -> None:
    chance = random.Random(1)
    log = memory / "log"
    options = f"{SMALL}&retain=40k"
    follower = Report(tmp_path / "follower")
    log_writer(log, options).close()
    following = lives.start("consume", url=url_of(log), report=follower.path, at_once=3, pause=0.01)
    follower.wait_for(b"r")
    for life in range(20):
        report = Report(tmp_path / f"{life}")
        writer = lives.start("produce", url=url_of(log), report=report.path, writer=life, batch=9)
        report.wait_for(b"w")
        writer.ended(chance.uniform(0, 0.02))
        writer.kill()
        check_whole(log)
    with log_writer(log) as last:
        end = last.write(b"", type=LAST_TYPE)
    following.end()
    (books,) = follower.records(b"e")
    messages, lost = books[1:]
    assert messages + lost == end + 1
    assert lost > 0
    # What it was told to have lost is just what it did not get.
    got = {seq for _, _, seq in follower.records(b"m")}
    told = {seq for _, first, last in follower.records(b"l") for seq in range(first, last + 1)}
    assert got | told == set(range(end))
    assert not got & told


# --- killed at every line -----------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["roll", "open", "trim", "replace"])
@pytest.mark.parametrize("step", [31, pytest.param(1, marks=MANY)])
def test_whichever_line_is_the_last_the_log_is_whole(
    step: int, doing: str, memory: Path, tmp_path: Path, lives: Lives
) -> None:
    log = memory / "log"
    for at in range(1 + len(doing), 100_000, step):
        with log_writer(log, f"{SMALL}&create=always") as writer:
            writer.write_many([b"%d" % i for i in range(30)])
        with log_reader(log) as reader:
            assert reader.read(0) is not None
            report = Report(tmp_path / f"{at}")
            life = lives.start(
                "die_at_line", url=url_of(log, SMALL), report=report.path, doing=doing, at=at
            )
            outcome = life.end()
            assert outcome.code in {None, 0}
            with log_writer(log) as writer:
                assert writer.recovery.cut == 0
                assert writer.recovery.set_aside == []
                new = writer.write(b"new")
            check_whole(log)
            assert states(log).count("live") == 1
            check_after(doing, log, new)
            # Somebody who was there all the time is not misled.
            rest = list(reader.available())
            assert rest[-1].payload == b"new"
            books = reader.statistics()
            if books.restarts:
                assert books.messages + books.lost == 30 + new + 1
            else:
                assert books.messages + books.lost == new + 1
        if not outcome.killed:
            assert at > 20
            return


def check_after(doing: str, log: Path, new: int) -> None:
    """Make sure that a log of 30 messages is what it can be, killed or not; and one new one."""
    payloads = stored(log)
    assert payloads[-1] == b"new"
    old = [b"%d" % i for i in range(30)]
    match doing:
        case "roll":
            assert payloads[:30] == old
            assert set(payloads[30:-1]) <= {b"x" * 1000}
            assert new == len(payloads) - 1 <= 42
        case "open":
            assert payloads[:-1] == old
        case "trim":
            assert payloads[:-1] == old[31 - len(payloads) :]
            assert (31 - len(payloads)) % 8 == 0
        case _:  # all of it, or nothing
            assert payloads[:-1] in ([], old)
            assert new == len(payloads) - 1


# --- at the points that matter, by hand ---------------------------------------------------------


def test_a_writer_that_died_before_it_sealed_left_two_segments_that_take_messages(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many([b"x"] * 8)
    settings = load_settings(log)
    assert settings is not None
    begin_segment(log, settings, 8, sync=False).close()
    assert states(log) == ["live", "live"]
    with log_reader(log) as reader:
        assert len(reader.read_many(10)) == 8
        assert reader.read(0) is None
        assert reader.newest_seq() == 7
        with log_writer(log) as writer:
            assert states(log) == ["sealed", "live"]
            assert writer.write(b"y") == 8
        message = reader.read(0)
        assert message is not None
        assert message.seq == 8
    assert stored(log) == [b"x"] * 8 + [b"y"]


def test_a_log_whose_newest_segment_is_sealed_goes_on_in_a_new_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many([b"x"] * 5)
    file = open_segment(log, 0, to_write=True)
    seal(file)
    file.close()
    with log_reader(log) as reader:
        assert len(list(reader.available())) == 5
        assert reader.read(0.01) is None
        with log_writer(log) as writer:
            assert writer.write(b"y") == 5
        assert [m.seq for m in reader.available()] == [5]
    assert [int(file.stem) for file in segment_files(log)] == [0, 5]


def test_leftovers_of_a_writer_that_died_are_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log_writer(log).close()
    leftovers = [log / f".{path_of(log, 8).name}.123.new", log / "log.json.new"]
    mine = log / "notes.txt"
    for file in (*leftovers, mine):
        file.write_bytes(b"half of something")
    log_writer(log).close()
    assert mine.exists()
    assert not any(file.exists() for file in leftovers)


def test_a_log_that_was_only_half_made_is_made(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log_writer(log).close()
    segment_files(log)[0].unlink()  # it was killed before this
    with log_writer(log) as writer:
        assert writer.write(b"x") == 0
    assert stored(log) == [b"x"]


def test_a_writer_in_the_same_process_takes_over_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = log_writer(log)
    writer.write(b"one")
    del writer  # nobody closed it
    gc.collect()
    with log_writer(log) as writer:
        writer.write(b"two")
    assert stored(log) == [b"one", b"two"]


def test_an_interrupted_roll_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with log_writer(log) as writer, log_reader(log) as reader:
        writer.write_many([bytes(1000)] * 7)
        for point in ("begin_segment", "LockFile", "Space"):
            with monkeypatch.context() as patch:
                patch.setattr(f"penstock.queue.log.writer.{point}", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    writer.write(bytes(4000))
            assert states(log) == ["live"]
        writer.write(b"fits")  # and is in one segment only
        with monkeypatch.context() as patch:
            patch.setattr("penstock.queue.log.writer.seal", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.write(b"does not fit")
        assert states(log) == ["live", "live"]
        assert len(reader.read_many(8)) == 8
        writer.write_many([b"y"] * 20)
        # The old one was not sealed: the reader finds out by itself.
        assert [m.seq for m in reader.read_many(8, timeout=SOON)] == list(range(8, 16))
        books = writer.statistics()
    assert (books.messages, books.refused) == (28, 4)
    log_writer(log).close()
    assert states(log).count("live") == 1
    assert stored(log) == [bytes(1000)] * 7 + [b"fits"] + [b"y"] * 20


def test_a_roll_that_is_interrupted_after_the_switch_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many([b"x"] * 8)
        resume, interrupts = writer._resume, iter([KeyboardInterrupt])

        def resume_unless_interrupted() -> bool:
            for interrupt in interrupts:
                raise interrupt
            return resume()

        monkeypatch.setattr(writer, "_resume", resume_unless_interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write(b"does not fit")
        assert states(log) == ["live"]
        assert writer.write(b"y") == 8
    assert stored(log) == [b"x"] * 8 + [b"y"]
