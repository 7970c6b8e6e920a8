"""The processes of a group, and of the writer of its stream, until they are killed.

`python -m support.group_lives` serves them (`support.lives`). Records of their reports:

    w   0, number, seq      a message of that number was appended
    m   pid, first, last    these messages were read, in one batch
    b   pid, first, last    they are about to be acknowledged
    a   pid, first, last    they were acknowledged
    e   0, 0, 0             it came to its end
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING

from penstock import open_reader, open_writer
from penstock.core.capabilities import Grouped
from penstock.core.errors import LeaseLost
from penstock.queue.groups.settled import runs_of
from support.lives import Reporter, serve

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["NUMBER"]

#: What each message is: its number, and some more.
NUMBER = struct.Struct("<Q")


def write(url: str, report: str, *, count: int, pause: float, at_once: int = 50) -> None:
    """Append messages up to a number, from where the last life left off."""
    books = Reporter(report)
    with open_writer(url) as stream:
        following = 0
        with open_reader(url.partition("?")[0], "last") as reader:
            if (last := reader.read(0)) is not None:
                following = NUMBER.unpack_from(last.payload)[0] + 1
        while following < count:
            end = min(count, following + at_once)
            numbers = range(following, end)
            seq = stream.write_many(NUMBER.pack(number) + bytes(number % 60) for number in numbers)
            books.add(b"w", 0, end - 1, seq or 0)
            time.sleep(pause)
            following = end


def work(url: str, report: str, *, at_once: int, seed: int) -> None:
    """Read and acknowledge until killed; sometimes only a part, or in another order."""
    books, chance, pid = Reporter(report), random.Random(seed), os.getpid()
    with open_reader(url, sync="none") as reader:
        assert isinstance(reader, Grouped)
        while True:
            messages = reader.read_many(chance.randrange(1, at_once + 1), timeout=60)
            runs = runs_of([message.seq for message in messages])
            books.add_all((b"m", pid, first, end - 1) for first, end in runs)
            for message in messages:
                assert len(message.payload) == 8 + NUMBER.unpack_from(message.payload)[0] % 60
            if chance.random() < 0.1:
                chance.shuffle(messages)
                back = [messages.pop() for _ in range(len(messages) // 3)]
                reader.nack(back, delay=chance.choice((0, 0, 0.02)))
            runs = runs_of([message.seq for message in messages])
            try:
                reader.ack(messages)
            except LeaseLost as error:
                lost = {seq for first, last in error.ranges for seq in range(first, last + 1)}
                runs = runs_of([m.seq for m in messages if m.seq not in lost])
            books.add_all((b"a", pid, first, end - 1) for first, end in runs)


def die_at_line(url: str, report: str, *, at: int) -> None:
    """Take, acknowledge and give back, and be killed at the n-th line of Python of a group."""
    books = Reporter(report)
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        del argument
        if "/queue/groups/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        with open_reader(url) as reader:
            assert isinstance(reader, Grouped)
            messages = reader.read_many(6)
            books.add(b"b", 0, 0, 3)
            reader.ack(messages[:4])
            books.add(b"a", 0, 0, 3)
            reader.nack(messages[4])
            reader.read_many(3)
    finally:
        sys.settrace(None)
    books.add(b"e", 0, 0, 0)


if __name__ == "__main__":
    serve(
        {"write": write, "work": work, "die_at_line": die_at_line},
        ["penstock.queue.log.endpoint", "penstock.queue.endpoint", "penstock.queue.groups.reader"],
    )
