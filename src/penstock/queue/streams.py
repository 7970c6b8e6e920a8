"""How does a stream connect one creator with many readers or writers?

An output stream is written by its creator and read by any process (1:N). An input stream is read by
its creator and written by any process (N:1).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from penstock.core.errors import CursorInUse, InvalidOption
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.options import Creation
from penstock.queue.stream_directory import StreamKind, StreamPlace
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader, open_wide_reader
from penstock.queue.wide.writer import WideWriter, open_wide_writer

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock.core.position import PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.queue.ownership import Ownership
    from penstock.queue.wide.file import QueueFile

__all__ = ["InputStream", "OutputStream"]

#: Name of the reader of an input stream, which its producers hold.
_CONSUMER: Final = "consumer"

#: Default sizes of a stream. They are smaller than those of a queue: a machine has many streams,
#: all in memory.
_SLOTS: Final = 4096
_SIZE: Final = 4 << 20

#: How long a producer waits for a consumer that is behind or absent (seconds).
_PATIENCE: Final = 5.0
#: The kernel releases the locks of a killed process within this time (seconds).
_DYING: Final = 5.0

# Options of the other side; the rest are fixed for streams.
_OF_OUTPUT_READER: Final = frozenset({"hold", "wait", "type", "resume", "damaged"})
_OF_INPUT_WRITER: Final = frozenset({"policy", "timeout", "keep", "wait", "sync"})


class _Created(ABC):
    """Base of both kinds of streams, for their creator."""

    _kind: ClassVar[StreamKind]
    #: Options that the creator may set, and fixed ones.
    _choices: ClassVar[frozenset[str]]
    _fixed: ClassVar[Mapping[str, Any]]

    @classmethod
    def create(
        cls,
        stream: StreamId,
        *,
        owner: str,
        directory: str | os.PathLike[str] | None = None,
        slots: int = _SLOTS,
        size: int | str = _SIZE,
        **options: object,
    ) -> Self:
        """Create a stream, or take over an existing one whose creator is gone.

        An existing stream keeps its messages, numbers and size; an input stream resumes where its
        last creator was. For `options` see the class.

        :raises AlreadyOwned: the stream has a live creator, which the error names.
        :raises InvalidStreamId: a field of the id is ANY.
        """
        place = StreamPlace.of(stream, cls._kind, directory)
        fixed = {**cls._fixed, "slots": slots, "size": size, "stream": stream}
        chosen = _choose(options, cls._choices, place, **fixed)
        with place.claimed(owner) as ownership:
            return cls._taken_over(place, ownership, chosen)

    @classmethod
    def _taken_over(cls, place: StreamPlace, ownership: Ownership, options: WideOptions) -> Self:
        return cls(place, ownership, options, place.open_or_make(options))

    def __init__(
        self, place: StreamPlace, ownership: Ownership, options: WideOptions, file: QueueFile
    ) -> None:
        #: Its id.
        self.stream = place.stream
        self._place = place
        self._ownership: Ownership | None = None
        #: Of its queue, as of `close`.
        self._last_epoch = file.field("epoch")
        self._begin(options, file)
        self._ownership = ownership

    def _remove(self) -> None:
        """Remove the stream's files, unless it was removed and created anew since `close`."""
        if self._ownership is None:
            return
        if self._ownership.is_held:
            self._place.remove(self._ownership)
        elif self._place.has(self._last_epoch):
            with self._place.claimed("penstock, which removes it") as ownership:
                if self._place.has(self._last_epoch):  # still
                    self._place.remove(ownership)
                else:
                    ownership.release(remove=not self._place.exists())
        self._ownership = None

    @abstractmethod
    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        """Become the writer or the reader of the queue."""


