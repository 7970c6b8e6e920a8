"""A queue, and a writer, shared in ways that are easy to get wrong: fork, threads, keys."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import penstock
from penstock import Writer, describe, open_reader, open_writer
from penstock.core.errors import AlreadyExists
from penstock.queue.classic import sysv
from penstock.queue.endpoint import check
from support.processes import shared_memory_path
from support.queue_files import check_queue, numbered, reader_of, writer_of


def write_on_both_sides_of_a_fork(path: str, count: int) -> None:
    with writer_of(path, slots=count * 3, size=count * 100) as writer:
        writer.write(b"before")
        child = os.fork()
        side = b"child" if child == 0 else b"parent"
        for number in range(count):
            writer.write(b"%s %d" % (side, number))
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


# Python warns of fork in a process with threads; there are none that matter here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("storage", ["files", "shared memory"])
def test_a_writer_used_on_both_sides_of_a_fork_loses_nothing(storage: str, tmp_path: Path) -> None:
    count = 3000
    with shared_memory_path(tmp_path) as shared:
        path = str(tmp_path / "queue") if storage == "files" else shared
        write_on_both_sides_of_a_fork(path, count)
        with reader_of(path) as reader:
            found = [m.payload for m in reader.available()]
            assert reader.statistics().lost == 0
        for side in (b"child", b"parent"):
            theirs = [p for p in found if p.startswith(side)]
            assert theirs == [b"%s %d" % (side, number) for number in range(count)]
        assert len(found) == 2 * count + 1
        check(f"fmq:{path}")


def write_unless_refused(writer: Writer, payload: bytes) -> bool:
    """Tell whether it was written: another thread may be at it."""
    try:
        writer.write(payload)
    except RuntimeError as error:
        assert "threads" in str(error)  # noqa: PT017 - it need not be raised
        return False
    return True


def test_a_writer_that_two_threads_use_at_once_refuses_and_stays_whole(queue_path: str) -> None:
    large = bytes(64 << 20)  # under way long enough for the other thread to come
    with writer_of(queue_path, slots=1000, size=256 << 20) as writer:

        def write_large_ones() -> None:
            left = 5
            while left:
                left -= write_unless_refused(writer, large)

        thread = threading.Thread(target=write_large_ones)
        thread.start()
        refused = 0
        while thread.is_alive():
            refused += not write_unless_refused(writer, b"small")
            time.sleep(0.001)  # else it is the other one that is refused
        thread.join()
        assert refused > 0
        assert writer.statistics().refused >= refused
        assert writer.write(b"alone again") > 0
    assert check(f"fmq:{queue_path}") > 0


@pytest.mark.parametrize("by", ["one", "many"])
def test_a_message_counts_once_if_another_thread_was_writing(queue_path: str, by: str) -> None:
    calls, payloads = 3000, [bytes(2000)] * (1 if by == "one" else 10)
    offered = 2 * calls * len(payloads)

    def write() -> None:
        for _ in range(calls):
            with suppress(RuntimeError):
                if by == "one":
                    writer.write(payloads[0])
                else:
                    writer.write_many(payloads)

    with writer_of(queue_path, slots=offered, size=300_000_000) as writer:
        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        books = writer.statistics()
    assert books.messages == check_queue(queue_path).youngest_id + 1
    assert books.messages + books.refused == offered


def test_a_wrong_key_does_not_take_the_memory_of_another_queue(tmp_path: Path) -> None:
    with shared_memory_path(tmp_path) as path:
        key = int(path.rpartition("_")[2])
        with writer_of(path, slots=10, size=5000) as writer:
            writer.write(b"precious")
        below = tmp_path / f"shmem_{key - 1}"
        for attempt in (open_writer, penstock.create):
            with pytest.raises(AlreadyExists, match=f"keys {key - 1} and {key}"):
                attempt(f"fmq:{below}?layout=classic")
        assert sysv.find(key - 1) is None
        with reader_of(path) as reader:
            assert [m.payload for m in reader.available()] == [b"precious"]


def test_memory_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with shared_memory_path(tmp_path) as path:
        key = int(path.rpartition("_")[2])
        theirs = [sysv.create(part, 100) for part in (key, key + 1)]
        with pytest.raises(AlreadyExists):
            open_writer(f"fmq:{path}?layout=classic")
        assert [sysv.find(part) for part in (key, key + 1)] == theirs


def create_and_write(path: str, slots: int, errors: list[Exception]) -> None:
    try:
        with writer_of(path, slots=slots, size=20_000 + slots) as writer:
            writer.write(b"%d" % slots)
    except Exception as error:  # noqa: BLE001 - it is asserted by the caller
        errors.append(error)


def test_many_who_create_one_shared_memory_queue_at_once_share_it(tmp_path: Path) -> None:
    for _ in range(10):
        with shared_memory_path(tmp_path) as path:
            errors: list[Exception] = []
            threads = [
                threading.Thread(target=create_and_write, args=(path, slots, errors))
                for slots in (10, 20, 30)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            with reader_of(path) as reader:
                assert sorted(m.payload for m in reader.available()) == [b"10", b"20", b"30"]


class BusyWriter:
    """A thread that writes without a pause."""

    def __init__(self, path: str, slots: int) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(path, slots))

    def _write(self, path: str, slots: int) -> None:
        with writer_of(path, slots=slots, size=1 << 20) as writer:
            while not self._stop.is_set():
                writer.write_many([b"x"] * 50)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_description_holds_beside_a_busy_writer(queue_path: str) -> None:
    with writer_of(queue_path, slots=100, size=1 << 20) as writer:
        writer.write_many(numbered(0, 199))
    with BusyWriter(queue_path, 100):
        for _ in range(300):
            found = describe(f"fmq:{queue_path}")
            assert found.oldest_seq is not None
            assert found.youngest_seq is not None
            assert 0 <= found.oldest_seq <= found.youngest_seq
            assert found.youngest_seq - found.oldest_seq < 100
            assert found.count <= 100


def test_seeking_by_time_holds_beside_a_busy_writer(queue_path: str) -> None:
    """Messages of the future: whoever seeks to the present must find none of the past."""
    with writer_of(queue_path, slots=2000, size=1 << 20) as writer:
        for _ in range(2000):
            writer.write(b"past", time_ns=10**18)
    with BusyWriter(queue_path, 2000), open_reader(f"fmq:{queue_path}") as reader:
        for _ in range(200):
            reader.seek("2020-01-01T00:00:00Z")
            message = reader.read(timeout=5)
            assert message is not None
            assert message.payload == b"x"


def test_a_queue_that_is_moved_away_is_noticed_by_its_writer(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write(b"old")
        for part in ("stat", "buf"):
            Path(f"{queue_path}.{part}").rename(f"{queue_path}-moved.{part}")
        writer._looked_at_path = 0  # as if a second had passed
        writer.write(b"new")
    with reader_of(queue_path) as reader:
        assert [m.payload for m in reader.available()] == [b"new"]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_forgotten_gives_its_files_back(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000):
        pass
    before = open_files()
    for _ in range(20):
        reader_of(queue_path)
        writer_of(queue_path)
    assert open_files() == before
