"""What can a stream do beside being read and written?

All streams have `Reader` and `Writer`. A class that can do more inherits from one of these, and
callers ask for it: `isinstance(reader, Replayable)`, `isinstance(endpoint_of(url), AppendOnce)`.
Never derive a capability from a scheme.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

from penstock.core.errors import PenstockError
from penstock.core.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    import pyarrow as pa

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader
    from penstock.core.provenance import Commit, Noted, Staged
    from penstock.core.statistics import Loss
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL

__all__ = [
    "AllOrNone",
    "AppendOnce",
    "Capability",
    "Delivered",
    "GroupStatistics",
    "Grouped",
    "Held",
    "InPlaceReader",
    "InPlaceWriter",
    "InUse",
    "KeepsOrigin",
    "Listable",
    "OriginTimed",
    "Redelivering",
    "Removable",
    "Replayable",
    "Reservation",
    "Resizable",
    "SourceTimed",
    "StagedPart",
    "Stages",
    "StagingFull",
    "Tabular",
    "Tended",
    "Worded",
    "numbers_of_delivered",
]


class Capability(ABC):  # noqa: B024 - each of them has its own methods
    """Base of all of them. A subclass that lost one of its base's names it in `lacks`."""

    lacks: ClassVar[tuple[type[Capability], ...]] = ()

    @classmethod
    def __subclasshook__(cls, kind: Any) -> bool:
        return False if cls in getattr(kind, "lacks", ()) else NotImplemented


# --- of readers and writers -----------------------------------------------------------------------


class Replayable(Capability):
    """A reader with stable positions: messages can be read again.

    List it before `Reader` among the bases: `Reader.bounds` raises `Unsupported`.
    """

    #: Whether a new epoch may have messages of the one before, under other numbers: those of files
    #: are counted anew when the files have changed.
    renumbers: ClassVar[bool] = False

    @property
    def epoch(self) -> int | None:
        """The epoch of the next message's sequence number; None: only `bounds` knows it."""
        return None

    @abstractmethod
    def bounds(self) -> Bounds:
        """Return the range of messages that `seek` can reach now."""


class Held(Capability):
    """A reader with a named position (`hold=NAME`), which the writer or retention respects.

    The position outlives the reader. The next read, `acknowledge` and `close` acknowledge the
    messages of the last read; so messages in work when a process died are redelivered.
    """

    @property
    @abstractmethod
    def hold(self) -> str | None:
        """The name of its position; None: opened without one."""

    @abstractmethod
    def acknowledge(self) -> None:
        """Acknowledge everything read so far."""


class InPlaceReader(Capability):
    """A reader that lends messages in the queue's own memory."""

    @abstractmethod
    def view(self, timeout: float | None = None) -> AbstractContextManager[Message | None]:
        """Lend the next message, with its payload as a memoryview of the queue: no copy.

        Results computed from it are valid only if the block ends without `Overrun`. With
        `hold=NAME` and a writer that waits for it, `Overrun` cannot happen.

        :raises Overrun: the writer overwrote it meanwhile; it is counted as lost.
        """

    @abstractmethod
    def view_batch(self, n: int, timeout: float | None = 0) -> AbstractContextManager[Batch]:
        """Lend up to `n` messages as an Arrow batch whose payloads are views of the queue.

        The column `payload` is of type `binary_view`; the others are copies. See `view`.

        :raises Overrun: the writer overwrote some of them meanwhile; those are counted as lost.
        """


class AllOrNone(Capability):
    """A writer whose messages become visible on `close`, all at once, as those of a file.

    Nothing is durable before that; so do not acknowledge the messages to their source earlier.
    """


