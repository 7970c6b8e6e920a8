"""What do tests of readers that are waited for write and read?"""

from __future__ import annotations

from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

__all__ = ["fill", "taken"]


def fill(writer: WideWriter, count: int = 4) -> None:
    for _ in range(count):
        writer.write(b"before")


def taken(reader: WideReader) -> list[int]:
    """Return the numbers of all messages that are there."""
    return [message.seq for message in reader.read_many(100)]
