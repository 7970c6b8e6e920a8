"""Streams: one creator, many on the other side, and nothing that a kill -9 leaves in the way."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import aio
from penstock.core.errors import (
    Closed,
    InvalidOption,
    InvalidStreamId,
    NotFound,
    StorageError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.interfaces import Reader
from penstock.core.overflow import QueueFull
from penstock.core.position import Position
from penstock.core.stream_id import StreamId, id_for_app
from penstock.core.url import URL
from penstock.queue.endpoint import FmqEndpoint
from penstock.queue.ownership import AlreadyOwned
from penstock.queue.stream_places import (
    StreamKind,
    list_streams,
    remove_stream,
    streams_directory,
)
from penstock.queue.streams import InputStream, OutputStream
from support.lives import Life, Lives, Report
from support.stream_lives import LAST_TYPE
from support.unprivileged import run_without_rights
from support.waiting import A_WHILE, SOON, background, waits

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM = id_for_app("an_app_of_tests", "a_stream")
OTHER = id_for_app("an_app_of_tests", "another_stream")

CREATORS = pytest.mark.parametrize("creator", [OutputStream, InputStream])


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    processes = Lives("support.stream_lives")
    yield processes
    processes.end()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where streams are in a test; a process that a test starts has to be told."""
    path = str(tmp_path / "streams")
    monkeypatch.setenv("PENSTOCK_STREAMS", path)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report")


def payloads(reader: Reader) -> list[bytes]:
    return [bytes(message.payload) for message in reader.available()]


# --- out: one writes, many read ---------------------------------------------------------------


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


# --- in: many write, one reads ----------------------------------------------------------------


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


# --- one creator ------------------------------------------------------------------------------


@CREATORS
def test_a_second_creator_is_refused_with_the_name_of_the_first(
    creator: type[OutputStream | InputStream],
) -> None:
    with creator.create(STREAM, owner="the first"):
        with pytest.raises(AlreadyOwned, match=f"{STREAM} belongs to the first") as refusal:
            creator.create(STREAM, owner="the second")
        assert (refusal.value.owner, refusal.value.pid) == ("the first", os.getpid())
        creator.create(OTHER, owner="the second").close()
    creator.create(STREAM, owner="the second").close()


def test_a_creator_in_another_process_is_named_and_when_killed_succeeded_at_once(
    lives: Lives, directory: str, report: Report
) -> None:
    where = {"stream": str(STREAM), "directory": directory}
    first = lives.start("create_and_write", **where, report=report.path, owner="the first")
    report.wait_for(b"w")
    with OutputStream.open(STREAM) as reader:
        with pytest.raises(AlreadyOwned) as refusal:
            OutputStream.create(STREAM, owner="the second")
        assert (refusal.value.owner, refusal.value.pid) == ("the first", first.pid)
        assert first.kill().killed
        began = time.monotonic()
        with OutputStream.create(STREAM, owner="the second") as output:
            assert time.monotonic() - began < 2
            written = [seq for _, _, seq in report.records(b"w")]
            # It may have been killed between writing a message and saying so.
            seq = output.write(b"from the second", LAST_TYPE)
            assert len(written) <= seq <= len(written) + 1
            messages = list(reader.available())
            assert [m.seq for m in messages] == list(range(seq + 1))
            assert messages[-1].payload == b"from the second"
            assert reader.statistics().restarts == 0


@pytest.mark.parametrize("kind", ["output", "input"])
def test_a_creator_killed_at_any_point_is_in_nobodys_way(
    lives: Lives, directory: str, kind: str
) -> None:
    creator = OutputStream if kind == "output" else InputStream
    chance = random.Random(5)
    for _ in range(25):
        life = lives.start("come_and_go", stream=str(STREAM), directory=directory, kind=kind)
        time.sleep(chance.random() * 0.03)
        assert life.kill().killed
        with creator.create(STREAM, owner="me") as made:
            if isinstance(made, OutputStream):
                made.write(b"x")
            else:
                with InputStream.open(STREAM) as producer:
                    producer.write(b"x")
                assert made.read(0) is not None
    [state] = list_streams()
    assert (state.owner, state.alive) == ("me", False)


@CREATORS
def test_a_creation_that_fails_leaves_the_stream_to_others(
    creator: type[OutputStream | InputStream], directory: str
) -> None:
    with pytest.raises(StorageError):
        creator.create(STREAM, owner="greedy", size="64T")
    assert not any(Path(directory).iterdir())
    creator.create(STREAM, owner="me").close()