class SourceTimed(Capability):
    """A reader that finds messages by originating time, without reading all of them."""

    @abstractmethod
    def next_happened(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        """Return the first sequence number from `seq` on with a time in `start_ns` to `end_ns`.

        None: there is no such message now. The end is exclusive. The position does not change.
        """


class OriginTimed(Capability):
    """A reader that finds copies by `origin_ns`, without reading all of them."""

    @abstractmethod
    def next_originated(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        """Return the first sequence number from `seq` on with an `origin_ns` in this range.

        See `next_happened`.
        """


class KeepsOrigin(Capability):
    """A writer that keeps the column `origin_ns` of a batch, where it has one."""


class Worded(Capability):
    """A reader that can describe a message for people."""

    @abstractmethod
    def in_words(self, message: Message) -> str:
        """Describe the content of a message on one line."""


class Reservation(Protocol):
    """Memory of a queue for one payload, invisible to readers until `commit`.

    As a context manager it commits at the end, and aborts on an exception.
    """

    #: The payload's memory, writable.
    buffer: memoryview

    def commit(self, size: int | None = None) -> int:
        """Append the message: all of the buffer or its first `size` bytes; return its number.

        :raises ValueError: it was committed or aborted before, or `size` exceeds the buffer.
        """

    def abort(self) -> None:
        """Discard it, without a message. Idempotent; after `commit` a no-op."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class InPlaceWriter(Capability):
    """A writer that can build a message in the queue's memory, without a copy."""

    @abstractmethod
    def reserve(
        self,
        size: int,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> Reservation:
        """Reserve queue memory for a payload of `size` bytes; fill it in and commit it.

            with writer.reserve(len(image)) as place:
                place.buffer[:] = image

        Nothing else can be written before it is committed or aborted.

        :raises MessageTooLarge: it can never fit.
        :raises WriteTimeout: a held reader stayed behind for the timeout.
        """


# --- of endpoints ---------------------------------------------------------------------------------


class Listable(Capability):
    """An endpoint whose streams can be found by a pattern: `*`, `?` and `[…]` in the path.

    As in a shell, wildcards match part of a name and no `/`.
    """

    @abstractmethod
    def find(self, pattern: URL) -> Iterable[str]:
        """Return the URLs of the matching streams, each with the pattern's options."""


class InUse(PenstockError):
    """A stream cannot be removed while readers or writers have it open."""

    def __init__(self, url: str, users: Sequence[str]) -> None:
        hint = "end them first; --force removes it all the same"
        super().__init__(f"{url} is in use: {', '.join(users)}", hint=hint)
        self.url = url
        #: The writers and readers, in words.
        self.users = list(users)


class Removable(Capability):
    """An endpoint whose streams can be removed with all their messages."""

    @abstractmethod
    def remove(self, url: URL, *, force: bool = False) -> None:
        """Remove a stream.

        :param force: also while readers or writers have it open. A writer notices within a second,
            logs how many messages were removed, and recreates the stream.
        :raises InUse: a reader or writer has it open, and `force` is not set.
        :raises NotFound: no stream has this URL.
        """


class Resizable(Capability):
    """An endpoint whose streams have a size that can be changed."""

    @abstractmethod
    def resize(self, url: URL) -> None:
        """Resize a stream to the size in the URL's options, and keep its messages.

        Readers keep their position, whether they are open now or return later.

        :raises InvalidOption: its messages do not fit.
        :raises LockTimeout: a writer holds the lock.
        """


class Tabular(Capability):
    """An endpoint that makes messages from rows: a pipeline passes all of its columns."""

    @abstractmethod
    def messages_of(self, url: URL, rows: pa.RecordBatch) -> Batch:
        """Convert rows to messages.

        :raises Malformed: a column is missing, or does not fit.
        """


class Tended(Capability):
    """An endpoint whose streams need maintenance also while there are no writes.

    A process that keeps a stream open for long, as a pipeline does, calls `tend` periodically.
    """

    @abstractmethod
    def tend(self, url: URL) -> None:
        """Do the maintenance that is due, and return soon.

        :raises StorageError: no space, or no permission; the next call tries again.
        """


class AppendOnce(Capability):
    """An endpoint whose streams keep a note of the batches appended under a writer's name.

    So a writer that was killed can retry without losing or duplicating a message.
    """

    @abstractmethod
    def append_once(self, url: URL, commit: Commit) -> int:
        """Append a batch unless the stream has it already; return how many messages were new.

        A batch that was appended before is skipped; a partial one is completed.

        :raises AnotherBatch: the batch appended under this number has another provenance.
        """

    @abstractmethod
    def noted(self, url: URL, commit: Commit) -> Noted | None:
        """Return the stream's note about a batch, or None; the files of `commit` are not read."""

    @abstractmethod
    def has_batches(self, url: URL) -> bool:
        """Tell whether the stream has batches of any writer."""

    @abstractmethod
    def reread(self, url: URL) -> Reader:
        """Open the stream of a writer's URL for inspection: a `Replayable` reader.

        It starts at the oldest message, and changes nothing in the stream.

        :raises NotFound: the stream does not exist yet.
        """


#: What `ack` and `nack` accept: a message, several messages, or an Arrow batch.
Delivered: TypeAlias = "Message | Iterable[Message] | Batch"


class GroupStatistics(NamedTuple):
    """Counters of a group, over all members. A message is fresh, leased, waiting or settled."""

    #: Readers that are open, in all processes.
    members: int
    #: Sequence number of the next message that was never delivered.
    next_seq: int
    #: All messages below this one are settled.
    floor: int
    #: Messages that are not settled.
    lag: int
    #: Messages leased to a member.
    leased: int
    #: Messages that wait for redelivery, or for an earlier message with their key.
    waiting: int
    #: Messages that a member acknowledged.
    acked: int
    #: Deliveries of a message after its first.
    redelivered: int
    #: Messages that went to the dead-letter stream.
    dead: int
    #: Messages that the stream no longer had, or whose bytes are damaged.
    lost: int
    #: Settled messages that the stream then lost by a power failure.
    reverted: int
    #: The latest lost ranges, oldest first.
    losses: tuple[Loss, ...]


class Redelivering(Capability):
    """A reader whose source redelivers what was not acknowledged, to this reader or a later one."""

    @property
    def redelivers(self) -> bool:
        """Whether the source that it reads now does so."""
        return True


class Grouped(Redelivering):
    """A reader that shares a stream with the other members of its group.

    A read leases messages to this reader, and `ack` settles them. A message is redelivered, to any
    member, after `nack`, or when the lease expires, the reader is closed or its process dies.
    """

    @abstractmethod
    def ack(self, messages: Delivered) -> None:
        """Settle messages leased to this reader: they are not redelivered.

        :raises LeaseLost: some are no longer leased to this reader; the others are settled.
        :raises StorageError: the operating system refuses.
        """

    @abstractmethod
    def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        """Return messages, to be redelivered after `delay` seconds.

        :raises LeaseLost: some are no longer leased to this reader; the others are returned.
        :raises StorageError: the operating system refuses.
        """

    @abstractmethod
    def group(self) -> GroupStatistics:
        """Return the counters of the whole group."""


def numbers_of_delivered(messages: Delivered) -> list[int]:
    """Return the sequence numbers of the messages passed to `ack` or `nack`."""
    if isinstance(messages, Message):
        return [messages.seq]
    if not isinstance(messages, list):
        import pyarrow as pa  # noqa: PLC0415 - not needed to wait for readers

        if isinstance(messages, pa.RecordBatch):
            numbers: list[int] = messages.column("seq").to_pylist()
            return numbers
    return [message.seq for message in messages]


class StagedPart(Protocol):
    """The output of one task attempt for one stream, invisible before `finish`."""

    def add(self, batch: Batch) -> None:
        """Add messages.

        :raises StorageError: no space, or no permission.
        """

    def finish(self) -> Staged:
        """Hand over all messages, and return what to commit.

        :raises ConnectionLost: the stream's machine cannot be reached.
        :raises StagingFull: the staging area is full.
        """

    def discard(self) -> None:
        """Discard it: the task has failed."""


class Stages(AppendOnce):
    """An endpoint that stores the staged output of a batch's tasks beside the stream.

    So tasks on several machines, and the committer, need no shared folder.
    """

    @abstractmethod
    def stage(self, url: URL, writer: str, batch: int, partition: int) -> StagedPart:
        """Start to stage the output of a task.

        :raises Unsupported: this stream has no staging; stage in a folder.
        """

    @abstractmethod
    def unstage(self, url: URL, commit: Commit, *, is_done: bool) -> None:
        """Remove the staged files of a batch, except those that a started append needs.

        :param is_done: the batch is appended: remove all of its files, and those of earlier batches
        """

    @abstractmethod
    def forget(self, url: URL, writer: str) -> None:
        """Remove the note of a writer that will not return."""


class StagingFull(PenstockError):
    """The staging area of a stream is full."""

    def __init__(self, limit: int, *, hint: str | None = None) -> None:
        super().__init__(f"what tasks have staged would be more than {limit:,} bytes", hint=hint)
        self.limit = limit
