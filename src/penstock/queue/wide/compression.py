"""How are payloads compressed and expanded on their way through a wide queue?"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Final, NoReturn, cast

from penstock.core.capabilities import InPlaceReader, InPlaceWriter
from penstock.core.errors import PenstockError, Unsupported
from penstock.core.message import CopiedMessage
from penstock.queue.wide.layout import Compression
from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId
    from penstock.queue.wide._ring import Buffer
    from penstock.queue.wide.writer import Reservation

__all__ = ["CompressedReader", "CompressingWriter", "DamagedPayload", "compress", "decompress"]

#: The length of the payload, before the compressed bytes.
_LENGTH: Final = struct.Struct("<Q")


class CompressedReader(WideReader):
    """Reads a queue whose payloads are compressed."""

    lacks = (InPlaceReader,)

    def read(self, timeout: float | None = None) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._has_taken = False
        self._is_in_call = True
        try:
            try:
                while (message := super().read(timeout)) is not None:
                    if whole := self._expanded([message]):
                        return whole[0]
                    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            finally:
                self._is_in_call = False
        except BaseException:
            self._put_back()
            raise
        return None

    def _take(self, limit: int) -> list[Message]:
        self._has_taken = False
        outer, self._is_in_call = self._is_in_call, True  # a log takes from several segments
        try:
            try:
                messages = self._collect(limit)
                if not messages:  # all were filtered out; a wait may switch to a new queue
                    self._has_taken = False
                return messages
            finally:
                self._is_in_call = outer
        except BaseException:
            self._put_back()
            raise

    def _take_more(self, limit: int) -> list[Message]:
        return self._collect(limit, is_more=True)

    def _collect(self, limit: int, *, is_more: bool = False) -> list[Message]:
        """Return up to `limit` available messages, with no loss or damage between them.

        :param is_more: the call has others already.
        """
        whole: list[Message] = []
        file, end = self._file, self._head
        while True:
            is_more = is_more or bool(whole)
            # More: acknowledge nothing before these are returned.
            take = super()._take_more if is_more else super()._take
            before = self._next, self._messages, self._bytes, self._filtered
            try:
                messages = take(limit - len(whole))
                if self._file is not file:  # it has gone over to another segment, or a new queue
                    file, end = self._file, self._head
                whole += self._expanded(messages, is_more=is_more)
            except (PenstockError, MemoryError):  # not what a signal handler raises
                if not is_more:
                    raise
                self._next, self._messages, self._bytes, self._filtered = before
                break  # it is for the next call, which meets it again
            if not messages or (is_more and self._next <= messages[-1].seq):
                break  # nothing more, or a damaged one, which is for the next call
            if len(whole) >= limit or self._next >= end:
                break  # a filter may pass over for ever
        return whole

    def _collect_columns(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        return self._read_converted(n, timeout, origins=origins)

    def _expanded(self, messages: list[Message], *, is_more: bool = False) -> list[Message]:
        """Return the messages with decompressed payloads, up to one that cannot be decompressed.

        The next call reads that one again. If it is the first, it is skipped as damaged, or raises;
        with `is_more` the next call does that, too.
        """
        kind, limit = self._file.compression, self._file.geometry.buffer_size
        wanted = self._options.type
        whole: list[Message] = []
        failure: DamagedPayload | MemoryError | None = None
        filtered, behind = 0, self._next
        for message in messages:
            if wanted is not None and message.type != wanted:
                filtered += 1
                continue
            try:
                payload = decompress(kind, message.payload, limit)
            except (DamagedPayload, MemoryError) as error:  # raised below
                failure, behind = error, message.seq
                break
            whole.append(message._replace(payload=payload))
        size = sum(len(m.payload) for m in whole) - sum(len(m.payload) for m in messages)
        count = len(whole) - len(messages)
        self._next = behind
        self._messages += count
        self._bytes += size
        self._filtered += filtered
        if failure is None or whole or is_more:
            return whole
        self._has_taken = False
        if not isinstance(failure, DamagedPayload):
            raise failure
        self._damaged(self._next, f"payload ({failure})")
        return whole

    def _wanted_type(self) -> None:
        # `_expanded` filters: messages after a damaged one are read again, but count once.
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
        origin_ns: int | None = None,
    ) -> int:
        try:
            small = self._compressed(payload)
        except BaseException:
            self._refused += 1
            raise
        header = type, subtype, time_ns, created_ns, stream, attributes, origin_ns
        seq = super().write(small, *header)
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

    def write_split(
        self, data: bytes, ending: bytes, type: int = 0, subtype: int = 0
    ) -> int | None:
        return self.write_many(data.split(ending), type, subtype)

    def write_parts(self, data: BytesLike, places: Buffer) -> int | None:
        whole = memoryview(data)
        pairs = struct.iter_unpack("=qq", cast("BytesLike", places))  # also an array
        return self.write_many([whole[start:end] for start, end in pairs])

    def write_batch(self, batch: Batch) -> int | None:
        from penstock.core.batch import messages_from_batch  # noqa: PLC0415 - loads Arrow

        last, messages = None, messages_from_batch(batch)
        before = self._messages + self._refused
        try:
            for m in messages:
                origin_ns = m.origin_ns if isinstance(m, CopiedMessage) else None
                header = m.type, m.subtype, m.time_ns, None, m.stream, m.attributes
                last = self.write(m.payload, *header, origin_ns)
        finally:  # those behind an error
            self._refused += batch.num_rows - (self._messages + self._refused - before)
        return last

    def reserve(self, size: int, *_: object, **__: object) -> Reservation:
        raise Unsupported(
            f"{self.url} is compressed: {size} bytes of it cannot be used in place",
            hint="use write()",
        )

    def _compressed(self, payload: BytesLike) -> bytes:
        size, limit = memoryview(payload).nbytes, self._file.geometry.buffer_size
        if size > limit:  # so that a reader can detect an invalid length
            raise self._too_large(size)
        return compress(self._file.compression, payload)


# --- one payload ----------------------------------------------------------------------------------


class DamagedPayload(ValueError):
    """A payload cannot be decompressed. Its own type, as a signal handler may raise any other."""


def compress(kind: Compression, payload: BytesLike) -> bytes:
    """Compress a payload, preceded by its length."""
    import pyarrow as pa  # noqa: PLC0415 - only for compressed queues

    codec = pa.Codec(kind.value)
    small: bytes = codec.compress(payload, asbytes=True)
    return _LENGTH.pack(memoryview(payload).nbytes) + small


def decompress(kind: Compression, stored: bytes, limit: int) -> bytes:
    """Decompress a stored payload of up to `limit` bytes.

    :raises DamagedPayload: the bytes are damaged, or the payload is too long.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    if len(stored) < _LENGTH.size:
        raise DamagedPayload("it is too short to be compressed")
    (length,) = _LENGTH.unpack_from(stored)
    if length > limit:
        raise DamagedPayload(f"it says that it has {length} bytes")
    if length == 0:
        return b""
    try:
        payload = _expand(kind, memoryview(stored)[_LENGTH.size :], length)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, MemoryError):
            raise  # Arrow's own is both
        if isinstance(error, OSError) and type(error) is not OSError:
            raise  # as TimeoutError: of a signal handler, as the library raises the plain one
        raise DamagedPayload(str(error)) from error
    if len(payload) != length:
        raise DamagedPayload(f"it has {len(payload)} bytes, and says {length}")
    return payload


def _expand(kind: Compression, small: memoryview, length: int) -> bytes:
    import pyarrow as pa  # noqa: PLC0415 - as above

    if kind is Compression.ZSTD:
        whole: bytes = pa.Codec(kind.value).decompress(small, length, asbytes=True)
        return whole
    # The lz4 codec pads its output to a wrong, larger length; a stream does not.
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(small)), kind.value) as stream:
        return bytes(stream.read(length + 1))
