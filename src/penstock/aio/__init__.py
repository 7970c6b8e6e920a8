"""How are queues read and written by asyncio programs?

from penstock import aio

async with aio.open_reader("fmq:/tmp/radar/beams") as reader:
    async for message in reader:
        print(message.seq, message.payload)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.aio.reader import AsyncReader
from penstock.aio.writer import AsyncWriter
from penstock.core import endpoints
from penstock.core.position import Position

if TYPE_CHECKING:
    from penstock.core.position import PositionLike

__all__ = ["AsyncReader", "AsyncWriter", "open_reader", "open_writer"]


def open_reader(url: str, start: PositionLike = Position.START, **options: object) -> AsyncReader:
    """Open a stream for reading; takes and raises what `penstock.open_reader` does.

    It is opened in the caller's thread. If that may wait (`wait=true`), do not block the event
    loop: `await asyncio.to_thread(aio.open_reader, url)`.
    """
    return AsyncReader(endpoints.open_reader(url, start, **options))


def open_writer(url: str, **options: object) -> AsyncWriter:
    """Open a stream for writing; takes and raises what `penstock.open_writer` does.

    It is opened in the caller's thread, as in `open_reader`.
    """
    return AsyncWriter(endpoints.open_writer(url, **options))
