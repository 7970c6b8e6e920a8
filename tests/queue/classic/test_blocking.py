"""A writer that waits for its reader."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from penstock import (
    InvalidOption,
    WriteTimeout,
)
from penstock.queue.classic import writer as writer_module
from penstock.queue.classic.slots import read_status
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
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status


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
