"""What can a stream do beside being read and written?

`Reader` and `Writer` are what all have. A class that can do more says so by one of these, and
whoever needs it asks: `isinstance(reader, Replayable)`, `isinstance(endpoint_of(url), AppendOnce)`.
Nobody concludes it from a scheme.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, Self

import pyarrow as pa

from penstock.core.errors import NotFound, StorageError
from penstock.core.provenance import Origin, ranges_to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL

__all__ = [
    "COMPARED",
    "AppendOnce",
    "Capability",
    "Commit",
    "Held",
    "InPlaceReader",
    "InPlaceWriter",
    "Listable",
    "Noted",
    "Replayable",
    "Reservation",
    "Staged",
]


class Capability(ABC):  # noqa: B024 - each of them has its own methods
    """Base of all of them. A subclass that lost one of its base's names it in `lacks`."""

    lacks: ClassVar[tuple[type[Capability], ...]] = ()

    @classmethod
    def __subclasshook__(cls, kind: Any) -> bool:
        return False if cls in getattr(kind, "lacks", ()) else NotImplemented


# --- of readers and writers -----------------------------------------------------------------------


class Replayable(Capability):
    """A reader whose positions mean the same message later: what was read can be read again.

    Name it before `Reader` among the bases, whose `bounds` says that it cannot.
    """

    @property
    def epoch(self) -> int | None:
        """The epoch that the number of the next message counts in; None: only `bounds` can tell."""
        return None

    @abstractmethod
    def bounds(self) -> Bounds:
        """Return what can be read again by `seek` now."""


class Held(Capability):
    """A reader whose place may have a name (`hold=NAME`), which the writer or retention respects.

    The place outlives the reader. What a call returned is done with the next call, with
    `acknowledge` and by closing; so what was being worked on when a process died comes again.
    """

    @property
    @abstractmethod
    def hold(self) -> str | None:
        """The name of its place; None: it was opened without."""

    @abstractmethod
    def acknowledge(self) -> None:
        """Say that everything read so far is done."""


class InPlaceReader(Capability):
    """A reader that lends messages in the queue's own memory."""

    @abstractmethod
    def view(self, timeout: float | None = None) -> AbstractContextManager[Message | None]:
        """Lend the next message, its payload a memoryview of the queue: nothing is copied.

        What was computed from it counts only when the block ends without `Overrun`. With
        `hold=NAME` and a writer that waits for it, that cannot happen.

        :raises Overrun: the writer overwrote it meanwhile; it is counted as lost.
        """

    @abstractmethod
    def view_batch(self, n: int, timeout: float | None = 0) -> AbstractContextManager[Batch]:
        """Lend up to `n` messages as an Arrow batch whose payloads are views of the queue.

        The column `payload` is of type `binary_view`; the others are copies. As `view`.

        :raises Overrun: the writer overwrote some of them meanwhile; those are counted as lost.
        """


class Reservation(Protocol):
    """Memory of a queue for one payload. Nobody sees it before it is committed.

    As a context manager it commits at the end, and aborts when an error ends it.
    """

    #: The payload's place, to be written to.
    buffer: memoryview

    def commit(self, size: int | None = None) -> int:
        """Append the message, with all of the buffer or its first `size` bytes; return its number.

        :raises ValueError: it was committed or aborted before, or has not that many bytes.
        """

    def abort(self) -> None:
        """Give it up; there is no message then. Again, or after commit: nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class InPlaceWriter(Capability):
    """A writer in whose queue a message can be made, instead of being copied there."""

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
        """Give memory of the queue for a payload of `size` bytes, to be filled in and committed.

            with writer.reserve(len(image)) as place:
                place.buffer[:] = image

        Nothing else can be written meanwhile.

        :raises MessageTooLarge: it can never fit.
        :raises WriteTimeout: a held reader is behind, and stayed so for the time allowed.
        """


# --- of endpoints ---------------------------------------------------------------------------------


class Listable(Capability):
    """An endpoint whose streams can be found by a pattern: `*`, `?` and `[…]` in the path.

    As in a shell, they stand for a part of a name and not for directories.
    """

    @abstractmethod
    def find(self, pattern: URL) -> Iterable[str]:
        """Return the URLs of the streams that are there now, each with the pattern's options."""


