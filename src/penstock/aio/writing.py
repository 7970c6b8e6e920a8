"""How does an asyncio task write to a stream that may make it wait?"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.aio.watching import call_in
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

    The writer given is its own from then on. A write may wait for a lock or for room, so it runs
    in a thread, one for each writer at most.

    A write that was begun cannot be taken back. When its task is cancelled, the write goes on, is
    counted, and keeps its place before later ones; if it fails then, the failure is counted as
    refused and logged. So `asyncio.timeout` limits how long a task waits, not whether the message
    is written: that is what the `timeout` of a blocking queue is for.
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

        :raises MessageTooLarge: it can never fit; nothing was touched.
        :raises WriteTimeout: the queue stayed full for the time allowed.
        :raises LockTimeout: another writer held the queue for the time allowed.
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

        Raises as `write` does; those before the one that failed are written.
        """
        all_payloads = tuple(payloads)  # here: an iterable of the caller's runs in its own thread
        return await self._run(lambda: self._writer.write_many(all_payloads, type, subtype))

    async def write_batch(self, batch: Batch) -> int | None:
        """Append the messages of a batch; return the last one's number (None if none).

        :raises Malformed: the batch does not have the columns of a batch.
        """
        return await self._run(lambda: self._writer.write_batch(batch))

    async def flush(self) -> None:
        """Hand over everything written so far."""
        await self._run(self._writer.flush)

    def statistics(self) -> WriterStatistics:
        """Return what was written and refused, as of the last call that finished."""
        return self._books

    async def aclose(self) -> None:
        """Finish the writes begun, then give everything back. Closing twice is fine."""
        if self._closing is None:
            self._closing = self._worker.submit(self._do, self._writer.close)
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
        await self.aclose()

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
            # By this thread: a writer is not safe to share.
            self._books = self._writer.statistics()


async def _outcome(job: Future[_T], url: str) -> _T:
    """Wait for what a worker does, which goes on when the task that waits is cancelled."""
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
