"""What a user of a classic queue can rely on, LROSE's known pitfalls first (spec lrose 6.1)."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import (
    AlreadyExists,
    Closed,
    DamagedQueue,
    DropReason,
    InvalidOption,
    InvalidURL,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Position,
    PositionError,
    StorageError,
    StreamId,
    UnknownScheme,
    WriteTimeout,
    create,
    describe,
    open_reader,
    open_writer,
)
from penstock.queue.classic import sysv
from penstock.queue.classic import writer as writer_module
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.layout import ID_COUNT
from penstock.queue.classic.status import read_status
from support.processes import shared_memory_path
from support.queue_files import QueueBytes, check_queue, read_all, reader_of, writer_of
from support.unprivileged import run_without_rights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Message, Reader
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


def seqs(messages: list[Message]) -> list[int]:
    return [message.seq for message in messages]


# --- LROSE's pitfalls -----------------------------------------------------------------------


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
        assert books.waited >= 0.05


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


# --- ids that begin again -------------------------------------------------------------------


@pytest.fixture
def near_wrap(queue_path: str) -> str:
    """A queue of 10 slots with 5 messages, the youngest with id 999,999,996."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 4))
    QueueBytes.load(queue_path).renumbered(ID_COUNT - 4).store(queue_path)
    return queue_path


def test_numbers_go_on_when_the_ids_begin_again(near_wrap: str) -> None:
    with writer_of(near_wrap) as writer, reader_of(near_wrap) as reader:
        assert seqs(reader.read_many(9)) == [ID_COUNT - 8 + i for i in range(5)]
        last = [writer.write(b"x") for _ in range(8)]
        assert last == [ID_COUNT - 3 + i for i in range(8)]
        assert seqs(reader.read_many(9)) == last
        books = reader.statistics()
        assert (books.lost, books.restarts, books.next_seq) == (0, 0, ID_COUNT + 5)
        writer.write_many([b"y"] * 25)
        assert len(reader.read_many(99)) == 10
        [loss] = reader.statistics().losses
        assert (loss.first, loss.last) == (ID_COUNT + 5, ID_COUNT + 19)
    status = check_queue(near_wrap)
    assert status.youngest_id == 29


def test_a_fresh_reader_goes_on_at_a_number_from_before_or_after_the_wrap(
    near_wrap: str,
) -> None:
    with writer_of(near_wrap) as writer:
        writer.write_many([b"x"] * 8)  # ids …997 to 999,999,999, then 0 to 4
        for seq in (ID_COUNT - 4, ID_COUNT - 1, ID_COUNT, ID_COUNT + 3, ID_COUNT + 5):
            with reader_of(near_wrap, Position.sequence(seq)) as reader:
                assert seqs(reader.read_many(99)) == list(range(seq, ID_COUNT + 5))
        writer.write_many([b"y"] * 40)  # nothing is left from before the wrap
        for seq in (ID_COUNT + 36, ID_COUNT + 40, 7 * ID_COUNT + 36):
            with reader_of(near_wrap, Position.sequence(seq)) as reader:
                last = seq // ID_COUNT * ID_COUNT + 45
                assert seqs(reader.read_many(99)) == list(range(seq, last))
                assert reader.statistics().lost == 0
        with reader_of(near_wrap, Position.sequence(ID_COUNT - 2)) as reader:
            assert seqs(reader.read_many(99)) == list(range(ID_COUNT + 35, ID_COUNT + 45))
            [loss] = reader.statistics().losses
            assert (loss.first, loss.last) == (ID_COUNT - 2, ID_COUNT + 34)


def test_a_description_tells_the_numbers_across_the_wrap(near_wrap: str) -> None:
    with writer_of(near_wrap) as writer:
        writer.write_many([b"x"] * 5)
    info = describe(f"fmq:{near_wrap}")
    assert (info.oldest_seq, info.youngest_seq) == (ID_COUNT - 8, ID_COUNT + 1)


def test_a_position_that_is_not_there_yet_is_refused(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 4))
    with reader_of(queue_path, Position.sequence(5)) as reader:
        assert reader.read(timeout=0) is None
        with pytest.raises(PositionError, match="the youngest is 4") as caught:
            reader.seek(6)
        assert caught.value.hint
        assert reader.statistics().next_seq == 5


# --- blocking -------------------------------------------------------------------------------