class OutputStream(_Created, WideWriter):
    """A stream that this process created and writes; any number of processes read it.

        with OutputStream.create(id_for_app("my_app", "temperature"), owner="my_app") as stream:
            stream.write(b"21.5")

    A `WideWriter` with its options `hold`, `policy`, `timeout`, `keep`, `readers`, `crc` and
    `sync`. After `close` the stream can still be read.
    """

    _kind = StreamKind.OUTPUT
    _choices = frozenset({"readers", "crc", "hold", "policy", "timeout", "keep", "sync"})
    _fixed: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def open(
        stream: StreamId,
        start: PositionLike = Position.START,
        *,
        directory: str | os.PathLike[str] | None = None,
        **options: object,
    ) -> WideReader:
        """Open a reader of a stream that another process created, or will create (`wait`).

        `options` are those of a reader: `hold`, `wait`, `type`, `resume` and `damaged`.

        :raises NotFound: there is no such stream.
        """
        place = StreamPlace.of(stream, StreamKind.OUTPUT, directory)
        chosen = _choose(options, _OF_OUTPUT_READER, place)
        with place.explained():
            return open_wide_reader(place.url, place.path, Position.of(start), chosen)

    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        WideWriter.__init__(self, self._place.url, self._place.path, options, file)

    def close(self) -> None:
        if not self._is_closed:
            self._last_epoch = self._file.field("epoch")
        super().close()
        if self._is_closed and self._ownership is not None:
            self._ownership.release()

    def remove(self) -> None:
        """Close and remove the stream. Open readers can read it to its end.

        :raises AlreadyOwned: it was closed before, and another live creator has taken it over.
        """
        super().close()
        self._remove()


class InputStream(_Created, WideReader):
    """A stream that this process created and reads; any number of processes write to it.

        with InputStream.create(id_for_app("my_app", "commands"), owner="my_app") as stream:
            for message in stream:
                ...

    A `WideReader` with its options `readers`, `crc`, `type` and `damaged`. Messages are in order of
    arrival. Producers wait for this reader, so none is lost: the next call confirms the messages of
    a call, and messages in work when the process is killed are redelivered to the next creator.
    """

    _kind = StreamKind.INPUT
    _choices = frozenset({"readers", "crc", "type", "damaged"})
    _fixed: ClassVar[Mapping[str, Any]] = {"hold": _CONSUMER, "writers": "many"}

    @classmethod
    def _taken_over(cls, place: StreamPlace, ownership: Ownership, options: WideOptions) -> Self:
        deadline = time.monotonic() + _DYING
        while True:
            try:
                return super()._taken_over(place, ownership, options)
            except CursorInUse:  # the last creator is just ending
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    @staticmethod
    def open(
        stream: StreamId, *, directory: str | os.PathLike[str] | None = None, **options: object
    ) -> WideWriter:
        """Open a writer to a stream that another process created, or will create (`wait`).

        A write waits up to 5 s for a consumer that is behind or absent: `timeout=None` waits
        forever, `policy="fail"` does not wait, `policy="drop"` overwrites. With `keep=False` it
        does not wait for an absent one. `options` can also have `wait` and `sync`.

        :raises NotFound: there is no such stream.
        """
        place = StreamPlace.of(stream, StreamKind.INPUT, directory)
        given = {"timeout": _PATIENCE, "keep": True} | options
        fixed = {"create": Creation.NEVER, "stream": stream, "writers": "many"}
        chosen = _choose(given, _OF_INPUT_WRITER, place, hold=_CONSUMER, **fixed)
        # Another producer may hold the lock while it waits for the consumer.
        patience = 1e9 if chosen.timeout is None else chosen.timeout + _PATIENCE
        with place.explained():
            return open_wide_writer(place.url, place.path, replace(chosen, lock_timeout=patience))

    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        path = self._place.path
        WideReader.__init__(self, self._place.url, path, Position.START, options, file)

    def _close(self, *, finished: bool) -> None:
        if not self._is_closed:
            self._last_epoch = self._numbers_of
        super()._close(finished=finished)
        if self._is_closed and self._ownership is not None:
            self._ownership.release()

    def remove(self) -> None:
        """Close and remove the stream with its unread messages. Close its producers before.

        :raises AlreadyOwned: it was closed before, and another live creator has taken it over.
        """
        super()._close(finished=True)
        self._remove()


def _choose(
    options: dict[str, object], allowed: frozenset[str], place: StreamPlace, **fixed: Any
) -> WideOptions:
    """Return the options of a stream's queue.

    :raises InvalidOption: an option is not for this side of a stream, or its value is invalid.
    """
    for name in sorted(options.keys() - allowed):
        reason = f"is not for this side of an {place.kind} stream"
        raise InvalidOption(
            name, options[name], reason, hint=f"known: {', '.join(sorted(allowed))}"
        )
    given = {name: value for name, value in {**options, **fixed}.items() if value is not None}
    return WideOptions.of(URL(place.url, "fmq", None, None, place.path, given))
