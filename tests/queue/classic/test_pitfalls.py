"""LROSE's own faults, which must not be ours (docs/specs/lrose.md 6.1)."""

from __future__ import annotations

import mmap
import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock import Position, WriteTimeout, open_reader, open_writer
from penstock.core.errors import MessageTooLarge, PositionError
from penstock.core.overflow import DropReason
from support.queue_files import (
    QueueBytes,
    check_queue,
    numbered,
    read_all,
    reader_of,
    seqs,
    writer_of,
)

if TYPE_CHECKING:
    pass


def test_a_reader_opened_at_the_start_of_an_empty_queue_gets_the_first_message(
    queue_path: str,
) -> None:
    """Pitfall 1: LROSE's reader reads slot -1 here, and dies."""
    for start in (Position.START, Position.END, Position.LAST, Position.sequence(0)):
        with (
            writer_of(queue_path, slots=5, size=1000, create="always") as writer,
            reader_of(queue_path, start) as reader,
        ):
            writer.write(b"first")
            message = reader.read(timeout=0)
            assert message is not None
            assert (message.seq, message.payload) == (0, b"first")


def test_whoever_created_a_queue_can_read_it(queue_url: str) -> None:
    """Pitfall 2: LROSE's creator took the buffer's size before it had one."""
    with open_writer(queue_url) as writer, open_reader(queue_url) as reader:
        writer.write(b"x" * 5000)
        message = reader.read(timeout=0)
        assert message is not None
        assert message.size == 5000


def test_a_message_that_fits_only_when_compressed_is_refused(queue_path: str) -> None:
    """Pitfall 3: LROSE's reader cannot read it."""
    with writer_of(queue_path, slots=5, size=1000, compress="gzip") as writer:
        assert writer.write(bytes(1000)) == 0
        before = QueueBytes.load(queue_path)
        with pytest.raises(MessageTooLarge) as caught:
            writer.write(bytes(1001))
        assert (caught.value.size, caught.value.limit) == (1001, 988)
        assert QueueBytes.load(queue_path) == before


