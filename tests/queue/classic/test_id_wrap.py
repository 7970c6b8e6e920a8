"""Ids that begin again at 1e9, and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import Position, describe
from penstock.core.errors import PositionError
from penstock.queue.classic.layout import ID_COUNT
from support.queue_files import (
    QueueBytes,
    check_queue,
    numbered,
    reader_of,
    seqs,
    writer_of,
)

if TYPE_CHECKING:
    pass


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


def test_a_number_far_behind_is_a_loss_and_one_ahead_is_not_there_yet(queue_path: str) -> None:
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write_many(numbered(0, 2))
    QueueBytes.load(queue_path).renumbered(600_000_002).store(queue_path)
    with reader_of(queue_path) as reader:
        reader.seek(5)
        message = reader.read(timeout=0)
        assert message is not None
        assert message.seq == 600_000_000
        assert reader.statistics().lost == 600_000_000 - 5
        for not_there in (600_000_004, 900_000_000):
            with pytest.raises(PositionError, match="yet"):
                reader.seek(not_there)
