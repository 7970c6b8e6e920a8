"""What can every reader and every writer do?"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

from penstock.core.errors import Closed, Unsupported
from penstock.core.statistics import WriterStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics
    from penstock.core.stream_id import StreamId

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "LONGEST_SLEEP",
    "UNKNOWN_END",
    "Ancestor",
    "BookedWriter",
    "Bounds",
    "BytesLike",
    "Closable",
    "Concluding",
    "Reader",
    "StreamInfo",
    "WaitGroup",
    "Writer",
    "between_looks",
]

T = TypeVar("T")


class Closable(ABC):
    """An object that a `with` statement closes."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Concluding(Closable):
    """An object whose `close` acknowledges its work, except after an exception in a `with`.

    Work in progress at an exception is not acknowledged, and is redelivered.
    """

    __slots__ = ()

    @abstractmethod
    def _close(self, *, finished: bool) -> None:
        """Release all resources; acknowledge the work if `finished`. Idempotent."""

    def close(self) -> None:
        """Acknowledge everything so far, and release all resources. Idempotent."""
        self._close(finished=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(finished=kind is None)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A snapshot of a stream: its layout, content and fill level."""

    url: str
    #: `classic`, `wide`, …
    layout: str
    #: Where the bytes are: `files`, `shared memory`, …
    storage: str
    slots: int
    buffer_size: int
    #: None when the stream is empty.
    oldest_seq: int | None
    youngest_seq: int | None
    count: int
    #: Bytes that the messages occupy, framing included.
    bytes: int
    #: The range of the times at which they were appended.
    oldest_time_ns: int | None
    youngest_time_ns: int | None
    #: The fuller of slots and buffer, 0 to 1.
    fill: float
    #: True when the writer waits for its reader, or would for those that its own `hold` names.
    blocking: bool
    #: What only this kind of stream has.
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


#: Types accepted as a payload.
BytesLike: TypeAlias = bytes | bytearray | memoryview

#: Polling starts with this pause (seconds) and doubles it, up to the second value, while the
#: stream is idle. At 5 ms an idle follower costs a fraction of a percent of a core.
FIRST_PAUSE = 0.000_05
LONGEST_PAUSE = 0.005

#: A sleeping reader polls this often (seconds) all the same: a killed writer wakes no reader.
LONGEST_SLEEP = 1.0


def between_looks(readers: int) -> float:
    """Return the seconds between two idle checks of `readers` idle readers.

    See `Reader._idle`. Very many readers are checked less often, to limit the cost.
    """
    return max(LONGEST_SLEEP, readers * 0.004)


class Ancestor(NamedTuple):
    """An earlier epoch that a stream continues, and the number at which a power failure cut it."""

    epoch: int
    end: int


#: The end of a stream that does not tell how many messages it has.
UNKNOWN_END = 2**62


class Bounds(NamedTuple):
    """The range of a stream that can be read again: messages `oldest` to `end` - 1."""

    #: Changes when the stream is recreated. Sequence numbers are relative to it.
    epoch: int
    oldest: int
    #: Sequence number of the next message to be appended, or `UNKNOWN_END`.
    end: int
    #: The epochs that this one continues, the oldest first; empty for a recreated stream.
    lineage: tuple[Ancestor, ...] = ()

    def successor(self, epoch: int, seq: int) -> int | None:
        """Return where a reader resumes whose next message was `seq` of `epoch`.

        After a power failure, numbers beyond the cut are reused in a new epoch: a reader beyond
        it goes back to the cut. None: the stream was recreated and has nothing of that epoch.
        """
        if epoch == self.epoch:
            return seq
        ends = [ancestor.end for ancestor in self._from(epoch)]
        return min(seq, *ends) if ends else None

    def _from(self, epoch: int) -> tuple[Ancestor, ...]:
        for index, ancestor in enumerate(self.lineage):
            if ancestor.epoch == epoch:
                return self.lineage[index:]
        return ()


class _Endpoint(Closable):
    """Base of readers and writers: a URL, `close`, and a context manager."""

    #: Fields of `Message` that this endpoint cannot store, and what happens to each, in words.
    #: A copy reports them before it starts.
    cannot_carry: ClassVar[Mapping[str, str]] = {}

    def __init__(self, url: str) -> None:
        #: The URL it was opened by.
        self.url = url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


class WaitGroup(ABC):
    """Waits for many readers of one kind at once, without polling. One thread, except `wake`."""

    @abstractmethod
    def add(self, reader: Reader) -> None:
        """Add a reader to the group."""

    @abstractmethod
    def discard(self, reader: Reader) -> None:
        """Remove a reader from the group."""

    @abstractmethod
    def sleep(self, timeout: float) -> Sequence[Reader]:
        """Sleep until readers may have messages; return these, or none if woken or timed out."""

    @abstractmethod
    def wake(self) -> None:
        """End the current `sleep`, or else the next one. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class Reader(_Endpoint):
    """Reads the messages of one stream in order. Not safe to share between threads.

    An endpoint implements `_take`, the non-blocking read; all other reads are built on it.
    """

    #: The group that waits for readers of this kind; None: they must be polled.
    wait_group: type[WaitGroup] | None = None

    #: The longest pause (seconds) while the stream is idle; longer where `_pause` can be woken.
    _longest_pause = LONGEST_PAUSE

    @abstractmethod
    def _take(self, limit: int) -> list[Message]:
        """Return up to `limit` available messages, without waiting."""

    def _untake(self, messages: list[Message]) -> None:
        """Return the messages of the last `_take` again: a signal interrupted what came after it.

        A reader with a `read_batch` of its own needs none.
        """

    @abstractmethod
    def seek(self, position: PositionLike) -> None:
        """Move to a position: the next read returns the message there.

        :raises PositionError: there is no such position in this stream.
        """

    @abstractmethod
    def statistics(self) -> ReaderStatistics:
        """Return the counters of delivered, filtered and lost messages."""

    def newest_seq(self) -> int | None:
        """Return the sequence number of the newest message, or None if unknown."""
        return None

    def acknowledge(self) -> None:
        """Acknowledge everything read so far, where a writer or a cursor waits for that."""

    def bounds(self) -> Bounds:
        """Return the range of messages that `seek` can reach now.

        :raises Unsupported: this stream cannot be replayed: it is not `Replayable`.
        """
        raise Unsupported(f"{self.url} cannot be read again", hint="copy it to a log: first")

    def read(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None after `timeout` seconds.

        A `timeout` of None waits for ever, 0 not at all.

        :raises DamagedQueue: the stored data is not readable.
        :raises Closed: the reader was closed.
        """
        messages = self._take(1) or self._wait_and_take(1, timeout)
        return messages[0] if messages else None

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        """Return up to `n` messages; wait for the first of them as `read` does.

        Returns no message at once if `n` is below 1.
        """
        if n < 1:
            return []
        return self._take(n) or self._wait_and_take(n, timeout)

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        """Return up to `n` messages as one Arrow batch; wait for the first as `read` does."""
        from penstock.core.batch import batch_from_messages  # noqa: PLC0415 - loads Arrow

        messages = self.read_many(n, timeout)
        try:
            return batch_from_messages(messages)
        except BaseException:
            self._untake(messages)
            raise

    def read_batch_with_origins(self, n: int, timeout: float | None = 0) -> Batch:
        """Read as `read_batch` does, with the column `origin_ns`: see `Message.origin_ns`."""
        from penstock.core.batch import with_origins  # noqa: PLC0415 - loads Arrow

        return with_origins(self.read_batch(n, timeout))

    def available(self) -> Iterator[Message]:
        """Yield the existing messages, and end, also while a writer appends more.

        If the newest message is unknown, end with the first one appended after the call.
        """
        began = time.time_ns()
        newest = self.newest_seq()
        # One at a time: messages taken and not yielded would be lost if the caller stops iterating.
        while messages := self._take(1):
            message = messages[0]
            yield message
            if message.created_ns > began if newest is None else message.seq >= newest:
                return

    def __iter__(self) -> Iterator[Message]:
        """Follow the stream for ever."""
        while (message := self.read()) is not None:
            yield message

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        return self._wait_for(lambda: self._take(limit), timeout) or []

    def _wait_for(self, take: Callable[[], T], timeout: float | None) -> T | None:
        """Repeat `take` until it returns messages, and return them; None after `timeout`."""
        if timeout is not None and timeout <= 0:
            return None
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_PAUSE
        while True:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                pause = min(pause, left)
            self._pause(pause)
            if messages := take():
                return messages
            pause = min(pause * 2, self._longest_pause)

    def _has_news(self) -> bool:
        """Tell, without waiting, whether a read would return messages, for `wait_any`.

        A reader whose `newest_seq` does not renew its backlog overrides this, and keeps what it
        receives for the next read.

        :raises PenstockError: a read would raise.
        """
        self.newest_seq()  # which reads the state of the stream
        return self.statistics().backlog > 0

    def _idle(self) -> bool:
        """Check periodically, while the stream is idle, for changes that wake no reader.

        False: no message will ever come.
        """
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep up to `seconds`; an endpoint that can be woken overrides this."""
        time.sleep(seconds)


class Writer(_Endpoint):
    """Appends messages to one stream. Not safe to share between threads."""

    @abstractmethod
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
        """Append one message and return its sequence number.

        `time_ns` is when it happened (default: now); `created_ns` is when it is appended, which
        the endpoint sets itself: pass it only to copy a queue exactly.

        :raises MessageTooLarge: it can never fit; nothing was changed.
        :raises WriteTimeout: the queue stayed full for the timeout.
        :raises LockTimeout: another writer held the lock for the timeout.
        :raises Closed: the writer was closed.
        """

    @abstractmethod
    def statistics(self) -> WriterStatistics:
        """Return the counters of written and refused messages."""

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        """Append many messages of one kind; return the last one's number (None if none)."""
        last = None
        for payload in payloads:
            last = self.write(payload, type, subtype)
        return last

    def write_split(
        self, data: bytes, ending: bytes, type: int = 0, subtype: int = 0
    ) -> int | None:
        """Append each piece of `data.split(ending)`; return the last one's number."""
        return self.write_many(data.split(ending), type, subtype)

    def write_batch(self, batch: Batch) -> int | None:
        """Append the messages of a batch; return the last one's number (None if none).

        `seq` and `created_ns` of the batch are ignored: the target assigns its own.

        :raises Malformed: the batch does not have the columns of a batch.
        """
        from penstock.core.batch import messages_from_batch  # noqa: PLC0415 - loads Arrow

        last = None
        for m in messages_from_batch(batch):
            last = self.write(m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes)
        return last

    def flush(self) -> None:
        """Flush everything written so far; a no-op where nothing is buffered."""

    @property
    def syncs(self) -> bool:
        """Whether a power failure of this stream's machine takes nothing that was flushed."""
        return True


class BookedWriter(Writer):
    """A writer that keeps its own `WriterStatistics`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._is_closed = False
        self._messages = 0
        self._bytes = 0
        self._refused = 0
        self._headers_dropped = 0
        self._waited = 0.0
        self._last_seq: int | None = None

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            messages=self._messages,
            bytes=self._bytes,
            refused=self._refused,
            headers_dropped=self._headers_dropped,
            waited=self._waited,
            last_seq=self._last_seq,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")

    def _count_sent(self, messages: int, size: int) -> None:
        """Count `messages` of `size` bytes in total, numbered in the order sent."""
        self._messages += messages
        self._bytes += size
        if self._messages:
            self._last_seq = self._messages - 1
