"""The processes that create and use streams until they are killed.

`python -m support.stream_lives` serves them (`support.lives`). Records of their reports, each with
who, first and last:

    w   producer, number, seq   a message was written
    m   producer, number, seq   a message was delivered, whole
    r   pid, 0, 0               it is open
    o   who, 0, 0               it was the owner, alone
    e   0, messages, lost       the books at the end
"""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

from penstock.core.interfaces import Reader, Writer
from penstock.core.stream_id import StreamId
from penstock.queue.ownership import AlreadyOwned, Ownership
from penstock.queue.streams import InputStream, OutputStream
from support import self_describing
from support.lives import Reporter, serve
from support.peer import LAST_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LAST_TYPE"]

_LARGEST = 2000


def until_orphaned() -> Iterator[int]:
    """Count for as long as the server lives: none of its processes must outlive a test."""
    server = os.getppid()
    return itertools.takewhile(lambda _: os.getppid() == server, itertools.count())


def create_and_write(
    stream: str, directory: str, report: str, *, owner: str, producer: int = 0, count: int = -1
) -> None:
    """Create an output stream and write to it; -1: until killed."""
    with OutputStream.create(StreamId.parse(stream), owner=owner, directory=directory) as output:
        _write(output, report, producer, count, pause=0.001 if count < 0 else 0)


def open_and_write(
    stream: str, directory: str, report: str, *, producer: int, count: int = -1
) -> None:
    """Write to an input stream; -1: until killed."""
    with InputStream.open(StreamId.parse(stream), directory=directory, timeout=60) as writer:
        _write(writer, report, producer, count)


def _write(writer: Writer, report: str, producer: int, count: int, pause: float = 0) -> None:
    books = Reporter(report)
    maker = self_describing.Maker(producer, 0, _LARGEST)
    books.add(b"r", os.getpid(), 0, 0)
    for number in range(count) if count >= 0 else until_orphaned():
        books.add(b"w", producer, number, writer.write(maker.make(number)))
        if pause:
            time.sleep(pause)
    if count >= 0:
        writer.write(b"", LAST_TYPE)


def create_and_read(
    stream: str, directory: str, report: str, *, owner: str, pause: float = 0
) -> None:
    """Create an input stream and read it until a message of LAST_TYPE."""
    chosen = StreamId.parse(stream)
    with InputStream.create(chosen, owner=owner, directory=directory, slots=64, size="64k") as it:
        _read(it, report, chosen, pause)


def open_and_read(stream: str, directory: str, report: str) -> None:
    """Read an output stream, which may not exist yet, until a message of LAST_TYPE."""
    chosen = StreamId.parse(stream)
    with OutputStream.open(chosen, directory=directory, wait=30) as reader:
        _read(reader, report, chosen)


def _read(reader: Reader, report: str, stream: StreamId, pause: float = 0) -> None:
    books = Reporter(report)
    books.add(b"r", os.getpid(), 0, 0)
    while True:
        message = reader.read(timeout=60)
        assert message is not None, "no message came for 60 s"
        assert message.stream == stream
        if message.type == LAST_TYPE:
            break
        content = self_describing.check(message.payload)
        books.add(b"m", content.writer, content.number, message.seq)
        if pause:
            time.sleep(pause)
    statistics = reader.statistics()
    books.add(b"e", 0, statistics.messages, statistics.lost)


def come_and_go(stream: str, directory: str, *, kind: str) -> None:
    """Create and close a stream, again and again, until killed."""
    creator = OutputStream if kind == "output" else InputStream
    for number in until_orphaned():
        made = creator.create(StreamId.parse(stream), owner="restless", directory=directory)
        if number % 3:
            made.close()
        else:
            made.remove()


def contend(path: str, mark: str, report: str, *, who: int) -> None:
    """Become the owner, again and again, and make sure to be the only one, until killed."""
    books = Reporter(report)
    me = b"%20d" % os.getpid()
    # No lock: the kernel may let go of the locks of a killed process in any order.
    shared = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in until_orphaned():
        try:
            ownership = Ownership.claim(path, f"contender {who}", "the thing")
        except AlreadyOwned as refusal:
            if not refusal.owner.startswith("contender"):
                raise
            time.sleep(0.000_5)
            continue
        os.pwrite(shared, me, 0)
        time.sleep(0.000_1)
        assert os.pread(shared, len(me), 0) == me, "there is another owner"
        books.add(b"o", who, 0, 0)
        ownership.release(remove=who % 2 == 0)


if __name__ == "__main__":
    serve(
        {
            operation.__name__: operation
            for operation in (
                create_and_write,
                open_and_write,
                create_and_read,
                open_and_read,
                come_and_go,
                contend,
            )
        },
        [],
    )
