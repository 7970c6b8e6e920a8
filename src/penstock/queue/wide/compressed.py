"""How are payloads compressed and expanded on their way through a wide queue?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import InPlaceReader, InPlaceWriter
from penstock.core.errors import DamagedQueue, PenstockError, Unsupported
from penstock.core.interfaces import BytesLike, Writer
from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId
    from penstock.queue.wide.reservation import Reservation

__all__ = ["CompressedReader", "CompressingWriter"]


class CompressedReader(WideReader):
    """Reads a queue whose payloads are compressed."""

    lacks = (InPlaceReader,)

    def read(self, timeout: float | None = None) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := super().read(timeout)) is not None:
            if whole := self._expanded([message]):
                return whole[0]
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        return None

    def _take(self, limit: int) -> list[Message]:
        whole: list[Message] = []
        row, end = self._entry, self._head
        try:
            while True:
                try:
                    messages = super()._take(limit - len(whole))
                except DamagedQueue:
                    if not whole:
                        raise
                    break  # it is for the next call, which meets it again
                whole += self._expanded(messages)
                if not messages or (whole and self._next <= messages[-1].seq):
                    break  # nothing more, or a damaged one, which is for the next call
                if len(whole) >= limit or self._next >= end:
                    break  # a filter may pass over for ever
                if whole:
                    self._entry = -1  # nothing is acknowledged before these are handed out
        finally:
            self._entry = row
        return whole

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        return batch_from_messages(self.read_many(n, timeout))

    def _expanded(self, messages: list[Message]) -> list[Message]:
        """Return the messages with their payloads as they were written, up to a damaged one.

        The damaged one is met again by the next call, and then stepped over or raised.
        """
        decompress, limit = self._file.compression.decompress, self._file.geometry.buffer_size
        wanted = self._options.type
        whole: list[Message] = []
        for i, message in enumerate(messages):
            self._messages -= 1
            self._bytes -= len(message.payload)
            if wanted is not None and message.type != wanted:
                self._filtered += 1
                continue
            try:
                payload = decompress(message.payload, limit)
            except ValueError as error:
                rest = messages[i + 1 :]
                self._messages -= len(rest)
                self._bytes -= sum(len(m.payload) for m in rest)
                self._next = message.seq
                if not whole:
                    self._damaged(message.seq, f"payload ({error})")
                break
            self._messages += 1
            self._bytes += len(payload)
            whole.append(message._replace(payload=payload))
        return whole

    def _wanted_type(self) -> None:
        # Here, because what comes behind a damaged message is met again, and counted once.
        return None

    def view(self, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        raise self._no_views()

    def view_batch(self, n: int, timeout: float | None = 0) -> NoReturn:  # noqa: ARG002
        raise self._no_views()

    def _no_views(self) -> Unsupported:
        return Unsupported(f"{self.url} is compressed: its messages cannot be used in place")


class CompressingWriter(WideWriter):
    """Appends to a queue whose payloads are compressed."""

    lacks = (InPlaceWriter,)

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        try:
            small = self._compressed(payload)
        except BaseException:
            self._refused += 1
            raise
        seq = super().write(small, type, subtype, time_ns, created_ns, stream, attributes)
        self._bytes += memoryview(payload).nbytes - len(small)
        return seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        offered = list(payloads)
        small: list[bytes] = []
        failure: Exception | None = None
        for payload in offered:
            try:
                small.append(self._compressed(payload))
            except (PenstockError, TypeError) as error:  # those before it are written
                failure = error
                self._refused += len(offered) - len(small)
                break
        written = self._messages
        try:
            last = super().write_many(small, type, subtype)
        finally:
            done = self._messages - written
            self._bytes += sum(memoryview(payload).nbytes for payload in offered[:done])
            self._bytes -= sum(map(len, small[:done]))
        if failure is not None:
            raise failure
        return last

    def write_batch(self, batch: Batch) -> int | None:
        return Writer.write_batch(self, batch)

    def reserve(self, size: int, *_: object, **__: object) -> Reservation:
        raise Unsupported(
            f"{self.url} is compressed: {size} bytes of it cannot be used in place",
            hint="use write()",
        )

    def _compressed(self, payload: BytesLike) -> bytes:
        size, limit = memoryview(payload).nbytes, self._file.geometry.buffer_size
        if size > limit:  # so that a reader can tell a length that cannot be true
            raise self._too_large(size)
        return self._file.compression.compress(payload)
