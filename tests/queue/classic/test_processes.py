"""Several real processes on one queue: everything is delivered or counted, and nothing is torn."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock import open_reader, open_writer
from penstock.core.errors import LockTimeout
from penstock.queue.classic.creation import open_device
from support import self_describing
from support.processes import Peer, peers, shared_memory_path
from support.queue_files import check_queue, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STORAGES = ["file", "shared memory"]


@contextmanager
def queue_in(storage: str, directory: Path) -> Iterator[str]:
    if storage == "file":
        yield str(directory / "queue")
    else:
        with shared_memory_path(directory) as path:
            yield path


def assert_partition(report: dict[str, Any], written: int) -> None:
    """The ranges delivered and the ranges lost are all there is, once each."""
    ranges = sorted([*map(tuple, report["delivered"]), *map(tuple, report["lost"])])
    reached = 0
    for first, last in ranges:
        assert first == reached, ranges[:50]
        reached = last + 1
    assert reached == written
    assert report["messages"] == sum(last - first + 1 for first, last in report["delivered"])
    assert report["lost_count"] == sum(last - first + 1 for first, last in report["lost"])
    assert report["messages"] + report["lost_count"] == written == report["next_seq"]
    assert report["restarts"] == 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("batch", [1, 64], ids=["single", "batches"])
@pytest.mark.parametrize(
    "count",
    [20_000, pytest.param(500_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_a_fast_writer_and_three_readers_account_for_every_message(
    storage: str, batch: int, count: int, tmp_path: Path
) -> None:
    with queue_in(storage, tmp_path) as path, peers() as started:
        url = f"fmq:{path}?layout=classic"
        open_writer(url, slots=300, size=200_000).close()
        readers = [
            started.start("read", url=url, until=count, at_once=200),
            started.start("read", url=url, until=count, at_once=100, as_batch=True),
            started.start("read", url=url, until=count, at_once=20, pause=0.005),
        ]
        writer = started.start("write", url=url, count=count, batch=batch, largest=1500)
        for peer in (writer, *readers):
            assert peer.hear()["ready"]
        writer.say()
        written = writer.hear()
        assert (written["messages"], written["refused"]) == (count, 0)
        assert written["last_seq"] == count - 1
        reports = [reader.hear() for reader in readers]
        for report in reports:
            assert_partition(report, count)
        assert reports[2]["lost_count"] > 0, "the slow reader was not slow"
        check_queue(path)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "count",
    [6_000, pytest.param(200_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_two_writers_at_once_lose_nothing_and_keep_their_order(
    storage: str, count: int, tmp_path: Path
) -> None:
    with queue_in(storage, tmp_path) as path, peers() as started:
        url = f"fmq:{path}?layout=classic"
        open_writer(url, slots=2 * count, size=2 * count * 220).close()
        writers = [
            started.start("write", url=url, writer=1, count=count, largest=200),
            started.start("write", url=url, writer=2, count=count, batch=10, largest=200),
        ]
        follower = started.start("read", url=url, until=2 * count, at_once=50, numbered=False)
        for peer in (*writers, follower):
            assert peer.hear()["ready"]
        for writer in writers:
            writer.say()
        assert [writer.hear()["messages"] for writer in writers] == [count, count]
        report = follower.hear()
        assert_partition(report, 2 * count)
        assert report["lost_count"] == 0
        with open_reader(url) as reader:
            messages = reader.read_many(2 * count)
            while len(messages) < 2 * count:
                more = reader.read_many(2 * count)
                assert more
                messages += more
        assert [m.seq for m in messages] == list(range(2 * count))
        numbers: dict[int, list[int]] = {1: [], 2: []}
        for message in messages:
            content = self_describing.check(message.payload)
            numbers[content.writer].append(content.number)
        assert numbers == {1: list(range(count)), 2: list(range(count))}
        check_queue(path)


def test_readers_of_a_queue_that_is_overwritten_all_the_time_see_no_torn_message(
    tmp_path: Path,
) -> None:
    """Few slots and large payloads: a reader is overtaken in the middle of nearly every copy."""
    count = 3000
    with shared_memory_path(tmp_path) as path, peers() as started:
        url = f"fmq:{path}?layout=classic"
        open_writer(url, slots=3, size=300_000).close()
        readers = [
            started.start("read", url=url, until=count, at_once=2, as_batch=bool(i))
            for i in range(2)
        ]
        writer = started.start("write", url=url, count=count, smallest=50_000, largest=90_000)
        for peer in (writer, *readers):
            assert peer.hear()["ready"]
        writer.say()
        assert writer.hear()["messages"] == count
        for reader in readers:
            assert_partition(reader.hear(), count)


# --- LROSE's lock ---------------------------------------------------------------------------


def released_and_written(holder: Peer, path: str) -> float:
    """Write while the other process holds the lock; return how long after its release it took."""
    assert holder.hear()["ready"]
    done: list[float] = []

    def write() -> None:
        with writer_of(path, create="never") as writer:
            writer.write(b"after")
            done.append(time.monotonic())
            assert writer.statistics().waited > 0.02

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.05)
    assert not done, "the lock did not hold our writer"
    holder.say()
    released: float = holder.hear()["released"]
    thread.join(10)
    holder.say()
    return done[0] - released


def test_a_writer_goes_on_at_once_when_an_lrose_writer_lets_go(queue_path: str) -> None:
    writer_of(queue_path, slots=20, size=8192).close()
    with peers() as started:
        holder = started.start("hold_lock", path=f"{queue_path}.stat")
        delays = [released_and_written(holder, queue_path) for _ in range(7)]
    assert statistics.median(delays) < 0.05
    assert max(delays) < 0.9  # LROSE itself sleeps whole seconds here


def test_an_lrose_writer_is_kept_out_while_we_hold_the_lock(queue_path: str) -> None:
    writer_of(queue_path, slots=20, size=8192).close()
    with peers() as started:
        other = started.start("try_lock", path=f"{queue_path}.stat")
        assert other.hear()["ready"]
        device = open_device(queue_path, writable=True)
        try:
            for _ in range(3):
                with device.locked(1):
                    # Closing the file elsewhere would drop a lock of LROSE's own kind.
                    open_device(queue_path, writable=True).close()
                    other.say()
                    assert other.hear() == {"locked": False}
                other.say()
                assert other.hear() == {"locked": True}
        finally:
            device.close()


def test_a_lock_that_is_never_released_is_an_error_that_names_the_holder(
    queue_path: str,
) -> None:
    with writer_of(queue_path, slots=20, size=8192, lock_timeout=0.1) as writer:
        writer.write(b"before")
        with peers() as started:
            holder = started.start("hold_lock", path=f"{queue_path}.stat")
            assert holder.hear()["ready"]
            with pytest.raises(LockTimeout, match=f"process {holder.process.pid}") as caught:
                writer.write(b"during")
            assert caught.value.hint
        assert writer.write(b"after") == 1
        books = writer.statistics()
        assert (books.messages, books.refused) == (2, 1)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_shared_memory_queue_is_locked_by_its_lock_file(storage: str, tmp_path: Path) -> None:
    with queue_in(storage, tmp_path) as path, peers() as started:
        lock = f"{path}.stat" if storage == "file" else f"{path}.lock"
        with writer_of(path, slots=20, size=8192, lock_timeout=0.1) as writer:
            holder = started.start("hold_lock", path=lock)
            assert holder.hear()["ready"]
            with pytest.raises(LockTimeout):
                writer.write(b"during")


# --- a writer that waits for its reader -----------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("slots", [2, 3, 50])
@pytest.mark.parametrize(
    "count",
    [1_500, pytest.param(200_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_a_blocking_writer_and_its_reader_lose_nothing_and_do_not_stand_still(
    storage: str, slots: int, count: int, tmp_path: Path
) -> None:
    with queue_in(storage, tmp_path) as path, peers() as started:
        url = f"fmq:{path}?layout=classic"
        open_writer(url, slots=slots, size=100_000).close()
        writer = started.start(
            "write_blocking", url=f"{url}&blocking=true&timeout=20", count=count, size=50
        )
        assert writer.hear()["ready"]
        with open_reader(url) as reader:
            writer.say()
            for number in range(count):
                message = reader.read(timeout=20)
                assert message is not None, f"both stand still at message {number}"
                assert int.from_bytes(message.payload[:8]) == message.seq == number
            assert reader.statistics().lost == 0
        assert writer.hear()["messages"] == count