def test_a_reader_releases_a_blocked_writer(queue_path: str) -> None:
    options = {"slots": 4, "size": 5000, "blocking": True, "timeout": 10}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path) as reader:
        thread = threading.Thread(target=writer.write_many, args=(numbered(0, 99),))
        thread.start()
        found: list[int] = []
        while len(found) < 100:
            messages = reader.read_many(3, timeout=10)
            assert messages, f"both stand still after {len(found)}"
            found += seqs(messages)
        thread.join()
        assert found == list(range(100))
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("as_batch", [False, True])
def test_a_blocked_writer_is_released_by_what_was_delivered_not_by_what_was_copied(
    queue_path: str, as_batch: bool
) -> None:
    options = {"slots": 4, "size": 5000, "blocking": True, "timeout": 0.02}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path) as reader:
        writer.write_many(numbered(0, 3))
        if as_batch:
            assert reader.read_batch(2).num_rows == 2
        else:
            assert len(reader.read_many(2)) == 2
        assert writer.write(b"4") == 4  # in the place of 0; 1 was read last
        with pytest.raises(WriteTimeout):
            writer.write(b"5")


def test_a_reader_with_a_filter_releases_a_blocked_writer(queue_path: str) -> None:
    options = {"slots": 4, "size": 5000, "blocking": True, "timeout": 0.05}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path, type=7) as reader:
        for _ in range(5):
            writer.write_many(numbered(0, 2), type=1)
            assert reader.read(timeout=0) is None
        writer.write(b"wanted", type=7)
        message = reader.read(timeout=0)
        assert message is not None
        assert message.payload == b"wanted"
        assert reader.statistics().filtered == 15


def test_a_reader_that_skips_damage_releases_a_blocked_writer(queue_path: str) -> None:
    options = {"slots": 4, "size": 5000, "blocking": True, "timeout": 0.05}
    with writer_of(queue_path, **options) as writer:
        writer.write_many(numbered(0, 3))
        QueueBytes.load(queue_path).with_slot(3, checksum=12345).store(queue_path)
        with reader_of(queue_path, damaged="skip") as reader:
            assert seqs(reader.read_many(9)) == [0, 1, 2]
            assert reader.read(timeout=0) is None
            assert reader.statistics().lost == 1
            assert writer.write_many(numbered(4, 6)) == 6
            assert seqs(reader.read_many(9)) == [4, 5, 6]


def test_a_report_that_a_writer_put_back_is_made_again(queue_path: str) -> None:
    """A writer rewrites the whole status, with the progress as it was a moment before."""
    options = {"slots": 5, "size": 5000, "blocking": True, "timeout": 0.05}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path) as reader:
        writer.write_many(numbered(0, 3))
        for first in range(0, 40, 4):
            before = QueueBytes.load(queue_path).status.last_id_read
            assert len(reader.read_many(9)) == 4
            QueueBytes.load(queue_path).with_status(last_id_read=before).store(queue_path)
            assert reader.read(timeout=0) is None
            assert writer.write_many(numbered(first + 4, first + 7)) == first + 7


