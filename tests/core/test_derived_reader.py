"""A stream whose messages are made of those of a queue."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock import open_reader, open_writer
from penstock.core.derived_reader import DerivedReader
from penstock.core.overflow import DropReason
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Iterator
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
