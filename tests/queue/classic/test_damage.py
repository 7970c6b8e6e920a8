"""A damaged queue, as a reader meets it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import DamagedQueue
from penstock.core.overflow import DropReason
from support.queue_files import (
    QueueBytes,
    numbered,
    reader_of,
    seqs,
    writer_of,
)

if TYPE_CHECKING:
    pass


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
