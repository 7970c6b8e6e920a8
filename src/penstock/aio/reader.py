"""How does an asyncio task read a stream, without losing messages on cancellation?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.aio.watcher import Source, Wait, watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sized
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.capabilities import Delivered
    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics

__all__ = ["AsyncReader"]

#: A task that always finds messages lets the others run at least this often (seconds).
_LONGEST_RUN = 0.005

_Taken = TypeVar("_Taken", bound="Sized")


class AsyncReader:
    """Reads the messages of one stream in order, in any number of tasks of one event loop.

    It owns the given reader. No message is lost when a read is cancelled or times out: the next
    read returns it. Concurrent reads share the messages, each message to one task.

    With `hold=NAME`, the next read or closing acknowledges the messages of a read; an `async with`
    that ends by an exception does not.
    """

    def __init__(self, reader: Reader) -> None:
        #: The URL it was opened by.
        self.url = reader.url
        self._source = Source(reader)
        self._turn = asyncio.Lock()
        self._let_run = 0.0

    async def read(self, timeout: float | None = None) -> Message | None:  # noqa: ASYNC109
        """Return the next message, or None after `timeout` seconds.

        A `timeout` of None waits for ever, 0 not at all.

        :raises DamagedQueue: the stored data is not readable.
        :raises Closed: the reader was closed, before or during the wait.
        """
        messages = await self._read(1, timeout, self._source.take_many)
        return messages[0] if messages else None

    async def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:  # noqa: ASYNC109
        """Return up to `n` messages; wait for the first of them, and raise, as `read` does."""
        return await self._read(n, timeout, self._source.take_many)

    async def read_batch(self, n: int, timeout: float | None = 0) -> Batch:  # noqa: ASYNC109
        """Return up to `n` messages as one Arrow batch; wait and raise as `read` does."""
        return await self._read(n, timeout, self._source.take_batch)

    def __aiter__(self) -> Self:
        """Follow the stream for ever."""
        return self

    async def __anext__(self) -> Message:
        message = await self.read()
        assert message is not None  # without a timeout it is never None
        return message

    async def ack(self, messages: Delivered) -> None:
        """Settle messages leased to this reader of a group; see `Grouped.ack`."""
        await asyncio.to_thread(self._source.settle, lambda reader: reader.ack(messages))

    async def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        """Return messages to the group; see `Grouped.nack`."""
        await asyncio.to_thread(self._source.settle, lambda reader: reader.nack(messages, delay))

    async def seek(self, position: PositionLike) -> None:
        """Move to a position, also while a task waits: the next message comes from there.

        :raises PositionError: there is no such position; the reader does not move.
        :raises Closed: the reader was closed.
        """
        self._source.seek(position)
        watcher.look_again()

    def statistics(self) -> ReaderStatistics:
        """Return the counters of delivered, filtered and lost messages."""
        return self._source.statistics()

    async def aclose(self) -> None:
        """Release all resources; waiting tasks get `Closed`. Idempotent."""
        self._close()

    def _close(self, failure: BaseException | None = None) -> None:
        self._source.close(failure)
        watcher.look_again()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    async def _read(
        self,
        n: int,
        timeout: float | None,  # noqa: ASYNC109
        take: Callable[[int], _Taken],
    ) -> _Taken:
        await self._let_others_run()
        can_wait = n > 0 and (timeout is None or timeout > 0)
        if not can_wait or not self._turn.locked():  # reads that may wait are served in order
            taken = take(n)
            if len(taken) or not can_wait:
                return taken
        try:
            async with asyncio.timeout(timeout) as limit, self._turn:
                # Check again after waiting: a seek may have discarded the messages.
                while not len(taken := take(n)):
                    await self._wait(n)
                return taken
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the reader
            return take(n)

    async def _let_others_run(self) -> None:
        # Before a message is taken: a cancellation here loses nothing.
        clock = asyncio.get_running_loop().time
        if clock() - self._let_run > _LONGEST_RUN:
            await asyncio.sleep(0)
            self._let_run = clock()

    async def _wait(self, limit: int) -> None:
        """Wait until the watcher has found a message or an error."""
        wait = Wait(self._source, limit)
        watcher.add(wait)
        try:
            await wait.over
        finally:
            watcher.remove(wait)