def test_a_reader_that_moves_on_just_before_its_writer_waits_is_not_missed(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read everything and reports no more: who waits for the next report waits for ever."""
    options = {"slots": 4, "size": 5000, "blocking": True, "timeout": 1}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path) as reader:
        writer.write_many(numbered(0, 3))

        def read_first(device: Device) -> Status:
            reader.read_many(9)
            return read_status(device)

        monkeypatch.setattr(writer_module, "read_status", read_first)
        assert writer.write(b"4") == 4
        assert writer.statistics().waited < 1


def test_a_blocking_writer_says_when_its_buffer_is_full_before_its_slots(
    queue_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"slots": 50, "size": 300, "blocking": True, "timeout": 0.02}
    with writer_of(queue_path, **options) as writer, reader_of(queue_path) as reader:
        with pytest.raises(WriteTimeout):
            writer.write_many([bytes(100)] * 9)
        written = writer.statistics().messages
        assert "blocks on its buffer, not on its slots" in caplog.text
        for _ in range(20):
            assert reader.read(timeout=0) is not None
            written += 1
            with pytest.raises(WriteTimeout):
                writer.write_many([bytes(100)] * 9)
        assert caplog.text.count("blocks on its buffer") == 1
        reader.read_many(99)
        assert reader.statistics().lost == 0


def test_a_blocking_writer_says_when_nobody_reads(
    queue_path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_NOBODY_READS", 0.02)
    options = {"slots": 2, "size": 300, "blocking": True, "timeout": 0.1}
    with writer_of(queue_path, **options) as writer, pytest.raises(WriteTimeout):
        writer.write_many([b"x"] * 3)
    assert caplog.text.count("nobody reads it") == 1


def test_a_queue_of_one_slot_cannot_block(queue_path: str) -> None:
    with pytest.raises(InvalidOption, match="one slot") as caught:
        writer_of(queue_path, slots=1, size=300, blocking=True)
    assert caught.value.option == "blocking"
    assert caught.value.hint


def test_a_blocked_writer_goes_on_when_its_queue_is_removed(queue_path: str) -> None:
    with writer_of(queue_path, slots=3, size=300, blocking=True, timeout=10) as writer:
        writer.write_many(numbered(0, 2))
        timer = threading.Timer(0.05, remove, args=(queue_path,))
        timer.start()
        assert writer.write(b"in the new one") == 0
        timer.join()
    assert read_all(queue_path) == {0: b"in the new one"}


# --- the filter -----------------------------------------------------------------------------


def test_a_filter_counts_what_it_passes_over(queue_path: str) -> None:
    with writer_of(queue_path, slots=100, size=50_000) as writer:
        for number in range(30):
            writer.write(b"%d" % number, type=number % 3)
        with reader_of(queue_path, type=1) as reader:
            for expected in range(1, 30, 3):
                message = reader.read(timeout=0)
                assert message is not None
                assert message.seq == expected
                books = reader.statistics()
                assert books.next_seq is not None
                assert books.messages + books.filtered + books.lost == books.next_seq
            assert reader.read(timeout=0) is None
            books = reader.statistics()
            assert (books.messages, books.filtered, books.next_seq) == (10, 20, 30)


def test_a_negative_type_can_be_filtered_for(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        for type in (-5, 3, -5):
            writer.write(b"x", type=type)
    with reader_of(queue_path, type=-5) as reader:
        assert seqs(reader.read_many(9)) == [0, 2]
        assert reader.read_batch(9).num_rows == 0


def test_a_filter_counts_what_was_lost_before_it_was_looked_at(queue_path: str) -> None:
    with (
        writer_of(queue_path, slots=5, size=5000) as writer,
        reader_of(queue_path, type=1) as reader,
    ):
        for number in range(17):
            writer.write(b"x", type=number % 2)
        assert seqs(reader.read_many(99)) == [13, 15]
        books = reader.statistics()
        assert (books.messages, books.filtered, books.lost, books.next_seq) == (2, 3, 12, 17)


# --- a queue made anew ----------------------------------------------------------------------


def remove(path: str) -> None:
    for part in ("stat", "buf"):
        Path(f"{path}.{part}").unlink()


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
    deadline = time.monotonic() + 5
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


# --- a queue that goes away -----------------------------------------------------------------


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
        seq = writer.write(b"1")
        with reader_of(shared_path, damaged="skip") as reader:
            assert [(m.seq, m.payload) for m in reader.read_many(9)] == [(seq, b"1")]
            assert reader.statistics().lost == 1  # what was in the segment that is gone


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


# --- opening --------------------------------------------------------------------------------


def test_a_writer_creates_a_queue_that_is_missing_and_keeps_one_that_is_there(
    queue_path: str,
) -> None:
    with writer_of(f"{queue_path}/deep/down", slots=3, size=300) as writer:
        writer.write(b"0")
    with writer_of(f"{queue_path}/deep/down", slots=99, size=9999) as writer:
        assert writer.write(b"1") == 1
    assert check_queue(f"{queue_path}/deep/down").nslots == 3


def test_a_writer_that_always_creates_empties_the_queue(queue_path: str) -> None:
    with writer_of(queue_path, slots=3, size=300) as writer:
        writer.write(b"0")
    with writer_of(queue_path, slots=4, size=400, create="always") as writer:
        assert writer.write(b"anew") == 0
    assert read_all(queue_path) == {0: b"anew"}
    assert check_queue(queue_path).nslots == 4


def test_a_writer_that_never_creates_waits_as_long_as_it_is_told(queue_path: str) -> None:
    began = time.monotonic()
    with pytest.raises(NotFound):
        writer_of(queue_path, create="never", wait=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    timer = threading.Timer(0.1, lambda: writer_of(queue_path, slots=3, size=300).close())
    timer.start()
    with writer_of(queue_path, create="never", wait="true") as writer:
        assert writer.write(b"0") == 0
    timer.join()


def test_a_reader_waits_for_a_queue_as_long_as_it_is_told(queue_path: str) -> None:
    with pytest.raises(NotFound):
        reader_of(queue_path, wait=0.1)
    timer = threading.Timer(0.1, lambda: writer_of(queue_path, slots=3, size=300).close())
    timer.start()
    with reader_of(queue_path, wait="10s") as reader:
        assert reader.read(timeout=0) is None
    timer.join()


def test_creating_what_is_there_already_is_refused_and_harms_nothing(queue_url: str) -> None:
    create(queue_url)
    with open_writer(queue_url) as writer:
        writer.write(b"0")
    with pytest.raises(AlreadyExists) as caught:
        create(queue_url)
    assert caught.value.hint
    with open_reader(queue_url) as reader:
        assert reader.read(timeout=0) is not None
    create(queue_url, replace=True)
    with open_reader(queue_url) as reader:
        assert reader.read(timeout=0) is None


def test_a_user_who_may_only_read_can_read_and_is_told_that_he_cannot_write() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = f"{directory}/queue"
        with writer_of(path, slots=5, size=500, blocking=True, timeout=0.1) as writer:
            writer.write_many(numbered(0, 2))
        for part in ("stat", "buf"):
            Path(f"{path}.{part}").chmod(0o444)

        def check() -> None:
            with reader_of(path) as reader:
                assert seqs(reader.read_many(9)) == [0, 1, 2]  # and its progress is not told
            with pytest.raises(StorageError, match="Permission denied") as caught:
                writer_of(path)
            assert caught.value.hint is not None
            assert "permissions" in caught.value.hint
            with pytest.raises(StorageError):
                writer_of(f"{directory}/another", slots=5, size=500)

        run_without_rights(check)
        for part in ("stat", "buf"):
            Path(f"{path}.{part}").chmod(0o000)

        def check_closed() -> None:
            with pytest.raises(StorageError, match="Permission denied"):
                reader_of(path)
            with pytest.raises(StorageError):
                describe(f"fmq:{path}")

        run_without_rights(check_closed)
        assert QueueBytes.load(path).status.last_id_read == 0


def test_a_directory_in_the_place_of_a_queue_is_an_error_of_ours(queue_path: str) -> None:
    for part in ("stat", "buf"):
        Path(f"{queue_path}.{part}").mkdir()
    with pytest.raises(StorageError):
        reader_of(queue_path)
    with pytest.raises(StorageError):
        writer_of(queue_path)
    with pytest.raises(PenstockError):
        create(f"fmq:{queue_path}?layout=classic")


# --- what is said ---------------------------------------------------------------------------


def test_a_missing_queue_is_named_with_what_to_do(queue_path: str) -> None:
    with pytest.raises(NotFound, match=f"no queue at {queue_path}") as caught:
        open_reader(f"fmq:{queue_path}")
    assert "penstock create" in str(caught.value.hint)
    assert isinstance(caught.value, FileNotFoundError)
    Path(f"{queue_path}.stat").touch()
    with pytest.raises(NotFound, match=r"queue\.buf is missing"):
        open_reader(f"fmq:{queue_path}")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slots", 0),
        ("slots", "many"),
        ("size", 11),
        ("size", 2**31),
        ("compress", "zip"),
        ("create", "sometimes"),
        ("wait", "soon"),
        ("resume", "middle"),
        ("damaged", "repair"),
        ("type", "wind"),
        ("lock_timeout", -1),
        ("layout", "round"),
        ("layout", "wide"),
    ],
)
def test_an_option_that_does_not_fit_is_named(option: str, value: object, queue_path: str) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidOption, match=f"option {option}=") as caught:
            opener(f"fmq:{queue_path}?{option}={value}")
        assert caught.value.option == option
    assert not Path(f"{queue_path}.stat").exists()


def test_an_option_that_nobody_knows_is_named_with_the_nearest(queue_path: str) -> None:
    with pytest.raises(InvalidOption, match="no such option") as caught:
        open_writer(f"fmq:{queue_path}?slot=5")
    assert caught.value.hint == "did you mean slots?"


@pytest.mark.parametrize(
    "url",
    ["fmq:", "fmq:/", "fmq:/tmp/", "fmq://host/queue", "/tmp/queue", "fmq:/a?slots=1&slots=2", ""],
)
def test_a_url_that_names_no_queue_is_refused(url: str) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidURL):
            opener(url)


def test_an_unknown_scheme_is_refused_with_the_nearest(queue_path: str) -> None:
    with pytest.raises(UnknownScheme, match="fnq") as caught:
        open_reader(f"fnq:{queue_path}")
    assert "fmq" in str(caught.value.hint)


@pytest.mark.parametrize("key", ["0", "-1", "2147483647", "99999999999", "9" * 3000])
def test_a_number_that_is_no_shared_memory_key_is_refused(key: str, tmp_path: Path) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidURL, match="key"):
            opener(f"fmq:{tmp_path}/shmem_{key}")


def test_a_name_too_long_for_the_system_is_an_error_of_ours(tmp_path: Path) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(StorageError):
            opener(f"fmq:{tmp_path}/{'x' * 300}")


def read_until_the_end(path: str) -> None:
    with reader_of(path) as reader:
        while reader.read_many(99):
            pass


def test_a_damaged_queue_names_field_offset_expected_and_found(queue_path: str) -> None:
    with writer_of(queue_path, slots=5, size=500) as writer:
        writer.write_many([b"a message"] * 8)
    whole = QueueBytes.load(queue_path)

    def fault(queue: QueueBytes) -> tuple[str, int, object, object]:
        queue.store(queue_path)
        with pytest.raises(DamagedQueue) as caught:
            read_until_the_end(queue_path)
        error = caught.value
        assert error.path == queue_path
        assert "repair" in str(error.hint)
        text = str(error)
        for part in (error.field, error.offset, error.expected, error.found):
            assert str(part) in text
        return error.field, error.offset, error.expected, error.found

    assert fault(whole._replace(stat=b"\0" * 4 + whole.stat[4:])) == (
        "magic_cookie", 0, 88008801, 0,
    )  # fmt: skip
    assert fault(whole.with_status(oldest_slot=9)) == ("oldest_slot", 12, "-1 to 4", 9)
    checksum = whole.status.checksum
    wrong = whole.status._replace(checksum=7).encode() + whole.stat[56:]
    assert fault(whole._replace(stat=wrong)) == ("checksum", 52, checksum, 7)
    assert fault(whole._replace(buf=whole.buf[:400])) == (".buf", 400, "500 bytes", "400 bytes")
    assert fault(whole._replace(stat=whole.stat[:200])) == (
        ".stat", 200, "256 bytes", "200 bytes",
    )  # fmt: skip
    assert fault(whole.with_slot(4, id=3)) == ("slot 4 id", 56 + 160 + 4, 4, 3)
    # Damage of the very oldest slot is damage too, not an overrun.
    assert fault(whole.with_slot(3, id=77)) == ("slot 3 id", 56 + 120 + 4, 3, 77)
    assert fault(whole.with_slot(3, stored_len=28))[0] == "slot 3 stored_len"
    at = whole.slot(0).offset
    assert fault(whole.with_buf(at, b"\0\0\0\1")) == ("message 5 cookie", at, 88008802, 1)
    assert fault(whole.with_buf(at + 20, bytes(4))) == ("message 5 id", at + 20, 5, 0)


def test_a_reader_that_skips_damage_counts_it_and_goes_on(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=1000) as writer:
        writer.write_many(numbered(0, 9))
    queue = QueueBytes.load(queue_path)
    queue = queue.with_slot(0, id=123).with_buf(queue.slot(4).offset, bytes(4))
    queue.with_slot(9, checksum=1).store(queue_path)
    with reader_of(queue_path, damaged="skip") as reader:
        found = []
        while messages := reader.read_many(99):
            found += seqs(messages)
        assert found == [1, 2, 3, 5, 6, 7, 8]
        books = reader.statistics()
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (0, 0, DropReason.DAMAGED),
            (4, 4, DropReason.DAMAGED),
            (9, 9, DropReason.DAMAGED),
        ]
        assert books.messages + books.lost == books.next_seq == 10


def test_a_reader_that_fails_at_damage_stays_there_and_can_be_moved_on(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=1000) as writer:
        writer.write_many(numbered(0, 5))
    queue = QueueBytes.load(queue_path)
    queue.with_buf(queue.slot(2).offset, bytes(4)).store(queue_path)
    with reader_of(queue_path) as reader:
        assert seqs(reader.read_many(9)) == [0, 1]
        for _ in range(2):
            with pytest.raises(DamagedQueue, match="message 2 cookie"):
                reader.read(timeout=0)
        assert reader.statistics().lost == 0
        reader.seek(3)
        assert seqs(reader.read_many(9)) == [3, 4, 5]


def test_a_buffer_cut_off_under_a_reader_gives_what_is_left_and_then_an_error(
    queue_path: str,
) -> None:
    with writer_of(queue_path, slots=10, size=1000) as writer:
        writer.write_many([bytes(50)] * 10)
    with reader_of(queue_path) as reader:
        os.truncate(f"{queue_path}.buf", 300)
        assert seqs(reader.read_many(1)) == [0]
        assert seqs(reader.read_many(1)) == [1]
        assert seqs(reader.read_many(1)) == [2]
        assert seqs(reader.read_many(1)) == [3]
        with pytest.raises(DamagedQueue, match=r"\.buf"):
            reader.read_many(1)


# --- the writer's books ---------------------------------------------------------------------


def test_a_writer_s_books_add_up_when_some_writes_are_refused(queue_path: str) -> None:
    offered = 0
    with writer_of(queue_path, slots=10, size=200) as writer:
        for payload, type in ((b"a", 0), (bytes(500), 0), (b"b", 2**31), (b"c", 1)):
            offered += 1
            try:
                writer.write(payload, type)
            except (MessageTooLarge, InvalidOption):
                continue
        many = [b"d", b"e", bytes(500), b"f"]
        offered += len(many)
        with pytest.raises(MessageTooLarge):
            writer.write_many(many)
        books = writer.statistics()
        assert (books.messages, books.refused) == (4, 4)
        assert books.messages + books.refused == offered
        assert books.bytes == 4
        assert books.last_seq == 3
    assert list(read_all(queue_path).values()) == [b"a", b"c", b"d", b"e"]


def test_messages_before_an_error_of_the_caller_s_own_are_written(queue_path: str) -> None:
    def source() -> Iterator[bytes]:
        yield from numbered(0, 4)
        raise RuntimeError("the sensor is gone")

    with writer_of(queue_path, slots=10, size=500) as writer:
        with pytest.raises(RuntimeError, match="the sensor is gone"):
            writer.write_many(source())
        assert writer.statistics().messages == 5
    assert list(read_all(queue_path).values()) == numbered(0, 4)


def test_headers_that_have_no_place_are_counted(
    queue_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_of(queue_path, slots=10, size=500) as writer:
        writer.write(b"x", stream=StreamId.from_bytes(bytes(16)), attributes=b"header")
        writer.write(b"x", attributes=b"header")
        assert writer.statistics().headers_dropped == 3
    assert caplog.text.count("dropped") == 1


def test_what_was_closed_says_so(queue_path: str) -> None:
    writer = writer_of(queue_path, slots=10, size=500)
    reader = reader_of(queue_path)
    for endpoint in (writer, reader):
        endpoint.close()
        endpoint.close()
    with pytest.raises(Closed):
        writer.write(b"x")
    with pytest.raises(Closed):
        writer.write_many([b"x"])
    for action in (
        lambda: reader.read(timeout=0),
        lambda: reader.read_batch(1),
        lambda: reader.seek(Position.START),
        reader.seek_back,
        reader.newest_seq,
    ):
        with pytest.raises(Closed):
            action()
    assert reader.statistics().messages == 0


def test_a_reader_says_what_it_lost_in_the_log_and_not_too_often(
    queue_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_of(queue_path, slots=3, size=500) as writer, reader_of(queue_path) as reader:
        for _ in range(200):
            writer.write_many([b"x"] * 9)
            reader.read_many(9)
        assert reader.statistics().lost == 1200
    lost = [r for r in caplog.records if "lost" in r.message and r.levelno == logging.WARNING]
    assert 1 <= len(lost) < 10


def test_a_payload_can_be_anything_that_has_bytes(queue_path: str) -> None:
    numbers = np.arange(5, dtype="<i4")
    with writer_of(queue_path, slots=20, size=5000) as writer:
        for payload in (
            b"abc",
            bytearray(b"abc"),
            memoryview(numbers.tobytes()).cast("i"),
            numbers,
            np.zeros((2, 3)),
        ):
            writer.write(payload)  # type: ignore[arg-type]  # arrays work, and are not promised
        assert writer.statistics().bytes == 3 + 3 + 20 + 20 + 48
        for no_bytes in ("text", 5, [1], memoryview(b"abcd")[::2]):
            with pytest.raises((TypeError, BufferError)):
                writer.write(no_bytes)  # type: ignore[arg-type]
    sizes = [len(payload) for payload in read_all(queue_path).values()]
    assert sizes == [3, 3, 20, 20, 48]
