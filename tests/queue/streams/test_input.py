"""Input streams: many write, one reads, and a kill -9 loses nothing of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from penstock import aio
from penstock.core.errors import WriteTimeout
from penstock.core.overflow import QueueFull
from penstock.queue.streams import InputStream
from support.lives import Life, Lives, Report
from support.stream_lives import LAST_TYPE
from support.streams import STREAM
from support.waiting import A_WHILE, SOON, background, waits


def test_what_producers_write_is_read_in_the_order_of_arrival() -> None:
    with (
        InputStream.create(STREAM, owner="me") as stream,
        InputStream.open(STREAM) as one,
        InputStream.open(STREAM) as another,
    ):
        for number in range(10):
            (one if number % 3 else another).write(b"%d" % number)
        messages = stream.read_many(20)
        assert [m.payload for m in messages] == [b"%d" % number for number in range(10)]
        assert {m.stream for m in messages} == {STREAM}
        assert stream.stream == STREAM
        assert [m.seq for m in messages] == list(range(10))


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.full)])
def test_producers_that_are_killed_lose_nothing_that_they_were_told_is_written(
    kills: int, lives: Lives, directory: str, report: Report, tmp_path: Path
) -> None:
    where = {"stream": str(STREAM), "directory": directory}
    consumer = lives.start("create_and_read", **where, report=report.path, owner="consumer")
    report.wait_for(b"r")
    chance = random.Random(1)
    reports: list[Report] = []

    def start() -> tuple[Life, Report]:
        mine = Report(tmp_path / f"producer{len(reports)}")
        reports.append(mine)
        life = lives.start("open_and_write", **where, report=mine.path, producer=len(reports))
        return life, mine

    running = [start() for _ in range(3)]
    for _ in range(kills):
        time.sleep(chance.random() * 0.06)
        which = chance.randrange(3)
        assert running[which][0].kill().killed
        running[which] = start()
    for life, mine in running:
        assert life.ended() is None, "it failed by itself"
        mine.wait_for(b"w")
        life.kill()
    with InputStream.open(STREAM) as last:
        last.write(b"", LAST_TYPE)
    assert consumer.end() == (False, 0)  # it has checked that none was torn

    delivered = list(report.records(b"m"))
    assert [seq for _, _, seq in delivered] == list(range(len(delivered)))
    numbers: dict[int, list[int]] = defaultdict(list)
    for producer, number, _ in delivered:
        numbers[producer].append(number)
    places = {(producer, number): seq for producer, number, seq in delivered}
    confirmed = 0
    for mine in reports:
        for producer, number, seq in mine.records(b"w"):
            assert places[producer, number] == seq
            confirmed += 1
    assert confirmed > 100
    for in_order in numbers.values():
        assert in_order == list(range(len(in_order)))
    assert next(report.records(b"e")) == (0, len(delivered) + 1, 0)


def test_a_consumer_that_is_killed_again_and_again_gets_every_message(
    lives: Lives, directory: str, tmp_path: Path, report: Report
) -> None:
    where = {"stream": str(STREAM), "directory": directory}
    InputStream.create(STREAM, owner="the first", slots=64, size="64k").close()
    producer = lives.start("open_and_write", **where, report=report.path, producer=1, count=600)
    chance = random.Random(2)
    reports: list[Report] = []
    ended = False
    while not ended:
        reports.append(Report(tmp_path / f"consumer{len(reports)}"))
        owner = f"consumer {len(reports)}"
        mine = reports[-1].path
        consumer = lives.start("create_and_read", **where, report=mine, owner=owner, pause=0.001)
        reports[-1].wait_for(b"m")
        ended = consumer.ended(chance.random() * 0.1) == (False, 0)
        if not ended:
            ended = not consumer.kill().killed
    assert producer.end() == (False, 0)
    assert len(reports) > 3
    expected = 0
    for each in reports:
        for position, (_, number, seq) in enumerate(each.records(b"m")):
            assert number == seq
            if position == 0:
                # The one that was being worked on when its predecessor was killed comes again.
                assert expected - 1 <= seq <= expected
                expected = seq
            assert seq == expected
            expected += 1
    assert expected == 600


def test_a_consumer_that_closed_goes_on_behind_what_it_read() -> None:
    with InputStream.create(STREAM, owner="me") as stream, InputStream.open(STREAM) as producer:
        producer.write_many([b"0", b"1", b"2"])
        assert stream.read(0) is not None
    with InputStream.create(STREAM, owner="somebody else") as stream:
        assert [m.payload for m in stream.read_many(5)] == [b"1", b"2"]


def test_what_a_consumer_was_working_on_when_it_failed_comes_again() -> None:
    class Mishap(Exception):
        pass

    def work() -> None:
        with InputStream.create(STREAM, owner="me") as stream:
            with InputStream.open(STREAM) as producer:
                producer.write_many([b"0", b"1", b"2"])
            stream.read(0)
            stream.read(0)
            raise Mishap

    with pytest.raises(Mishap):
        work()
    with InputStream.create(STREAM, owner="me") as stream:
        assert [m.payload for m in stream.read_many(5)] == [b"1", b"2"]


def test_a_producer_waits_for_a_consumer_that_is_behind_or_away() -> None:
    stream = InputStream.create(STREAM, owner="me", slots=4)
    with InputStream.open(STREAM, timeout=30) as producer:
        producer.write_many([b"0", b"1", b"2", b"3"])
        with background(producer.write, b"4") as write:
            assert waits(write)
            stream.close()
            assert waits(write)
            with InputStream.create(STREAM, owner="somebody else") as stream:
                assert stream.read(0) is not None
                stream.acknowledge()
                assert write.result(SOON) == 4


def test_a_producer_that_must_not_wait_is_told_so() -> None:
    with InputStream.create(STREAM, owner="me", slots=4) as stream:
        with InputStream.open(STREAM, timeout=A_WHILE) as patient:
            patient.write_many([b"x"] * 4)
            with pytest.raises(WriteTimeout, match="consumer"):
                patient.write(b"y")
        with InputStream.open(STREAM, policy="fail") as impatient, pytest.raises(QueueFull):
            impatient.write(b"y")
        with InputStream.open(STREAM, policy="drop") as careless:
            careless.write(b"y")
        assert [m.seq for m in stream.read_many(10)] == [1, 2, 3, 4]
        assert stream.statistics().lost == 1


def test_producers_that_wait_do_not_fail_because_another_waits_longer() -> None:
    with (
        InputStream.create(STREAM, owner="me", slots=2) as stream,
        InputStream.open(STREAM, timeout=30) as one,
        InputStream.open(STREAM, timeout=None) as another,
    ):
        one.write_many([b"0", b"1"])
        with background(one.write, b"2") as first, background(another.write, b"3") as second:
            assert waits(first)
            assert waits(second)
            found = [stream.read(SOON) for _ in range(4)]
            assert {first.result(SOON), second.result(SOON)} == {2, 3}
            assert None not in found


def test_a_stream_can_be_used_by_asyncio_programs() -> None:
    async def main() -> None:
        async with (
            aio.AsyncReader(InputStream.create(STREAM, owner="me")) as stream,
            aio.AsyncWriter(InputStream.open(STREAM)) as producer,
        ):
            task = asyncio.create_task(stream.read())
            await asyncio.sleep(0.05)
            await producer.write(b"x")
            message = await task
            assert message is not None
            assert message.payload == b"x"

    asyncio.run(main())
