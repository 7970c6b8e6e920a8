"""Many writers that take turns: in order of arrival, none lost or torn, and no lock is for ever."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import LockTimeout
from support.lives import Life, Lives, Report
from support.until import until
from support.waiting import A_WHILE, SOON, background, waits
from support.wide_lives import LAST_TYPE
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType


@pytest.fixture
def url(queue_path: str) -> str:
    url = f"fmq:{queue_path}"
    wide_writer(f"{url}?slots=64&size=65536&writers=many").close()
    return url


def start_consumer(lives: Lives, url: str, report: Report) -> Life:
    consumer = lives.start("consume", url=f"{url}?hold=c", report=report.path, at_once=50)
    report.wait_for(b"r")
    return consumer


def end_consumer(consumer: Life, url: str, report: Report) -> dict[int, list[int]]:
    """Let it come to its end; return the numbers that it got of each writer, as they came."""
    with wide_writer(f"{url}?hold=c") as last:
        last.write(b"", LAST_TYPE)
    assert consumer.end() == (False, 0)
    numbers: dict[int, list[int]] = defaultdict(list)
    for expected, (writer, number, seq) in enumerate(report.records(b"m")):
        assert seq == expected
        numbers[writer].append(number)
    [(_, messages, lost)] = report.records(b"e")
    assert lost == 0
    assert messages == sum(map(len, numbers.values())) + 1
    return numbers


def confirmed(report: Report) -> list[tuple[int, int]]:
    """Return number and seq of what a producer had been told was written."""
    return [(number, seq) for _, number, seq in report.records(b"w")]


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [150, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_messages_of_many_writers_come_whole_and_each_writers_in_its_order(
    url: str, lives: Lives, tmp_path: Path, count: int
) -> None:
    report = Report(tmp_path / "consumer")
    consumer = start_consumer(lives, url, report)
    reports = [Report(tmp_path / f"producer {writer}") for writer in range(4)]
    producers = [
        lives.start(
            "produce",
            url=f"{url}?hold=c",
            report=reports[writer].path,
            writer=writer,
            batch=1 + 5 * (writer % 2),
            largest=3000,
            count=count,
        )
        for writer in range(4)
    ]
    for producer in producers:
        assert producer.end(500) == (False, 0)
    numbers = end_consumer(consumer, url, report)
    assert numbers == {writer: list(range(count)) for writer in range(4)}
    seqs = [seq for producer in reports for _, seq in confirmed(producer)]
    assert sorted(seqs) == list(range(4 * count)), "what a writer was told is where it was put"


@pytest.mark.parametrize(
    "kills", [8, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_what_killed_writers_had_written_comes_once_and_what_they_had_not_does_not_come(
    url: str, lives: Lives, tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    report = Report(tmp_path / "consumer")
    consumer = start_consumer(lives, url, report)
    running: list[tuple[Life, Report]] = []
    reports: list[Report] = []
    while len(reports) < kills + 3:
        while len(running) < 3:
            number = len(reports)
            reports.append(Report(tmp_path / f"producer {number}"))
            life = lives.start(
                "produce",
                url=f"{url}?hold=c",
                report=reports[-1].path,
                writer=number,
                batch=chance.choice([1, 9]),
                largest=3000,
            )
            running.append((life, reports[-1]))
        victim, its = running.pop(chance.randrange(3))
        until(lambda its=its: confirmed(its))  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.02))
        assert victim.kill().killed
    for life, _ in running:
        life.kill()
    numbers = end_consumer(consumer, url, report)
    for writer, its in enumerate(reports):
        told = [number for number, _ in confirmed(its)]
        found = numbers[writer]
        assert found == list(range(len(found)))
        # The call in which it was killed may have been through.
        assert len(told) <= len(found) <= len(told) + 9
    list_queue(url.removeprefix("fmq:") + ".fmq")


# --- the lock -------------------------------------------------------------------------------------


def test_the_lock_of_a_killed_writer_is_free_at_once(
    url: str, lives: Lives, tmp_path: Path
) -> None:
    took = []
    with wide_writer(url) as writer:
        for number in range(9):
            report = Report(tmp_path / f"{number}")
            other = lives.start("reserve_and_wait", url=url, report=report.path)
            report.wait_for(b"r")
            with background(writer.write, b"after") as write:
                if number == 0:
                    assert waits(write), "the other does not have the lock"
                began = time.monotonic()
                other.kill()
                assert write.result(SOON) == number
            took.append(time.monotonic() - began)
    assert statistics.median(took) < 0.2
    assert max(took) < 2
    with wide_reader(url) as reader:
        assert [m.payload for m in reader.read_many(100)] == [b"after"] * 9


def test_a_lock_that_is_kept_is_an_error_that_names_who_has_it(
    url: str, lives: Lives, tmp_path: Path
) -> None:
    report = Report(tmp_path / "report")
    other = lives.start("reserve_and_wait", url=url, report=report.path)
    report.wait_for(b"r")
    with wide_writer(f"{url}?lock_timeout=300ms") as writer:
        began = time.monotonic()
        with pytest.raises(LockTimeout, match=rf"\b{other.pid}\b") as caught:
            writer.write(b"meanwhile")
        assert 0.3 <= time.monotonic() - began < SOON
        assert "writers=many" not in (caught.value.hint or "")
        with pytest.raises(LockTimeout):
            writer.write_many([b"meanwhile"] * 3)
        assert writer.statistics()[:3] == (0, 0, 4)
        other.kill()
        assert writer.write(b"after") == 0


def test_a_writer_that_waits_for_the_lock_goes_on_when_it_is_given(url: str) -> None:
    with wide_writer(url) as first, wide_writer(url) as second:
        for number in range(3):
            place = first.reserve(100)
            place.buffer[:] = b"1" * 100
            with background(second.write, b"2") as write:
                assert waits(write)
                began = time.monotonic()
                assert place.commit() == 2 * number
                assert write.result(SOON) == 2 * number + 1
                assert time.monotonic() - began < 1


@pytest.mark.parametrize("how", ["abort", "close", "an error"])
def test_a_reservation_that_is_given_up_gives_the_lock_back(url: str, how: str) -> None:
    with wide_writer(url) as first, wide_writer(url) as second:
        place = first.reserve(100)
        match how:
            case "abort":
                place.abort()
            case "close":
                first.close()
            case _:
                with contextlib.suppress(ZeroDivisionError), place:
                    raise ZeroDivisionError
        assert second.write(b"2") == 0


def test_a_write_that_fails_gives_the_lock_back(url: str) -> None:
    with wide_writer(url) as first, wide_writer(url) as second:
        for bad in (b"x" * 100_000, "no bytes"):
            with pytest.raises((ValueError, TypeError)):
                first.write(bad)  # type: ignore[arg-type]
            with pytest.raises((ValueError, TypeError)):
                first.write_many([b"good", bad])  # type: ignore[list-item]
        assert second.write(b"2") == 2


def test_a_writer_that_waits_for_the_lock_hears_signals(url: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with wide_writer(url) as first, wide_writer(f"{url}?lock_timeout=60") as second:
            place = first.reserve(1)
            signal.setitimer(signal.ITIMER_REAL, A_WHILE)
            with pytest.raises(Interrupted):
                second.write(b"2")
            place.abort()
            assert second.write(b"2") == 0
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_fork_does_not_give_the_lock_of_its_parent_away(url: str) -> None:
    with wide_writer(url) as first, wide_writer(url) as second:
        place = first.reserve(3)
        place.buffer[:] = b"one"
        pid = os.fork()
        if pid == 0:
            first.close()
            os._exit(0)
        os.waitpid(pid, 0)
        with background(second.write, b"two") as write:
            assert waits(write)
            assert place.commit() == 0
            assert write.result(SOON) == 1
    with wide_reader(url) as reader:
        assert [m.payload for m in reader.read_many(10)] == [b"one", b"two"]


# --- one writer -----------------------------------------------------------------------------------


def test_a_queue_of_one_writer_refuses_a_second_and_takes_it_when_the_first_is_gone(
    queue_path: str, lives: Lives, tmp_path: Path
) -> None:
    url = f"fmq:{queue_path}"
    report = Report(tmp_path / "report")
    other = lives.start("reserve_and_wait", url=url, report=report.path)
    report.wait_for(b"r")
    with pytest.raises(LockTimeout, match=rf"\b{other.pid}\b") as caught:
        wide_writer(f"{url}?lock_timeout=0.1")
    assert "writers=many" in (caught.value.hint or "")
    with background(wide_writer, f"{url}?lock_timeout=60") as opened:
        assert waits(opened)
        began = time.monotonic()
        other.kill()
        writer = opened.result(SOON)
        assert time.monotonic() - began < 1
    with writer:  # type: ignore[attr-defined]
        assert writer.write(b"first") == 0  # type: ignore[attr-defined]
