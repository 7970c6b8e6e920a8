"""The processes that write to and read from a wide queue until they are killed.

`python -m support.wide_lives` serves them (`support.lives`). Records of their reports, each with
who, first and last:

    w   writer, number, seq     a message was written
    m   writer, number, seq     a message was delivered, whole
    l   0, first, last          these were lost, as the reader was told
    s   0, type, seq            a message came to a follower; then t: 0, nanoseconds, seq
    r   0, 0, 0                 it is open
    p   0, pid, 0               a child was forked
    e   0, messages, lost       the books at the end
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time

from penstock import open_reader, open_writer
from support import self_describing
from support.lives import Reporter, serve
from support.peer import LAST_TYPE
from support.wide_opening import wide_writer

__all__ = ["LAST_TYPE"]


def follow(url: str, report: str) -> None:
    """Wait for messages and tell when they came, until one of LAST_TYPE."""
    books = Reporter(report)
    with open_reader(url, start="end") as reader:
        books.add(b"r", 0, 0, 0)
        ended = False
        while not ended:
            message = reader.read(timeout=60)
            assert message is not None, "no message came for 60 s"
            ended = message.type == LAST_TYPE
            books.add_all(
                [
                    (b"t", 0, time.monotonic_ns(), message.seq),
                    (b"s", 0, message.type, message.seq),
                ]
            )
        statistics = reader.statistics()
        books.add(b"e", 0, statistics.messages, statistics.lost)


def produce(
    url: str,
    report: str,
    writer: int,
    *,
    batch: int = 1,
    smallest: int = 0,
    largest: int = 1000,
    count: int = -1,
    pause: float = 0.0,
) -> None:
    """Write numbered messages, in batches of up to so many; report each when it is written."""
    books = Reporter(report)
    chance = random.Random(writer)
    maker = self_describing.Maker(writer, smallest, largest)
    number = 0
    with open_writer(url) as queue:
        books.add(b"r", 0, 0, 0)
        while number != count:
            size = chance.randint(1, batch)
            if count >= 0:
                size = min(size, count - number)
            payloads = [maker.make(number + i) for i in range(size)]
            last = queue.write(payloads[0]) if size == 1 else queue.write_many(payloads)
            assert last is not None
            books.add_all((b"w", writer, number + i, last - size + 1 + i) for i in range(size))
            number += size
            if pause:
                time.sleep(pause)
        statistics = queue.statistics()
        books.add(b"e", 0, statistics.messages, statistics.refused)


def consume(url: str, report: str, *, at_once: int = 20, pause: float = 0.0) -> None:
    """Read and check messages, and report them, until one of LAST_TYPE."""
    books = Reporter(report)
    known = -1
    ended = False
    with open_reader(url) as queue:
        books.add(b"r", 0, 0, 0)
        while not ended:
            messages = queue.read_many(at_once, timeout=60)
            assert messages, "no message came for 60 s"
            ended = messages[-1].type == LAST_TYPE
            records = []
            for message in messages:
                if message.type == LAST_TYPE:
                    continue
                content = self_describing.check(message.payload)
                records.append((b"m", content.writer, content.number, message.seq))
            for loss in reversed(queue.statistics().losses):
                if loss.last <= known:
                    break
                # The ledger lengthens its latest range when the next loss follows on it.
                records.append((b"l", 0, max(loss.first, known + 1), loss.last))
            known = max([known, *(last for kind, _, _, last in records if kind == b"l")])
            books.add_all(records)
            if pause:
                time.sleep(pause)
        statistics = queue.statistics()
        books.add(b"e", 0, statistics.messages, statistics.lost)


def open_and_wait(url: str, report: str) -> None:
    """Open a reader, and wait to be killed."""
    with open_reader(url):
        Reporter(report).add(b"r", 0, 0, 0)
        time.sleep(120)


def reserve_and_wait(url: str, report: str) -> None:
    """Have half a message in a queue, and wait to be killed."""
    with wide_writer(url) as writer:
        place = writer.reserve(1000)
        place.buffer[:500] = b"?" * 500
        Reporter(report).add(b"r", 0, 0, 0)
        time.sleep(120)


def create_again_and_again(url: str, report: str) -> None:
    """Make a queue in place of the one before, until killed."""
    Reporter(report).add(b"r", 0, 0, 0)
    while True:
        wide_writer(f"{url}?create=always&slots=16&size=65536").close()


def open_and_fork(url: str, report: str, *, role: str, how: str) -> None:
    """Open a writer or a reader, fork a child that stays, and wait to be killed."""
    books = Reporter(report)
    queue = open_writer(url) if role == "writer" else open_reader(url)
    if how == "os.fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
            os._exit(0)
    else:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(120,))
        child.start()
        assert child.pid is not None
        pid = child.pid
    books.add(b"p", 0, pid, 0)
    time.sleep(120)
    queue.close()


if __name__ == "__main__":
    operations = (
        follow,
        produce,
        consume,
        open_and_wait,
        reserve_and_wait,
        create_again_and_again,
        open_and_fork,
    )
    serve({operation.__name__: operation for operation in operations}, ["penstock.queue.endpoint"])