def test_a_forked_child_is_not_the_creator() -> None:
    with OutputStream.create(STREAM, owner="parent") as output:
        child = multiprocessing.get_context("fork").Process(target=_write_in_child, args=[output])
        child.start()
        child.join(20)
        assert child.exitcode == 0
        with pytest.raises(AlreadyOwned):
            OutputStream.create(STREAM, owner="another")
        output.write(b"x")


def _write_in_child(output: OutputStream) -> None:
    with pytest.raises(Closed):
        output.write(b"?")
    output.close()


def test_a_stream_that_is_there_keeps_its_size_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with OutputStream.create(STREAM, owner="me", slots=8) as output:
        output.write(b"x")
    with caplog.at_level(logging.WARNING), OutputStream.create(STREAM, owner="me") as output:
        assert "keeps its size" in caplog.text
        output.write_many([b"y"] * 8)
    with OutputStream.open(STREAM) as reader:
        assert [m.seq for m in reader.available()] == list(range(1, 9))


# --- names and places -------------------------------------------------------------------------


@CREATORS
@pytest.mark.parametrize(
    "request_id",
    [
        StreamId.generate(None, 1, "a path", "a name"),
        StreamId.generate(1, None, "a path", "a name"),
        StreamId.generate(1, 1, None, "a name"),
        StreamId.generate(1, 1, "a path", None),
    ],
)
def test_an_id_that_leaves_a_field_open_is_no_stream(
    creator: type[OutputStream | InputStream], request_id: StreamId, directory: str
) -> None:
    with pytest.raises(InvalidStreamId, match="ANY"):
        creator.create(request_id, owner="me")
    with pytest.raises(InvalidStreamId, match="ANY"):
        creator.open(request_id)
    assert not Path(directory).exists()


@CREATORS
def test_a_stream_that_is_not_there_is_not_found(creator: type[OutputStream | InputStream]) -> None:
    with pytest.raises(NotFound, match=str(STREAM)) as error:
        creator.open(STREAM)
    assert "wait=True" in str(error.value.hint)


def test_the_wrong_side_of_a_stream_is_pointed_to_the_right_one() -> None:
    with InputStream.create(STREAM, owner="me"):
        with pytest.raises(NotFound, match="output stream") as error:
            OutputStream.open(STREAM)
        assert "InputStream.open() writes to it" in str(error.value.hint)
    with OutputStream.create(OTHER, owner="me"):
        with pytest.raises(NotFound, match="input stream") as error:
            InputStream.open(OTHER)
        assert "OutputStream.open() reads it" in str(error.value.hint)


def test_an_id_can_name_an_input_and_an_output_stream_at_once() -> None:
    with (
        InputStream.create(STREAM, owner="consumer") as stream,
        OutputStream.create(STREAM, owner="producer") as output,
        InputStream.open(STREAM) as producer,
        OutputStream.open(STREAM) as reader,
    ):
        producer.write(b"in")
        output.write(b"out")
        assert payloads(stream) == [b"in"]
        assert payloads(reader) == [b"out"]


def test_streams_are_listed_with_their_creators_and_counts(
    lives: Lives, directory: str, report: Report
) -> None:
    assert list_streams() == []
    where = {"stream": str(STREAM), "directory": directory}
    life = lives.start("create_and_write", **where, report=report.path, owner="another process")
    report.wait_for(b"w")
    assert life.kill().killed
    written = 1 + max(seq for _, _, seq in report.records(b"w"))
    with InputStream.create(STREAM, owner="this one", slots=4) as stream:
        with InputStream.open(STREAM, policy="drop") as producer:
            producer.write_many([b"x"] * 6)
        Path(directory, "something else.fmq").touch()
        incoming, outgoing = list_streams()
        assert (incoming.stream, incoming.kind) == (STREAM, StreamKind.INPUT)
        assert (incoming.owner, incoming.pid, incoming.alive) == ("this one", os.getpid(), True)
        assert (incoming.messages, incoming.written) == (4, 6)
        assert incoming.url == stream.url
    assert (outgoing.stream, outgoing.kind) == (STREAM, StreamKind.OUTPUT)
    assert (outgoing.owner, outgoing.pid) == ("another process", life.pid)
    assert not outgoing.alive
    assert written <= outgoing.written <= written + 1
    assert FmqEndpoint().describe(URL.parse(outgoing.url)).count == outgoing.messages


