"""Members and the writer are killed at any moment: each message is acknowledged once."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import describe, open_reader, open_writer
from penstock.core.capabilities import Grouped
from support.group_lives import NUMBER
from support.lives import Life, Lives, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBERS = 4
#: Messages, and kills of each kind at least.
SMALL, FULL = (6_000, 12), (200_000, 200)


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    processes = Lives("support.group_lives")
    yield processes
    processes.end()


@pytest.mark.parametrize(
    ("count", "kills"),
    [SMALL, pytest.param(*FULL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
@pytest.mark.parametrize(
    "stream", ["log:{}?segment=256k&sync=none", "fmq:{}?slots=262144&size=64M&sparse=true"]
)
def test_each_message_is_acknowledged_once_whoever_is_killed(
    tmp_path: Path, lives: Lives, stream: str, count: int, kills: int
) -> None:
    chance = random.Random(count)
    url = stream.format(tmp_path / "stream")
    plain = url.partition("?")[0]
    group = f"{plain}?group=workers&lease=1s"
    report = Report(tmp_path / "report")

    def write() -> Life:
        return lives.start("write", url=url, report=report.path, count=count, pause=0.01)

    def work() -> Life:
        seed = chance.randrange(1 << 30)
        return lives.start("work", url=group, report=report.path, at_once=100, seed=seed)

    writer = write()
    report.wait_for(b"w")
    writers = int(writer.kill().killed)  # now: on a slow machine it is done when the members are
    writer = write()
    members = [work() for _ in range(MEMBERS)]
    killed = 0
    deadline = time.monotonic() + count / 100
    while True:
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(chance.random() * 0.06)
        (books,) = describe(plain).details["groups"] or [{"acked": 0}]
        if books["acked"] >= count and killed >= kills:
            break
        if killed < kills or chance.random() < 0.1:
            victim = chance.randrange(MEMBERS)
            assert members[victim].kill().killed
            members[victim] = work()
            killed += 1
        if writer.ended() is None and chance.random() < 0.3:
            writers += writer.kill().killed
            writer = write()
    for member in members:
        member.kill()

    assert writers > 0
    assert writer.end().code == 0
    with open_reader(plain) as reader:
        there = [NUMBER.unpack_from(m.payload)[0] for m in reader.available()]
    assert there == list(range(count)), "the writer repeats or leaves out something"
    with open_reader(group) as reader:
        assert isinstance(reader, Grouped)
        assert reader.read_many(100) == []
        found = reader.group()
    assert (found.acked, found.lag, found.lost, found.dead) == (count, 0, 0, 0)
    assert (found.next_seq, found.floor, found.members) == (count, count, 1)
    acknowledged = Counter(numbers(report, b"a"))
    read = Counter(numbers(report, b"m"))
    assert max(acknowledged.values()) == 1, "acknowledged twice"
    # Whoever is killed between the call and the report has acknowledged, and did not say so.
    assert len(acknowledged) >= count - 100 * (killed + MEMBERS)
    assert found.redelivered >= sum(read.values()) - len(read) > 0


@pytest.mark.parametrize(
    "step", [61, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_a_member_that_dies_at_any_line_leaves_a_group_that_goes_on(
    tmp_path: Path, lives: Lives, step: int
) -> None:
    url = f"log:{tmp_path}/stream"
    with open_writer(f"{url}?sync=none") as writer:
        writer.write_many(NUMBER.pack(number) for number in range(10))
    at = 1
    while True:
        report = Report(tmp_path / f"report-{at}")
        group = f"{url}?group=at-{at}&sync=batch"
        outcome = lives.start("die_at_line", url=group, report=report.path, at=at).end()
        with open_reader(group) as reader:
            assert isinstance(reader, Grouped)
            came = [message.seq for message in reader.read_many(100)]
            acked = reader.group().acked
            reader.acknowledge()
            books = reader.group()
        assert acked in ((4,) if list(report.records(b"a")) else (0, 4))
        assert acked == 0 or list(report.records(b"b"))
        assert came == [*range(acked, 10)]
        assert (books.acked, books.lag, books.lost, books.members) == (10, 0, 0, 1)
        if not outcome.killed:
            assert list(report.records(b"e"))
            break
        at += step
    assert at > 100


def numbers(report: Report, kind: bytes) -> Iterator[int]:
    for _, first, last in report.records(kind):
        yield from range(first, last + 1)
