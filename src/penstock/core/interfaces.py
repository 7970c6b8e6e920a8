"""What can every reader and every writer do?"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from penstock.core.batch import Batch, batch_from_messages, messages_from_batch
from penstock.core.closing import Closable
from penstock.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics, WriterStatistics
    from penstock.core.stream_id import StreamId

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "LONGEST_SLEEP",
    "Ancestor",
    "Bounds",
    "BytesLike",
    "Reader",
    "WaitGroup",
    "Writer",
    "between_looks",
]

#: What a payload may be given as.
BytesLike: TypeAlias = bytes | bytearray | memoryview

#: Polling starts with this pause (seconds) and doubles it, up to the second value, while nothing
#: comes. At 5 ms an idle follower costs a fraction of a percent of a core.
FIRST_PAUSE = 0.000_05
LONGEST_PAUSE = 0.005

#: Whoever is to be woken looks this often (seconds) all the same: who was killed wakes nobody.
LONGEST_SLEEP = 1.0


def between_looks(readers: int) -> float:
    """Return how many seconds to let pass before so many silent readers look around again.

    See `Reader._idle`. With very many of them it takes longer, so that they stay cheap.
    """
    return max(LONGEST_SLEEP, readers * 0.004)


class Ancestor(NamedTuple):
    """An earlier epoch that a stream continues, and the number at which a power failure cut it."""

    epoch: int
    end: int


class Bounds(NamedTuple):
    """What of a stream can be read again: its messages from `oldest` to `end` - 1."""

    #: Another number when the stream was created anew. Numbers of messages count within it.
    epoch: int
    oldest: int
    #: The number of the next message to come.
    end: int
    #: The epochs that this one continues, the oldest first; none for a stream created anew.
    lineage: tuple[Ancestor, ...] = ()

    def successor(self, epoch: int, seq: int) -> int | None:
        """Return where a reader goes on that would have read message `seq` of `epoch` next.

        After a power failure, numbers beyond the cut are given again in a new epoch: a reader that
        was further goes back to the cut. None: the stream was created anew, and nothing of that
        epoch is in it.
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
    """What readers and writers share: a URL, closing, and being a context manager."""

    #: Fields of `Message` that this endpoint has no place for, and what becomes of each, in
    #: words. Copying says so before it starts.
    cannot_carry: ClassVar[Mapping[str, str]] = {}

    def __init__(self, url: str) -> None:
        #: The URL it was opened by.
        self.url = url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


class WaitGroup(ABC):
    """Waits for many readers of one kind at once, asleep. For one thread, but for `wake`."""

    @abstractmethod
    def add(self, reader: Reader) -> None:
        """Wait for this one, too."""

    @abstractmethod
    def discard(self, reader: Reader) -> None:
        """Wait for this one no more."""

    @abstractmethod
    def sleep(self, timeout: float) -> Sequence[Reader]:
        """Sleep until some may have something, and return those; none when woken or timed out."""

    @abstractmethod
    def wake(self) -> None:
        """End the sleep under way, or else the next one. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class Reader(_Endpoint):
    """Reads the messages of one stream in order. Not safe to share between threads.

    An endpoint implements `read_many` without waiting as `_take`; all other forms follow from it.
    """

    #: How this reader is waited for together with others of its kind; None: it has to be polled.
    wait_group: type[WaitGroup] | None = None

    #: The longest pause (seconds) while nothing comes; longer where `_pause` can be woken.
    _longest_pause = LONGEST_PAUSE

    @abstractmethod
    def _take(self, limit: int) -> list[Message]:
        """Return up to `limit` messages that are there now, without waiting."""

    @abstractmethod
    def seek(self, position: PositionLike) -> None:
        """Stand at a position: the next read returns the message there.

        :raises PositionError: there is no such position in this stream.
        """

    @abstractmethod
    def statistics(self) -> ReaderStatistics:
        """Return what was delivered, filtered and lost so far."""

    def newest_seq(self) -> int | None:
        """Return the sequence number of the newest message there now, or None if unknown."""
        return None

    def acknowledge(self) -> None:
        """Say that everything read so far is done, where a writer or a cursor waits for that."""

    def bounds(self) -> Bounds:
        """Return what can be read again by `seek` now.

        :raises Unsupported: this stream cannot be replayed: it is not `Replayable`.
        """
        raise Unsupported(f"{self.url} cannot be read again", hint="copy it to a log: first")

    def read(self, timeout: float | None = None) -> Message | None:
        """Return the next message; wait for ever (None), not at all (0), or some seconds.

        Returns None when the time is over.

        :raises DamagedQueue: what is stored is not readable.
        :raises Closed: the reader was closed.
        """
        messages = self._take(1) or self._wait_and_take(1, timeout)
        return messages[0] if messages else None

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        """Return up to `n` messages; wait for the first of them as `read` does.

        None are asked for, and none are waited for, when `n` is below 1.
        """
        if n < 1:
            return []
        return self._take(n) or self._wait_and_take(n, timeout)

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        """Return up to `n` messages as one Arrow batch; wait for the first as `read` does."""
        return batch_from_messages(self.read_many(n, timeout))

    def available(self) -> Iterator[Message]:
        """Yield what is there now, and end, also when a writer goes on writing.

        Where the newest message is not known, it ends with the first one appended after it began.
        """
        began = time.time_ns()
        newest = self.newest_seq()
        # One at a time: what was taken and not yielded would be lost to a caller who breaks off.
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
        if timeout is not None and timeout <= 0:
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_PAUSE
        while True:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                pause = min(pause, left)
            self._pause(pause)
            if messages := self._take(limit):
                return messages
            pause = min(pause * 2, self._longest_pause)

    def _idle(self) -> bool:
        """Look now and then, while nothing comes, for what nobody would wake us for.

        False: nothing will ever come.
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
        the endpoint knows best: give it only to copy a queue exactly.

        :raises MessageTooLarge: it can never fit; nothing was touched.
        :raises WriteTimeout: the queue stayed full for the time allowed.
        :raises LockTimeout: another writer held the queue for the time allowed.
        :raises Closed: the writer was closed.
        """

    @abstractmethod
    def statistics(self) -> WriterStatistics:
        """Return what was written and refused so far."""

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        """Append many messages of one kind; return the last one's number (None if none)."""
        last = None
        for payload in payloads:
            last = self.write(payload, type, subtype)
        return last

    def write_batch(self, batch: Batch) -> int | None:
        """Append the messages of a batch; return the last one's number (None if none).

        `seq` and `created_ns` of the batch are not used: the target gives its own.

        :raises Malformed: the batch does not have the columns of a batch.
        """
        last = None
        for m in messages_from_batch(batch):
            last = self.write(m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes)
        return last

    def flush(self) -> None:
        """Hand over everything written so far; a no-op where nothing is held back."""
