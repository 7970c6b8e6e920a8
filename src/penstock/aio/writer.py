"""How does an asyncio task write to a stream that may make it wait?"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.aio.watcher import call_in
from penstock.core.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.statistics import WriterStatistics
    from penstock.core.stream_id import StreamId

__all__ = ["AsyncWriter"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class AsyncWriter:
    """Appends messages to one stream, in the order of the calls, from any number of tasks.

    It owns the given writer. A write may wait for a lock or for room, so it runs in a thread, at
    most one per writer.

    A started write cannot be cancelled. When its task is cancelled, the write continues, is
    counted, and keeps its place before later ones; if it then fails, the failure is counted as
    refused and logged. So `asyncio.timeout` limits how long a task waits, not whether the message
    is written: use the `timeout` of a blocking queue for that.

    A file whose `async with` ends by an exception is not finished, and nothing is left of it.
    """

    def __init__(self, writer: Writer) -> None:
        #: The URL it was opened by.
        self.url = writer.url
        self._writer = writer
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-aio-writer")
        self._books = writer.statistics()
        self._closing: Future[None] | None = None

    async def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        """Append one message and return its sequence number; see `Writer.write`.

        :raises MessageTooLarge: it can never fit; nothing was changed.
        :raises WriteTimeout: the queue stayed full for the timeout.
        :raises LockTimeout: another writer held the lock for the timeout.
        :raises Closed: the writer was closed.
        """
        return await self._run(
            lambda: self._writer.write(
                payload, type, subtype, time_ns, created_ns, stream, attributes
            )
        )

    async def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        """Append many messages of one kind; return the last one's number (None if none).

        Raises as `write` does; messages before the failed one are written.
        """
        all_payloads = tuple(payloads)  # here: the caller's iterable runs in the caller's thread
        return await self._run(lambda: self._writer.write_many(all_payloads, type, subtype))

    async def write_batch(self, batch: Batch) -> int | None:
        """Append the messages of a batch; return the last one's number (None if none).

        :raises Malformed: the batch does not have the columns of a batch.
        """
        return await self._run(lambda: self._writer.write_batch(batch))

    async def flush(self) -> None:
        """Flush everything written so far."""
        await self._run(self._writer.flush)

    def statistics(self) -> WriterStatistics:
        """Return the counters of written and refused messages, as of the last finished call."""
        return self._books

    async def aclose(self) -> None:
        """Finish the started writes, then release all resources. Idempotent."""
        await self._close()

    async def _close(self, failure: BaseException | None = None) -> None:
        if self._closing is None:
            kind = None if failure is None else type(failure)
            self._closing = self._worker.submit(
                self._do, lambda: self._writer.__exit__(kind, failure, None)
            )
            self._worker.shutdown(wait=False)
        await _outcome(self._closing, self.url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    async def _run(self, call: Callable[[], _T]) -> _T:
        if self._closing is not None:
            raise Closed(f"{self.url} was closed")
        return await _outcome(self._worker.submit(self._do, call), self.url)

    def _do(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        finally:
            # In this thread: a writer is not thread-safe.
            self._books = self._writer.statistics()


async def _outcome(job: Future[_T], url: str) -> _T:
    """Wait for a job, which continues if the waiting task is cancelled."""
    loop = asyncio.get_running_loop()
    finished = loop.create_future()

    def wake() -> None:
        if not finished.done():
            finished.set_result(None)

    job.add_done_callback(lambda _: call_in(loop, wake))
    try:
        await finished
    except asyncio.CancelledError:
        job.add_done_callback(lambda _: _log_failure(job, url))
        raise
    return job.result()


def _log_failure(job: Future[_T], url: str) -> None:
    if (error := job.exception()) is not None:
        log.warning("%s: failed after its task was cancelled: %s", url, error)