def test_a_damaged_stream_does_not_hide_the_others(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    OutputStream.create(STREAM, owner="me").close()
    InputStream.create(OTHER, owner="me").close()
    Path(directory, f"{STREAM.hex()}.output.fmq").write_bytes(bytes(8192))
    assert [state.stream for state in list_streams()] == [OTHER]
    assert "magic" in caplog.text
    remove_stream(STREAM, StreamKind.OUTPUT)
    OutputStream.create(STREAM, owner="me").close()


def test_a_queue_that_is_not_the_streams_own_is_left_alone(directory: str) -> None:
    InputStream.create(STREAM, owner="me").close()
    stolen = Path(directory, f"{STREAM.hex()}.input.fmq")
    stolen.rename(Path(directory, f"{STREAM.hex()}.output.fmq"))
    with pytest.raises(Unsupported, match="is not the queue of the output stream"):
        OutputStream.create(STREAM, owner="me")


@CREATORS
def test_a_removed_stream_is_gone_and_can_be_made_anew(
    creator: type[OutputStream | InputStream], directory: str
) -> None:
    kind = StreamKind.OUTPUT if creator is OutputStream else StreamKind.INPUT
    made = creator.create(STREAM, owner="me")
    with pytest.raises(AlreadyOwned):
        remove_stream(STREAM, kind)
    made.remove()
    made.close()
    assert not any(Path(directory).iterdir())
    with pytest.raises(NotFound):
        remove_stream(STREAM, kind)
    creator.create(STREAM, owner="somebody else").close()
    remove_stream(STREAM, kind)
    assert not any(Path(directory).iterdir())


def test_what_is_in_a_removed_stream_can_be_read_to_its_end_by_those_who_have_it() -> None:
    output = OutputStream.create(STREAM, owner="me")
    output.write_many([b"0", b"1"])
    with OutputStream.open(STREAM) as reader:
        output.remove()
        assert payloads(reader) == [b"0", b"1"]
        with OutputStream.create(STREAM, owner="somebody else") as again:
            again.write(b"anew")
            message = reader.read(SOON)
            assert message is not None
            assert message.payload == b"anew"
            assert reader.statistics().restarts == 1


def test_a_producer_hears_that_its_stream_was_removed() -> None:
    stream = InputStream.create(STREAM, owner="me")
    with InputStream.open(STREAM) as producer:
        producer.write(b"x")
        stream.remove()
        with pytest.raises(Closed):
            producer.write(b"y")


def test_options_that_a_side_does_not_have_are_refused() -> None:
    for call in (
        lambda: OutputStream.create(STREAM, owner="me", compress="zstd"),
        lambda: OutputStream.create(STREAM, owner="me", writers="many"),
        lambda: InputStream.create(STREAM, owner="me", hold="x"),
        lambda: OutputStream.open(STREAM, policy="drop"),
        lambda: InputStream.open(STREAM, hold="x"),
    ):
        with pytest.raises(InvalidOption, match="is not for this side of an"):
            call()
    with pytest.raises(InvalidOption, match="policy"):
        InputStream.open(STREAM, policy="pray")


def test_streams_are_in_memory_in_a_place_of_the_user_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert streams_directory() == str(tmp_path / "streams")
    monkeypatch.delenv("PENSTOCK_STREAMS")
    place = Path(f"/dev/shm/penstock-{os.getuid()}")
    assert streams_directory() == str(place)
    stream = id_for_app(f"test of process {os.getpid()}", "memory")
    with OutputStream.create(stream, owner="me") as output:
        assert place.stat().st_mode & 0o777 == 0o700
        output.write(b"x")
        assert stream in {state.stream for state in list_streams()}
        output.remove()
    with OutputStream.create(stream, owner="me", directory=tmp_path) as output:
        assert str(tmp_path) in output.url


def test_a_directory_that_another_user_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("it takes two users")
    monkeypatch.delenv("PENSTOCK_STREAMS")
    trap = Path("/dev/shm/penstock-65534")
    trap.mkdir()

    def check() -> None:
        with pytest.raises(StorageError, match="is not a directory of this user's"):
            OutputStream.create(STREAM, owner="nobody")

    try:
        run_without_rights(check)
    finally:
        trap.rmdir()


def test_a_path_with_odd_characters_works(tmp_path: Path) -> None:
    place = tmp_path / "100% of what? a+b #1"
    with OutputStream.create(STREAM, owner="me", directory=place) as output:
        output.write(b"x")
        with FmqEndpoint().open_reader(URL.parse(output.url), Position.START) as reader:
            assert payloads(reader) == [b"x"]


# --- with the rest ----------------------------------------------------------------------------


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
