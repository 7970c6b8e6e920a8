"""How are records taken out of a stream of bytes that comes in any pieces?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.errors import Malformed
from penstock.protocols.psi.errors import Truncated

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.core.interfaces import BytesLike
    from penstock.protocols.connection import Connection

__all__ = ["Decoder", "StepDecoder", "hear_one"]

_T = TypeVar("_T")

_RECEIVED_AT_ONCE: Final = 65536


def hear_one(connection: Connection, decoder: Decoder[_T]) -> _T | None:
    """Return the first thing that a peer says; None if it leaves.

    :raises Malformed: it does not follow the format.
    :raises TimeoutError: it is not there in the time that the connection has for it.
    """
    view = memoryview(bytearray(_RECEIVED_AT_ONCE))
    while count := connection.receive(view):
        if found := decoder.feed(bytes(view[:count])):
            connection.welcome()
            return found[0]
    return None


class Decoder(ABC, Generic[_T]):
    """Takes the bytes of one direction of a connection as they come, and gives whole records.

    It holds no more than has come, and gives up at the first length that is not allowed.
    """

    #: What the stream is, in the words of an error.
    what = "psi stream"

    def __init__(self) -> None:
        #: What is wrong with the bytes after the last record; nothing more can be read then.
        self.fault: Malformed | None = None
        self._held = bytearray()
        #: Bytes that have to be there before another look is worth it.
        self._needed = 1

    @property
    def held(self) -> int:
        """Bytes that have come of a record that is not whole yet."""
        return len(self._held)

    def feed(self, data: BytesLike) -> list[_T]:
        """Take bytes, and return the records that are whole by now.

        Records before a fault are still returned: see `fault`, and call again to have it raised.

        :raises Malformed: the bytes do not follow the format, or a record is too large.
        """
        if self.fault is not None:
            raise self.fault
        held = self._held
        if held:
            held += data
            if len(held) < self._needed:
                return []
            data = held
        elif len(data) < self._needed:
            held += data
            return []
        records: list[_T] = []
        used = 0
        with memoryview(data) as view:
            try:
                used = self._parse(view, records)
            except Malformed as fault:
                self.fault = fault
            if data is not held and self.fault is None:
                held += view[used:]
        if self.fault is not None:
            self._held = bytearray()
            if not records:
                raise self.fault
        elif data is held:
            del held[:used]
        return records

    def finish(self) -> None:
        """Say that no more bytes come.

        :raises Truncated: they ended within a record.
        :raises Malformed: they did not follow the format.
        """
        if self.fault is not None:
            raise self.fault
        if self._held:
            raise Truncated(self.what, "the end", self._needed, len(self._held))

    @abstractmethod
    def _parse(self, view: memoryview, records: list[_T]) -> int:
        """Append the records that are whole, set `_needed`, and return how many bytes they were."""


class StepDecoder(Decoder[_T]):
    """A decoder that is written as it reads: it yields how many bytes it wants next."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[_T] = []
        self._inside = False
        self._is_done = False
        #: Bytes behind the last record that there can be; they are dropped.
        self.surplus = 0
        self._steps = self._read()
        self._needed = next(self._steps)

    @abstractmethod
    def _read(self) -> Generator[int, bytes, None]:
        """Yield a number to get so many bytes; call `_give` with each record."""

    def _give(self, record: _T) -> None:
        self._found.append(record)
        self._inside = False

    def finish(self) -> None:
        super().finish()
        if self._inside:
            raise Truncated(self.what, "the end", self._needed, 0)

    def _parse(self, view: memoryview, records: list[_T]) -> int:
        self._found = records
        at, end = 0, len(view)
        while not self._is_done and end - at >= self._needed:
            piece = bytes(view[at : at + self._needed])
            at += self._needed
            self._inside = True
            try:
                self._needed = self._steps.send(piece)
            except StopIteration:
                self._is_done, self._needed = True, 1
                self._inside = False
        if self._is_done:
            self.surplus += end - at
            return end
        return at
