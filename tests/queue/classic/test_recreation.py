"""A queue that is made anew, or goes away, under its readers and writers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import NotFound, PenstockError
from penstock.core.errors import AlreadyExists, DamagedQueue, StorageError
from penstock.core.overflow import DropReason
from penstock.queue.classic import sysv
from penstock.queue.classic.device import shared_memory_key
from support.processes import shared_memory_path
from support.queue_files import (
    QueueBytes,
    numbered,
    read_all,
    reader_of,
    remove,
    seqs,
    writer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Message, Reader


def truncate(path: str) -> None:
    """As LROSE's CREATE does."""
    for part in ("stat", "buf"):
        os.truncate(f"{path}.{part}", 0)


@pytest.mark.parametrize("slots", [10, 7], ids=["same geometry", "other geometry"])
@pytest.mark.parametrize("how", ["in place", "truncated", "unlinked"])
@pytest.mark.parametrize("new", [0, 3, 12], ids=lambda n: f"{n} new messages")
def test_a_reader_notices_a_queue_that_was_made_anew(
    slots: int, how: str, new: int, queue_path: str
) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many([b"old %d" % number for number in range(6)])
    with reader_of(queue_path) as reader:
        assert seqs(reader.read_many(4)) == [0, 1, 2, 3]
        assert reader.newest_seq() == 5
        if how == "unlinked":
            remove(queue_path)
        elif how == "truncated":
            truncate(queue_path)
        with writer_of(queue_path, slots=slots, size=5000, create="always") as writer:
            writer.write_many([b"a new one, %d" % number for number in range(new)])
            messages = patiently(reader, 2 + min(new, slots))
            # What was copied before is still delivered; then the new queue, from its start.
            assert [m.payload for m in messages[:2]] == [b"old 4", b"old 5"]
            assert [m.payload for m in messages[2:]] == [
                b"a new one, %d" % number for number in range(max(0, new - slots), new)
            ]
            if new == 0:
                writer.write(b"new 0")
                assert [m.payload for m in patiently(reader, 1)] == [b"new 0"]
        books = reader.statistics()
        assert books.restarts == 1
        assert books.lost == max(0, new - slots)


def patiently(reader: Reader, count: int) -> list[Message]:
    """Read so many messages; a reader looks every 0.25 s whether its path means another queue."""
    found: list[Message] = []
    deadline = time.monotonic() + 40
    while len(found) < count or not found:
        found += reader.read_many(99, timeout=0.3)
        if time.monotonic() > deadline or not count:
            break
    return found


def test_messages_that_went_with_the_old_queue_are_counted(queue_path: str) -> None:
    with writer_of(queue_path, slots=100, size=50_000) as writer:
        writer.write_many(numbered(0, 89))
    with reader_of(queue_path) as reader:
        assert len(reader.read_batch(10)) == 10
        writer_of(queue_path, slots=100, size=50_000, create="always").close()
        assert reader.read(timeout=0) is None
        books = reader.statistics()
        [loss] = books.losses
        assert (loss.first, loss.last, loss.reason) == (10, 89, DropReason.RECREATED)
        assert (books.messages, books.lost, books.restarts, books.next_seq) == (10, 80, 1, 0)


