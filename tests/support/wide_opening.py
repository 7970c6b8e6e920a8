"""How does a test open a wide queue with all that such a queue can do, for the type checker?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import open_reader, open_writer
from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    from penstock.core.position import PositionLike

__all__ = ["wide_reader", "wide_writer"]


def wide_reader(url: str, start: PositionLike = "start") -> WideReader:
    reader = open_reader(url, start=start)
    assert isinstance(reader, WideReader)
    return reader


def wide_writer(url: str) -> WideWriter:
    writer = open_writer(url)
    assert isinstance(writer, WideWriter)
    return writer
