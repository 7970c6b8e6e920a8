"""A stream whose messages are made of those of a queue."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from penstock import open_reader, open_writer
from penstock.core import batch as batches
from penstock.core.derived_reader import DerivedReader
from penstock.core.overflow import DropReason
from support.interruption import Interrupted
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock import Message


class LoudReader(DerivedReader):
    """Delivers what is of type 2, in capitals; nothing can be made of an empty message."""

    def _made_of(self, message: Message) -> Message | None:
        if not message.payload:
            self._lose(message, DropReason.DAMAGED)
        elif message.type != 2:
            self._filtered += 1
        else:
            return message._replace(payload=message.payload.upper())
        return None


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"fmq:{tmp_path}/queue?layout=wide&size=1m"


@pytest.fixture
def reader(url: str) -> Iterator[LoudReader]:
    open_writer(url).close()
    with LoudReader("loud:", open_reader(url)) as reader:
        yield reader


def test_what_is_made_keeps_its_number_and_the_rest_is_counted(
    url: str, reader: LoudReader
) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"no", b"no"])
        writer.write(b"", 2)
        writer.write(b"yes", 2)
    assert [(m.seq, m.payload) for m in reader.available()] == [(3, b"YES")]
    books = reader.statistics()
    assert (books.messages, books.bytes, books.filtered, books.lost) == (1, 3, 2, 1)
    assert [(loss.first, loss.reason) for loss in books.losses] == [(2, DropReason.DAMAGED)]


@pytest.mark.parametrize(("pause", "count"), [(0.02, 1), (0.0, 1000)])
@pytest.mark.parametrize("timeout", [0, 0.3])
def test_a_read_ends_in_time_though_messages_that_it_passes_over_keep_coming(
    url: str, reader: LoudReader, timeout: float, pause: float, count: int
) -> None:
    is_over = threading.Event()

    def chatter() -> None:
        with open_writer(url) as writer:
            while not is_over.wait(pause):
                writer.write_many([b"no"] * count)

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        until(lambda: reader.newest_seq() is not None, 10)
        began = time.monotonic()
        assert reader.read(timeout) is None
        assert timeout <= time.monotonic() - began < 10
    finally:
        is_over.set()
        thread.join()


class InterruptedReader(LoudReader):
    """A signal comes before it makes the message with this number, once."""

    interrupted_at = -1

    def _made_of(self, message: Message) -> Message | None:
        if message.seq == self.interrupted_at:
            self.interrupted_at = -1
            raise Interrupted
        return super()._made_of(message)


@pytest.fixture
def interrupted(url: str) -> Iterator[InterruptedReader]:
    with open_writer(url) as writer:
        writer.write_many([b"yes", b"no", b""], 2)
        writer.write_many([b"no"] * 2)
        writer.write_many([b"yes"] * 5, 2)
    with InterruptedReader("loud:", open_reader(url, hold="h")) as reader:
        yield reader


def read_one(reader: InterruptedReader) -> list[int]:
    message = reader.read(0)
    return [] if message is None else [message.seq]


READS: dict[str, Callable[[InterruptedReader], list[int]]] = {
    "one": read_one,
    "many": lambda reader: [message.seq for message in reader.read_many(100)],
    "batch": lambda reader: reader.read_batch(100).column("seq").to_pylist(),
    "origins": lambda reader: reader.read_batch_with_origins(100).column("seq").to_pylist(),
    "available": lambda reader: [message.seq for message in reader.available()],
}


@pytest.mark.parametrize("by", READS)
def test_what_an_interrupted_read_took_of_the_queue_is_made_again_and_counted_once(
    interrupted: InterruptedReader, by: str
) -> None:
    interrupted.interrupted_at = 0 if by == "one" else 7
    found: list[int] = []
    with pytest.raises(Interrupted):
        found += READS[by](interrupted)
    assert interrupted.statistics().messages + interrupted.statistics().backlog >= 5
    while found_now := READS["one"](interrupted):
        found += found_now
    begins_at = 7 if by == "available" else 0
    assert found == [seq for seq in (0, 1, 5, 6, 7, 8, 9) if seq >= begins_at]
    books = interrupted.statistics()
    assert (books.messages, books.filtered, books.lost, books.backlog) == (7, 2, 1, 0)


@pytest.mark.parametrize("by", ["batch", "origins"])
def test_a_batch_that_a_signal_keeps_from_its_caller_comes_again(
    url: str, interrupted: InterruptedReader, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        interrupted.close()
        raise Interrupted

    name = "batch_from_messages" if by == "batch" else "with_origins"
    with monkeypatch.context() as patch:
        patch.setattr(batches, name, interrupt)
        with pytest.raises(Interrupted):
            READS[by](interrupted)
    assert interrupted.statistics()[:4] == (0, 0, 0, 0)
    with open_reader(url, hold="h") as queue:
        assert [message.seq for message in queue.read_many(100)] == [*range(10)]


def test_what_was_not_returned_is_not_acknowledged(
    url: str, interrupted: InterruptedReader
) -> None:
    interrupted.interrupted_at = 7
    with pytest.raises(Interrupted):
        interrupted.read_many(100)
    interrupted.acknowledge()
    interrupted.close()
    with open_reader(url, hold="h") as queue:
        assert [message.seq for message in queue.read_many(100)] == [*range(10)]


def test_an_exception_in_a_with_statement_acknowledges_nothing(
    url: str, interrupted: InterruptedReader
) -> None:
    assert len(interrupted.read_many(4)) == 2
    with suppress(Interrupted), interrupted:
        raise Interrupted
    with open_reader(url, hold="h") as queue:
        assert [message.seq for message in queue.read_many(100)] == [*range(10)]