def test_a_new_queue_that_has_caught_up_is_noticed_by_its_messages(queue_path: str) -> None:
    """Its youngest id is no smaller than the old one's: only the slot read last tells."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many([b"an old one"] * 3)
    with reader_of(queue_path) as reader:
        assert len(reader.read_many(9)) == 3
        with writer_of(queue_path, slots=10, size=5000, create="always") as writer:
            writer.write_many([b"a longer new one"] * 5)
        assert seqs(reader.read_many(9)) == [0, 1, 2, 3, 4]
        assert reader.statistics().restarts == 1


@pytest.fixture
def shared_path(tmp_path: Path) -> Iterator[str]:
    with shared_memory_path(tmp_path) as path:
        yield path


@pytest.mark.parametrize("slots", [10, 7, 500], ids=["same", "smaller", "larger"])
@pytest.mark.parametrize("removed", [False, True])
def test_a_reader_notices_shared_memory_that_was_made_anew(
    slots: int, removed: bool, shared_path: str
) -> None:
    with writer_of(shared_path, slots=10, size=5000) as writer:
        writer.write_many([b"old"] * 4)
    with reader_of(shared_path) as reader:
        assert len(reader.read_many(9)) == 4
        if removed:
            remove_segments(shared_path)
        with writer_of(shared_path, slots=slots, size=20 * slots, create="always") as writer:
            writer.write(b"new")
            assert [m.payload for m in patiently(reader, 1)] == [b"new"]
        assert reader.statistics().restarts == 1


def remove_segments(path: str, *, only_buffer: bool = False) -> None:
    key = shared_memory_key(path)
    assert key is not None
    for part in (key, key + 1)[only_buffer:]:
        id = sysv.find(part)
        assert id is not None
        sysv.remove(id)


def test_a_writer_makes_its_queue_again_when_the_files_are_removed(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 4))
        remove(queue_path)
        assert writer.write(b"again") == 0
        assert writer.write(b"and again") == 1
        assert writer.statistics().messages == 7
    assert list(read_all(queue_path).values()) == [b"again", b"and again"]


def test_a_writer_makes_its_queue_again_when_the_segments_are_removed(shared_path: str) -> None:
    with writer_of(shared_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 4))
        remove_segments(shared_path)
        assert writer.write(b"again") == 0
    assert list(read_all(shared_path).values()) == [b"again"]


def test_a_writer_that_must_not_create_says_that_its_queue_is_gone(queue_path: str) -> None:
    writer_of(queue_path, slots=10, size=5000).close()
    with writer_of(queue_path, create="never") as writer:
        writer.write(b"0")
        remove(queue_path)
        for _ in range(2):
            with pytest.raises(NotFound):
                writer.write(b"lost")
        assert not Path(f"{queue_path}.stat").exists()
        with writer_of(queue_path, slots=10, size=5000):
            assert writer.write(b"back") == 0
        books = writer.statistics()
        assert (books.messages, books.refused) == (2, 2)


def test_a_writer_whose_place_is_taken_stays_usable(queue_path: str) -> None:
    """Whatever stands in the way of the new queue, the error is clear and closing works."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write(b"0")
        remove(queue_path)
        Path(f"{queue_path}.stat").mkdir()
        for _ in range(2):
            with pytest.raises(StorageError):
                writer.write(b"lost")
        Path(f"{queue_path}.stat").rmdir()
        Path(f"{queue_path}.stat").write_bytes(b"no queue at all, but long enough for a status. ")
        for _ in range(2):
            with pytest.raises(DamagedQueue):
                writer.write(b"lost")
        remove(queue_path)
        assert writer.write(b"1") == 0
        books = writer.statistics()
        assert (books.messages, books.refused) == (2, 4)


def test_a_writer_does_not_write_into_a_buffer_that_was_removed(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write(b"0")
        Path(f"{queue_path}.buf").unlink()
        with pytest.raises(DamagedQueue, match=r"\.buf"):
            writer.write(b"nobody would find it")
        assert writer.statistics().refused == 1


def test_a_writer_does_not_write_into_a_segment_that_was_removed(shared_path: str) -> None:
    with writer_of(shared_path, slots=10, size=5000) as writer:
        writer.write(b"0")
        remove_segments(shared_path, only_buffer=True)
        with pytest.raises(PenstockError), reader_of(shared_path):
            pass
        with pytest.raises(AlreadyExists, match="shared memory keys"):
            writer.write(b"1")
        assert writer.statistics().refused == 1


def test_a_reader_waits_for_a_removed_queue_to_come_back(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 2))
    with reader_of(queue_path) as reader:
        assert len(reader.read_many(9)) == 3
        remove(queue_path)
        assert reader.read(timeout=0.6) is None
        with writer_of(queue_path, slots=10, size=5000) as writer:
            writer.write_many(numbered(0, 7))
            assert seqs(patiently(reader, 8)) == list(range(8))
        assert reader.statistics().restarts == 1


