"""What writers and readers count and say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import InvalidOption, Position, StreamId
from penstock.core.batch import batch_from_messages
from penstock.core.errors import Closed, MessageTooLarge
from penstock.core.message import Message
from support.queue_files import (
    numbered,
    read_all,
    reader_of,
    writer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@pytest.mark.parametrize("by", ["many", "batch"])
@pytest.mark.parametrize("compression", ["off", "gzip"])
def test_all_that_is_behind_a_refused_message_of_a_large_call_counts_as_refused(
    queue_path: str, by: str, compression: str
) -> None:
    payloads = [*numbered(0, 1499), bytes(100_000), *numbered(1500, 4998)]
    messages = [Message(0, 0, 0, 0, 0, None, None, payload) for payload in payloads]
    with writer_of(queue_path, slots=5000, size=90_000, compress=compression) as writer:
        write = {
            "many": lambda: writer.write_many(payloads),
            "batch": lambda: writer.write_batch(batch_from_messages(messages)),
        }
        with pytest.raises(MessageTooLarge):
            write[by]()
        books = writer.statistics()
        assert (books.messages, books.refused, books.last_seq) == (1500, 3500, 1499)


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
    assert "1,200 in all" in lost[-1].message


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
