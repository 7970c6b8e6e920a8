"""Named readers that the writer waits for: what is kept for them, and for how long."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import Closed, WriteTimeout
from penstock.core.overflow import DropReason, QueueFull
from support.held_readers import fill, taken
from support.lives import Lives, Report
from support.waiting import A_WHILE, SOON, background, waits
from support.wide_lives import LAST_TYPE
from support.wide_opening import wide_reader, wide_writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from penstock.queue.wide.reader import WideReader


# --- the writer waits ---------------------------------------------------------------------------


def test_the_writer_waits_until_a_held_reader_has_acknowledged(url: str) -> None:
    with wide_reader(f"{url}?hold=a") as reader, wide_writer(f"{url}?hold=a") as writer:
        fill(writer)
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            assert reader.read(0).seq == 0  # type: ignore[union-attr]
            assert waits(write), "what was returned is not done before the next call"
            assert reader.read(0).seq == 1  # type: ignore[union-attr]
            assert write.result(SOON) == 4
        assert taken(reader) == [2, 3, 4]
        assert reader.statistics().lost == 0
        assert writer.statistics().waited >= A_WHILE


@pytest.mark.parametrize(
    "give_back",
    [
        lambda reader: reader.acknowledge(),
        lambda reader: reader.read(0),
        lambda reader: reader.read_many(1),
        lambda reader: reader.read_batch(1),
        lambda reader: reader.seek("end"),
        lambda reader: reader.view(0).__enter__(),
        lambda reader: reader.view_batch(1).__enter__(),
        lambda reader: reader.close(),
    ],
    ids=["acknowledge", "read", "read_many", "read_batch", "seek", "view", "view_batch", "close"],
)
def test_what_a_call_returned_is_given_back_by_the_next(
    url: str, give_back: Callable[[WideReader], object]
) -> None:
    with wide_writer(f"{url}?hold=a&keep=true") as writer, wide_reader(f"{url}?hold=a") as reader:
        fill(writer)
        assert len(reader.read_many(1)) == 1
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            give_back(reader)
            assert write.result(SOON) == 4


def test_several_readers_and_a_slow_one_all_get_every_message(
    url: str, lives: Lives, tmp_path: Path
) -> None:
    count = 300
    names = ["slow", "quick", "batches"]
    reports = {name: Report(tmp_path / name) for name in names}
    consumers = [
        lives.start(
            "consume",
            url=f"{url}?hold={name}",
            report=reports[name].path,
            at_once=100 if name == "batches" else 1,
            pause=0.002 if name == "slow" else 0.0,
        )
        for name in names
    ]
    for report in reports.values():
        report.wait_for(b"r")
    writer = lives.start(
        "produce",
        url=f"{url}?hold={','.join(names)}",
        report=str(tmp_path / "writer"),
        writer=1,
        batch=9,
        count=count,
    )
    assert writer.end() == (False, 0)
    with wide_writer(f"{url}?hold={','.join(names)}") as last:
        last.write(b"", LAST_TYPE)
    for consumer in consumers:
        assert consumer.end() == (False, 0)
    for report in reports.values():
        assert list(report.records(b"m")) == [(1, number, number) for number in range(count)]
        assert list(report.records(b"e")) == [(0, count + 1, 0)]


def test_the_writer_waits_for_the_slowest_of_them(url: str) -> None:
    with (
        wide_writer(f"{url}?hold=a,b&keep=true") as writer,
        wide_reader(f"{url}?hold=a") as a,
        wide_reader(f"{url}?hold=b") as b,
    ):
        fill(writer)
        assert taken(a) == [0, 1, 2, 3]
        a.acknowledge()
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            b.seek(1)
            assert write.result(SOON) == 4


def test_a_held_reader_that_moves_back_is_waited_for_again(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=a") as reader:
        fill(writer)
        reader.seek("end")
        reader.seek("start")
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            reader.seek("end")
            assert write.result(SOON) == 4


def test_a_message_that_takes_the_room_of_many_waits_for_all_of_them(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with (
        wide_writer(f"{url}?slots=16&size=4096&hold=a") as writer,
        wide_reader(f"{url}?hold=a") as reader,
    ):
        writer.write_many([bytes(1000)] * 3)
        with background(writer.write, bytes(4096)) as write:
            for _ in range(3):
                assert waits(write)
                assert reader.read(0)
            reader.acknowledge()
            assert write.result(SOON) == 3
        assert taken(reader) == [3]


def test_a_batch_larger_than_the_queue_goes_through_as_it_is_read(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=a") as reader:
        payloads = [b"%d" % number for number in range(50)]
        with background(writer.write_many, payloads) as write:
            got = [reader.read(SOON) for _ in payloads]
            assert write.result(SOON) == 49
        assert [m and m.payload for m in got] == payloads
        assert reader.statistics().lost == 0


def test_a_view_of_a_held_reader_is_never_overrun(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=a") as reader:
        fill(writer)
        with background(writer.write_many, [b"later"] * 4) as write:
            with reader.view(0) as message:
                assert waits(write)
                assert message is not None
                assert bytes(message.payload) == b"before"
            with reader.view_batch(3) as batch:
                assert waits(write)
                assert batch.column("payload").to_pylist() == [b"before"] * 3
            reader.acknowledge()
            assert write.result(SOON) == 7


def test_a_writer_that_waits_hears_signals(url: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=a"):
            fill(writer)
            signal.setitimer(signal.ITIMER_REAL, A_WHILE)
            with pytest.raises(Interrupted):
                writer.write(b"one too many")
            assert writer.statistics().refused == 1
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_writer_that_waits_is_ended_by_closing_it(url: str) -> None:
    writer = wide_writer(f"{url}?hold=a")
    with wide_reader(f"{url}?hold=a"):
        fill(writer)
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            writer.close()
            with pytest.raises(Closed):
                write.result(SOON)
    with wide_writer(url) as again:
        assert again.write(b"after") == 4


def test_readers_that_the_writer_does_not_name_are_not_waited_for(url: str) -> None:
    with wide_writer(f"{url}?hold=a") as writer, wide_reader(f"{url}?hold=b") as reader:
        fill(writer, 10)
        assert taken(reader) == [6, 7, 8, 9]
        assert reader.statistics().lost == 6


# --- or does not wait -----------------------------------------------------------------------------


def test_with_policy_fail_a_message_without_room_is_refused(url: str) -> None:
    with (
        wide_writer(f"{url}?hold=a&policy=fail") as writer,
        wide_reader(f"{url}?hold=a") as reader,
    ):
        fill(writer)
        began = time.monotonic()
        with pytest.raises(QueueFull, match="full") as caught:
            writer.write(b"one too many")
        assert time.monotonic() - began < 1
        assert "reader a" in (caught.value.hint or "")
        assert writer.statistics()[:3] == (4, 24, 1)
        assert len(reader.read_many(2)) == 2
        reader.acknowledge()
        assert writer.write(b"now there is room") == 4


def test_with_policy_fail_a_batch_is_written_as_far_as_it_fits(url: str) -> None:
    with (
        wide_writer(f"{url}?hold=a&policy=fail") as writer,
        wide_reader(f"{url}?hold=a") as reader,
    ):
        with pytest.raises(QueueFull):
            writer.write_many([b"payload"] * 6)
        books = writer.statistics()
        assert (books.messages, books.refused, books.last_seq) == (4, 2, 3)
        assert taken(reader) == [0, 1, 2, 3]


def test_with_policy_drop_the_reader_is_told_what_it_lost(url: str) -> None:
    with (
        wide_writer(f"{url}?hold=a&policy=drop") as writer,
        wide_reader(f"{url}?hold=a") as reader,
    ):
        fill(writer, 6)
        assert taken(reader) == [2, 3, 4, 5]
        [loss] = reader.statistics().losses
        assert (loss.first, loss.last, loss.reason) == (0, 1, DropReason.OVERRUN)
        assert writer.statistics().waited < A_WHILE


def test_a_wait_has_an_end_and_names_the_slowest_reader(url: str) -> None:
    with (
        wide_writer(f"{url}?hold=a,b&timeout=300ms&keep=true") as writer,
        wide_reader(f"{url}?hold=a") as a,
    ):
        fill(writer)
        assert taken(a) == [0, 1, 2, 3]
        a.acknowledge()
        began = time.monotonic()
        with pytest.raises(WriteTimeout, match=r"0\.3 s for reader b \(not there now\).*message 0"):
            writer.write(b"one too many")
        assert 0.3 <= time.monotonic() - began < SOON
        with wide_reader(f"{url}?hold=b") as b:
            with pytest.raises(WriteTimeout, match=rf"reader b \(process {os.getpid()}\)"):
                writer.write(b"one too many")
            assert len(b.read_many(2)) == 2
            b.acknowledge()
            assert writer.write(b"now there is room") == 4
        assert writer.statistics().refused == 2
