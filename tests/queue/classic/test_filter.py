"""A reader that wants one type of message only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.queue_files import (
    reader_of,
    seqs,
    writer_of,
)

if TYPE_CHECKING:
    pass


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