#: What of a message has to be the same when it is appended again. Its time may be that of then.
COMPARED: Final = ("payload", "type", "subtype", "stream", "attributes")


class Staged(NamedTuple):
    """Messages for one stream in a file of Arrow batches, as one task of a batch made it."""

    url: str
    path: str
    partition: int
    messages: int


class Commit(NamedTuple):
    """A batch that is to be in a stream once, however often its writer tries."""

    #: Who appends: the same name after every restart.
    writer: str
    #: The number that the writer gives it. After a mistake, another batch may have it.
    batch: int
    #: The messages. The files stay until the batch is in the stream.
    files: Sequence[Staged] = ()
    #: What it is made of.
    origin: Origin = Origin()
    #: A file for notes about a stream that keeps none itself; earlier releases did so for some.
    notes: Path | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield the messages, in the order of the tasks.

        :raises NotFound: a file is not to be seen from here.
        """
        for file in sorted(self.files, key=lambda file: (file.partition, file.path)):
            try:
                with pa.OSFile(file.path, "rb") as opened:
                    reader = pa.ipc.open_file(opened)
                    for i in range(reader.num_record_batches):
                        yield reader.get_batch(i)
            except FileNotFoundError:
                raise NotFound(
                    f"what a task staged in {file.path} is not to be seen from the driver",
                    hint='.option("staging", …): a folder that driver and executors share',
                ) from None
            except OSError as error:
                raise StorageError("reading", file.path, error) from error

    def digest(self) -> str:
        """Return a digest of the messages in their order, however they are cut into batches."""
        hashes = {name: (blake2b(digest_size=16), blake2b(digest_size=16)) for name in COMPARED}
        for batch in self.batches():
            for name, (sizes, data) in hashes.items():
                column = batch.column(name)
                if pa.types.is_integer(column.type):
                    data.update(column.to_numpy().tobytes())
                    continue
                values = column.cast(pa.large_binary()).to_pylist()
                lengths = [None if value is None else len(value) for value in values]
                sizes.update(json.dumps(lengths).encode())
                data.update(b"".join(value for value in values if value is not None))
        whole = blake2b(digest_size=16)
        for sizes, data in hashes.values():
            whole.update(sizes.digest() + data.digest())
        return whole.hexdigest()

    def made_of(self) -> str:
        """Return what it is made of as text: for a stream that keeps no more of a batch than that.

        The ranges of its sources; or a digest, if nobody knows them.
        """
        ranges = ranges_to_json(self.origin.ranges)
        return self.digest() if ranges is None else json.dumps(ranges, sort_keys=True)


class Noted(NamedTuple):
    """What a stream knows of a batch."""

    is_done: bool
    #: The files that an attempt needs to be completed, which is not done.
    files: Sequence[str] = ()
    #: The run of its writer that appended it; see `Origin`.
    run: str | None = None


class AppendOnce(Capability):
    """An endpoint whose streams keep a note of the batches appended under a writer's name.

    So a writer that was killed tries again, and neither loses nor doubles a message.
    """

    @abstractmethod
    def append_once(self, url: URL, commit: Commit) -> int:
        """Append a batch unless it is there already; return how many messages were new.

        The same again is skipped, and one of which a part is there is completed.

        :raises AnotherBatch: what was appended under its number was made of something else.
        """

    @abstractmethod
    def noted(self, url: URL, commit: Commit) -> Noted | None:
        """Return what the stream knows of a batch, whose files do not matter; None: nothing."""

    @abstractmethod
    def has_batches(self, url: URL) -> bool:
        """Tell whether batches of any writer are in the stream."""

    @abstractmethod
    def reread(self, url: URL) -> Reader:
        """Open what the URL of a writer names, to look at what is in it: a `Replayable` reader.

        It starts with the oldest message, and leaves no traces.

        :raises NotFound: there is none yet.
        """