def test_a_lapped_reader_goes_on_at_the_oldest_and_names_what_it_lost(queue_path: str) -> None:
    """Pitfall 4: LROSE's reader jumps to the newest, and says nothing."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 0))
        with reader_of(queue_path) as reader:
            assert seqs(reader.read_many(1)) == [0]
            writer.write_many(numbered(1, 13))
            assert seqs(reader.read_many(99)) == list(range(4, 14))
            books = reader.statistics()
            [loss] = books.losses
            assert (loss.first, loss.last, loss.reason) == (1, 3, DropReason.OVERRUN)
            assert str(loss) == "3 messages lost (seq 1 to 3): overrun"
            assert (books.messages, books.lost, books.next_seq) == (11, 3, 14)
            writer.write_many(numbered(14, 40))
            reader.read_many(99)
            assert [(loss.first, loss.last) for loss in reader.statistics().losses] == [
                (1, 3),
                (14, 30),
            ]


def test_a_lapped_reader_goes_on_at_the_newest_if_asked_to(queue_path: str) -> None:
    with (
        writer_of(queue_path, slots=10, size=5000) as writer,
        reader_of(queue_path, resume="newest") as reader,
    ):
        writer.write_many(numbered(0, 13))
        assert seqs(reader.read_many(99)) == [13]
        books = reader.statistics()
        assert [(loss.first, loss.last) for loss in books.losses] == [(0, 12)]
        assert (books.messages, books.lost, books.next_seq) == (1, 13, 14)


@pytest.mark.parametrize(
    ("size", "compression"),
    [
        *((size, "off") for size in (989, 5000, 2**31 - 1, 2**31, 2**33)),
        *((size, "none") for size in (965, 5000, 2**31, 2**33)),
    ],
)
def test_an_oversize_message_is_refused_before_anything_is_touched(
    size: int, compression: str, queue_path: str
) -> None:
    """Pitfall 5: LROSE frees the oldest slot first, and wipes the queue at the next open."""
    with writer_of(queue_path, slots=3, size=1000, compress=compression) as writer:
        writer.write_many(numbered(0, 4))
        before = QueueBytes.load(queue_path)
        with (
            mmap.mmap(-1, size) as untouched,
            memoryview(untouched) as payload,
            pytest.raises(MessageTooLarge) as caught,
        ):
            writer.write(payload)
        assert caught.value.size in (size, size + 24)  # with the header of a compressed one
        assert caught.value.limit == 988
        assert QueueBytes.load(queue_path) == before
        books = writer.statistics()
        assert (books.messages, books.refused, books.last_seq) == (5, 1, 4)
        assert writer.write(b"5") == 5
    check_queue(queue_path)


def test_the_limit_in_the_error_is_the_size_of_the_largest_message(queue_path: str) -> None:
    for size in (64, 65, 66, 67, 68):
        with writer_of(queue_path, slots=3, size=size, create="always") as writer:
            with pytest.raises(MessageTooLarge) as caught:
                writer.write(bytes(100))
            writer.write(bytes(caught.value.limit))
            with pytest.raises(MessageTooLarge):
                writer.write(bytes(caught.value.limit + 1))


def test_writers_that_open_beside_a_busy_writer_never_wipe_the_queue(queue_path: str) -> None:
    """Pitfall 6: LROSE's check on opening sees half of another's work, and clears it."""
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        with writer_of(queue_path, slots=10, size=3000) as writer:
            while not stop.is_set():
                written.append(writer.write(b"x" * (len(written) % 700)))

    writer_of(queue_path, slots=10, size=3000).close()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            with writer_of(queue_path, slots=99, size=99999) as other:
                other.write(b"between")
    finally:
        stop.set()
        thread.join()
    assert written == sorted(set(written))
    status = check_queue(queue_path)
    assert (status.nslots, status.buf_size) == (10, 3000)
    assert status.youngest_id >= len(written)


def test_two_writers_in_one_process_exclude_each_other_without_long_waits(
    queue_path: str,
) -> None:
    """Pitfall 7: LROSE's writers sleep whole seconds, and do not exclude their own process."""
    longest = [0.0, 0.0]
    writer_of(queue_path, slots=100, size=300_000).close()

    def write(which: int) -> None:
        with writer_of(queue_path) as writer:
            for _ in range(1500):
                began = time.monotonic()
                writer.write_many([b"%d" % which * 1000] * 3)
                longest[which] = max(longest[which], time.monotonic() - began)

    threads = [threading.Thread(target=write, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert check_queue(queue_path).youngest_id == 2 * 1500 * 3 - 1
    assert max(longest) < 0.9
    assert set(read_all(queue_path).values()) <= {b"0" * 1000, b"1" * 1000}


def test_a_blocking_writer_without_a_reader_stops_at_its_slots_and_loses_nothing(
    queue_path: str,
) -> None:
    """Pitfall 8: and the reader that comes at last hears of no gap."""
    options = {"slots": 5, "size": 5000, "blocking": True, "timeout": 0.05}
    with writer_of(queue_path, **options) as writer:
        assert writer.write_many(numbered(0, 4)) == 4
        with pytest.raises(WriteTimeout, match="its reader has not moved") as caught:
            writer.write(b"5")
        assert caught.value.hint
        with reader_of(queue_path) as reader:
            assert seqs(reader.read_many(99)) == [0, 1, 2, 3, 4]
            assert writer.write_many(numbered(5, 8)) == 8
            assert seqs(reader.read_many(99)) == [5, 6, 7, 8]
            assert reader.statistics().lost == 0
        books = writer.statistics()
        assert (books.messages, books.refused, books.last_seq) == (9, 1, 8)
        assert books.waited > 0.02  # of the 0.05, what it slept


def test_opening_a_queue_for_writing_again_and_again_keeps_its_messages(
    queue_path: str,
) -> None:
    """Pitfall 13: LROSE's object clears the queue the second time."""
    for number in range(8):
        with writer_of(queue_path, slots=20, size=8192) as writer:
            assert writer.write(b"%d" % number) == number
    assert list(read_all(queue_path).values()) == numbered(0, 7)


def test_free_slots_are_not_taken_for_the_message_with_id_0(queue_path: str) -> None:
    """Pitfall 14: free slots say id 0, so LROSE's reader stood at one of them."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 6))
    queue = QueueBytes.load(queue_path).renumbered(0)
    for index in (0, 1, 2):
        queue = queue.with_free_slot(index)
    queue = queue.with_status(oldest_slot=3, end_insert=queue.slot(3).offset)
    queue.store(queue_path)
    with reader_of(queue_path, Position.END) as reader, writer_of(queue_path) as writer:
        writer.write_many([b"one", b"two"])
        assert [m.payload for m in reader.read_many(9)] == [b"one", b"two"]
        reader.seek_after_id(0)
        assert [m.payload for m in reader.read_many(9)] == [b"one", b"two"]
    writer_of(queue_path, slots=10, size=5000, create="always").close()
    with reader_of(queue_path) as reader, pytest.raises(PositionError, match="id 0"):
        reader.seek_after_id(0)
