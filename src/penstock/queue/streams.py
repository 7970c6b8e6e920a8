"""How does a stream have one creator, and many on its other side?

An output stream is written by its creator and read by anybody (1:N). An input stream is read by its
creator and written by anybody (N:1).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from penstock.core.errors import CursorInUse, InvalidOption
from penstock.core.options import parse_options
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.options import Creation
from penstock.queue.stream_places import StreamKind, StreamPlace
from penstock.queue.wide.opening import open_wide_reader, open_wide_writer
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock.core.position import PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.queue.ownership import Ownership
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["InputStream", "OutputStream"]

#: The reader of an input stream, as its producers know it.
_CONSUMER: Final = "consumer"

#: Sizes of a stream whose creator gives none. They are less than those of a queue: a machine has
#: many streams, and they are in memory.
_SLOTS: Final = 4096
_SIZE: Final = 4 << 20

#: How long a producer waits for a consumer that is behind, or away (seconds).
_PATIENCE: Final = 5.0
#: A process that was killed lets go of what it had within this time (seconds).
_DYING: Final = 5.0

# What the other side may choose; the rest follows from what a stream is.
_OF_OUTPUT_READER: Final = frozenset({"hold", "wait", "type", "resume", "damaged"})
_OF_INPUT_WRITER: Final = frozenset({"policy", "timeout", "keep", "wait", "sync"})


class _Created(ABC):
    """What the creator of a stream has, on either side of it."""

    _kind: ClassVar[StreamKind]
    #: The options that it may choose, and those that follow from what a stream is.
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
        """Make a stream, or take over the one that a creator left who is no more.

        One that is there keeps its messages, its numbers and its size, and one that is read here
        is read on from where its last creator was. The class says which `options` there are.

        :raises AlreadyOwned: it has a creator; says who that is.
        :raises InvalidStreamId: the id leaves a field open.
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
        #: Its name.
        self.stream = place.stream
        self._place = place
        self._ownership: Ownership | None = None
        self._begin(options, file)
        self._ownership = ownership

    @abstractmethod
    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        """Become the writer or the reader of the queue."""


class OutputStream(_Created, WideWriter):
    """A stream that this process made and writes to; any number of others read it.

        with OutputStream.create(id_for_app("my_app", "temperature"), owner="my_app") as stream:
            stream.write(b"21.5")

    It is the writer of a wide queue and does all that one does, with its options `hold`, `policy`,
    `timeout`, `keep`, `readers`, `crc` and `sync`. After `close` it can still be read.
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
        """Read a stream that another process made, or will make (`wait`).

        `options` are a reader's: `hold`, `wait`, `type`, `resume` and `damaged`.

        :raises NotFound: there is none.
        """
        place = StreamPlace.of(stream, StreamKind.OUTPUT, directory)
        chosen = _choose(options, _OF_OUTPUT_READER, place)
        with place.explained():
            return open_wide_reader(place.url, place.path, Position.of(start), chosen)

    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        WideWriter.__init__(self, self._place.url, self._place.path, options, file)

    def close(self) -> None:
        super().close()
        if self._is_closed and self._ownership is not None:
            self._ownership.release()

    def remove(self) -> None:
        """Close it, and remove it. Those who read it now can read what is in it to the end."""
        super().close()
        if self._ownership is not None:
            self._place.remove(self._ownership)


class InputStream(_Created, WideReader):
    """A stream that this process made and reads from; any number of others write to it.

        with InputStream.create(id_for_app("my_app", "commands"), owner="my_app") as stream:
            for message in stream:
                ...

    It is the reader of a wide queue and does all that one does, with its options `readers`, `crc`,
    `type` and `damaged`. Messages come in the order of their arrival. Producers wait for it, so
    none is lost: what a call returned is given back by the next call, and what was being worked on
    when the process was killed comes again to the next creator.
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
            except CursorInUse:  # the last creator is about to be gone
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    @staticmethod
    def open(
        stream: StreamId, *, directory: str | os.PathLike[str] | None = None, **options: object
    ) -> WideWriter:
        """Write to a stream that another process made, or will make (`wait`).

        A write waits for a consumer that is behind or away, for up to 5 s: `timeout=None` waits for
        ever, `policy="fail"` does not wait, `policy="drop"` overwrites. With `keep=False` it does
        not wait for one that is away. `options` can also have `wait` and `sync`.

        :raises NotFound: there is none.
        """
        place = StreamPlace.of(stream, StreamKind.INPUT, directory)
        given = {"timeout": _PATIENCE, "keep": True} | options
        fixed = {"create": Creation.NEVER, "stream": stream, "writers": "many"}
        chosen = _choose(given, _OF_INPUT_WRITER, place, hold=_CONSUMER, **fixed)
        # Another producer may have the lock while it waits for the consumer.
        patience = 1e9 if chosen.timeout is None else chosen.timeout + _PATIENCE
        with place.explained():
            return open_wide_writer(
                place.url, place.path, chosen.model_copy(update={"lock_timeout": patience})
            )

    def _begin(self, options: WideOptions, file: QueueFile) -> None:
        path = self._place.path
        WideReader.__init__(self, self._place.url, path, Position.START, options, file)

    def _close(self, *, finished: bool) -> None:
        super()._close(finished=finished)
        if self._is_closed and self._ownership is not None:
            self._ownership.release()

    def remove(self) -> None:
        """Close it, and remove it with all that was not read. Close its producers before."""
        super()._close(finished=True)
        if self._ownership is not None:
            self._place.remove(self._ownership)


def _choose(
    options: dict[str, object], allowed: frozenset[str], place: StreamPlace, **fixed: Any
) -> WideOptions:
    """Put together the options of a stream's queue.

    :raises InvalidOption: one is not for this side of a stream, or its value does not fit.
    """
    for name in sorted(options.keys() - allowed):
        reason = f"is not for this side of an {place.kind} stream"
        raise InvalidOption(
            name, options[name], reason, hint=f"known: {', '.join(sorted(allowed))}"
        )
    given: dict[str, Any] = {**options, **fixed}
    for name, value in given.items():
        if isinstance(value, bool):
            given[name] = str(value).lower()  # as in a URL
    return parse_options(URL(place.url, "fmq", None, None, place.path, given), WideOptions)