def test_a_reader_that_meets_a_half_made_queue_takes_it_as_new_when_it_is_done(
    queue_path: str,
) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many([b"old"] * 2)
    with reader_of(queue_path) as reader:
        assert len(reader.read_many(9)) == 2
        remove(queue_path)
        QueueBytes(bytes(456), bytes(5000)).store(queue_path)
        with pytest.raises(DamagedQueue):
            reader.read(timeout=2)
        with writer_of(queue_path, slots=10, size=5000) as writer:
            writer.write_many([b"new"] * 4)
            assert [m.payload for m in patiently(reader, 4)] == [b"new"] * 4
        assert reader.statistics().restarts == 1


@pytest.mark.parametrize("look", ["bounds", "newest_seq", "nothing"])
@pytest.mark.parametrize("timeout", [0, 0.01, 1])
def test_what_is_left_in_a_removed_queue_is_read_before_the_new_one(
    queue_path: str, look: str, timeout: float
) -> None:
    with writer_of(queue_path, slots=1000, size=50_000) as writer:
        writer.write_many([b"old %d" % number for number in range(600)])
    with reader_of(queue_path) as reader:
        found = [message.payload for message in reader.read_many(10)]
        remove(queue_path)
        with writer_of(queue_path, slots=1000, size=50_000) as writer:
            writer.write_many([b"new %d" % number for number in range(700)])
        if look != "nothing":
            getattr(reader, look)()
        deadline = time.monotonic() + 40
        while len(found) < 1300 and time.monotonic() < deadline:
            found += [message.payload for message in reader.read_many(100, timeout=timeout)]
        books = reader.statistics()
    assert found == [
        *(b"old %d" % number for number in range(600)),
        *(b"new %d" % number for number in range(700)),
    ]
    assert (books.lost, books.restarts) == (0, 1)


def test_a_reader_that_seeks_goes_to_a_place_in_the_queue_of_its_path(queue_path: str) -> None:
    for number in range(6):
        with writer_of(queue_path, slots=100, size=5000) as writer:
            writer.write(b"old %d" % number)
    for place, first in (("start", b"new 0"), ("last", b"new 4"), (2, b"new 2")):
        with reader_of(queue_path) as reader:
            reader.read_many(1)
            remove(queue_path)
            with writer_of(queue_path, slots=100, size=5000) as writer:
                writer.write_many([b"new %d" % number for number in range(5)])
            reader.seek(place)
            message = reader.read(0)
            assert message is not None
            assert message.payload == first
            assert reader.statistics().lost == 0


def test_a_queue_of_which_one_file_was_removed_is_read_on(queue_path: str) -> None:
    with writer_of(queue_path, slots=100, size=5000) as writer:
        writer.write_many([b"old %d" % number for number in range(6)])
    with reader_of(queue_path) as reader:
        assert len(reader.read_many(6)) == 6
        Path(f"{queue_path}.buf").unlink()
        with writer_of(queue_path, slots=100, size=5000, create="always") as writer:
            writer.write_many([b"new %d" % number for number in range(9)])
        found = [message.payload for message in patiently(reader, 9)]
        assert found == [b"new %d" % number for number in range(9)]


def test_a_follower_with_any_timeout_sees_every_message_of_a_queue_removed_again_and_again(
    queue_path: str,
) -> None:
    found: dict[float, list[bytes]] = {0.001: [], 0.05: [], 3: []}
    written: list[bytes] = []
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(writer_of(queue_path, slots=1000, size=50_000))
        writer.write(b"first")
        readers = {timeout: stack.enter_context(reader_of(queue_path)) for timeout in found}
        written.append(b"first")

        def read(timeout: float) -> None:
            while found[timeout][-1:] != [b"over"]:
                found[timeout] += [m.payload for m in readers[timeout].read_many(50, timeout)]

        threads = [threading.Thread(target=read, args=(timeout,)) for timeout in found]
        for thread in threads:
            thread.start()
        for round_ in range(3):
            for number in range(100):
                payload = b"%d: %d" % (round_, number)
                writer.write(payload)
                written.append(payload)
            time.sleep(0.6)  # everybody looks at the path in between
            remove(queue_path)
        writer.write(b"over")
        for thread in threads:
            thread.join(20)
        written.append(b"over")
    for timeout, payloads in found.items():
        assert payloads == written, timeout
