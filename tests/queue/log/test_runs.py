"""A batch gets into a log whole, by whichever way, or an error says what did not."""

from __future__ import annotations

import os
import random
import resource
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.errors import DamagedQueue
from penstock.queue.log.recovery import check_log
from penstock.queue.log.segments import numbers_of, path_of
from penstock.queue.wide.writer import WideWriter
from support.wide_faults import FaultyProcesses, build, message_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.core.message import Message


def contents(folder: Path) -> list[tuple[int, bytes | None, bytes | None, bytes]]:
    with open_reader(f"log:{folder}", start="start") as reader:
        return [content(message) for message in reader.available()]


def content(message: Message) -> tuple[int, bytes | None, bytes | None, bytes]:
    return message.type, message.stream, message.attributes, message.payload


def is_intact(folder: Path) -> bool:
    return not any(segment.faults for segment in check_log(folder))


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_any_sizes_get_into_a_log_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    segment = chance.choice(["64k", "300k", "2M"])
    slots = chance.choice([16, 100, 5000])
    most = min(200_000, {"64k": 60_000, "300k": 250_000, "2M": 1_500_000}[segment])
    expected: list[Message] = []
    url = f"log:{tmp_path}/log?segment={segment}&segment_slots={slots}&sync=none"
    with open_writer(url) as writer:
        while len(expected) < 3000:
            sizes = [
                chance.randrange(chance.choice([1, 50, 700, 20_000, most]))
                for _ in range(chance.choice([1, 3, 40, 300]))
            ]
            first = len(expected)
            some = [message_of(first + i, n, with_block=i % 3 == 0) for i, n in enumerate(sizes)]
            if chance.random() < 0.2:
                for each in some:
                    writer.write(
                        each.payload, each.type, stream=each.stream, attributes=each.attributes
                    )
            else:
                assert writer.write_batch(batch_from_messages(some)) == first + len(some) - 1
            expected += some
        books = writer.statistics()
    assert books.messages == len(expected)
    assert books.bytes == sum(len(each.payload) for each in expected)
    assert contents(tmp_path / "log") == [content(each) for each in expected]
    assert is_intact(tmp_path / "log")


def test_a_segment_that_was_truncated_takes_no_batch(tmp_path: Path) -> None:
    rows = batch_from_messages([message_of(i, 500) for i in range(100)])
    with open_writer(f"log:{tmp_path}/log?sync=none") as writer:
        writer.write_batch(rows)
        segment = path_of(tmp_path / "log", 0)
        os.truncate(segment, 8192)
        with pytest.raises(DamagedQueue, match="8192"):
            writer.write_batch(rows)
        assert segment.stat().st_size == 8192, "it was not made longer again"
        assert writer.statistics().messages == 100


def test_messages_that_went_to_what_was_cut_off_do_not_count_as_written(tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/log?sync=none") as writer:
        writer.write_many([bytes(100)] * 5000)
        os.truncate(path_of(tmp_path / "log", 0), 8192)
        with pytest.raises(DamagedQueue):  # some had space already, and more is needed for the rest
            writer.write_many([bytes(100)] * 50_000)
        books = writer.statistics()
        assert (books.messages, books.refused) == (5000, 50_000)


def write_many_times(writer: Writer, rows: Batch) -> None:
    for _ in range(400):
        writer.write_batch(rows)


def test_so_does_one_that_is_truncated_meanwhile(tmp_path: Path) -> None:
    """Whatever the moment, no message is said to be there that is not."""
    rows = batch_from_messages([message_of(i, 500) for i in range(2000)])
    folder = tmp_path / "log"
    segment = path_of(folder, 0)
    for _ in range(20):
        writer = open_writer(f"log:{folder}?sync=none&segment=1G&segment_slots=1000000")
        later = threading.Timer(random.Random().random() / 200, os.truncate, (segment, 8192))
        later.start()
        with pytest.raises(DamagedQueue):
            write_many_times(writer, rows)
        later.join()
        with pytest.raises(DamagedQueue):
            writer.write(b"next")
        writer.close()
        shutil.rmtree(folder)


def test_what_the_kernel_does_not_take_by_a_call_gets_there_all_the_same(tmp_path: Path) -> None:
    rows = [message_of(i, 500) for i in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_writer(f"log:{tmp_path}/log?sync=none") as writer:
        writer.write_batch(batch_from_messages(rows))
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                (tmp_path / "file").write_bytes(bytes(100_000))
            writer.write_batch(batch_from_messages(rows))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path / "log") == [content(each) for each in (*rows, *rows)]
    assert is_intact(tmp_path / "log")


# --- killed meanwhile -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProcesses]:
    processes = FaultyProcesses(build(tmp_path_factory.mktemp("core")))
    yield processes
    processes.end()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(17, id="some"),
        pytest.param(1, id="every", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.parametrize("before", [0, 20])
def test_a_writer_killed_at_any_point_of_a_batch_leaves_its_first_messages(
    tmp_path: Path, faulty: FaultyProcesses, before: int, step: int
) -> None:
    options = "segment=128k&segment_slots=32&sync=none"
    old = [message_of(i, 700) for i in range(before)]
    sizes = [4000, 0, 6000, 100] * 5
    new = [message_of(before + i, size, with_block=True) for i, size in enumerate(sizes)]
    original, folder = tmp_path / "original", tmp_path / "log"
    with open_writer(f"log:{original}?{options}") as writer:
        writer.write_batch(batch_from_messages(old))
    kept: set[int] = set()
    for at in range(1, 2000, step):
        shutil.copytree(original, folder)
        outcome = faulty.run(
            *("write", at),
            url=f"log:{folder}?{options}",
            how="write_batch",
            first=before,
            sizes=sizes,
            block=True,
        )
        with open_writer(f"log:{folder}?{options}") as writer:
            assert isinstance(writer, WideWriter)
            writer.write(b"next")
        found = contents(folder)
        there = len(found) - before - 1
        assert found[:-1] == [content(each) for each in [*old, *new][: before + there]]
        assert is_intact(folder)
        assert len(numbers_of(folder)) >= 1
        kept.add(there)
        shutil.rmtree(folder)
        if not outcome.killed:
            break
    else:
        raise AssertionError("there is no end to it")
    assert kept >= {0, len(new)}
