"""How are psi's numbers, texts and records laid out in a stream of bytes?

Little-endian, without padding. A text has its length before it: in 4 bytes on psi's own channels,
in groups of 7 bits at rendezvous, clock and interop (docs/specs/psi.md 1).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import Truncated

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.core.interfaces import BytesLike
    from penstock.protocols.connection import Connection

__all__ = [
    "INT32",
    "Cursor",
    "Decoder",
    "StepDecoder",
    "check_int32",
    "hear_one",
    "pack_short_text",
    "pack_text",
    "utf8",
]

INT32: Final = struct.Struct("<i")
_INT16: Final = struct.Struct("<h")
_INT64: Final = struct.Struct("<q")
_UINT16: Final = struct.Struct("<H")
_UINT32: Final = struct.Struct("<I")
_UINT64: Final = struct.Struct("<Q")
_NULL: Final = INT32.pack(-1)
_INT32_RANGE: Final = range(-(2**31), 2**31)
#: 5 groups of 7 bits hold 31.
_LONGEST_GROUPS: Final = 5
_T = TypeVar("_T")
_RECEIVED_AT_ONCE: Final = 65536


class Cursor:
    """Reads numbers and texts one after the other from complete bytes."""

    __slots__ = ("at", "data", "end", "what")

    def __init__(self, data: BytesLike, what: str, at: int = 0) -> None:
        self.data = data
        #: What the bytes are, for errors.
        self.what = what
        self.at = at
        self.end = len(data)

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self.end - self.at

    def step(self, size: int, where: str) -> int:
        """Skip bytes, and return where they begin.

        :raises Truncated: there are fewer.
        """
        at = self.at
        if size > self.end - at:
            raise Truncated(self.what, where, size, self.end - at)
        self.at = at + size
        return at

    def take(self, size: int, where: str) -> bytes:
        """Return a copy of the next bytes."""
        at = self.step(size, where)
        return bytes(self.data[at : at + size])

    def _number(self, layout: struct.Struct, where: str) -> int:
        number: int = layout.unpack_from(self.data, self.step(layout.size, where))[0]
        return number

    def uint8(self, where: str) -> int:
        return self.data[self.step(1, where)]

    def int16(self, where: str) -> int:
        return self._number(_INT16, where)

    def uint16(self, where: str) -> int:
        return self._number(_UINT16, where)

    def int32(self, where: str) -> int:
        return self._number(INT32, where)

    def uint32(self, where: str) -> int:
        return self._number(_UINT32, where)

    def int64(self, where: str) -> int:
        return self._number(_INT64, where)

    def uint64(self, where: str) -> int:
        return self._number(_UINT64, where)

    def bool(self, where: str) -> bool:
        return self.uint8(where) != 0

    def count(self, least_size: int, where: str) -> int:
        """Return a count of things that take at least `least_size` bytes each.

        :raises Malformed: the remaining bytes cannot hold that count.
        """
        number = self.int32(where)
        most = self.left // max(least_size, 1)
        if not 0 <= number <= most:
            raise Malformed(self.what, where, f"0 to {most}", number)
        return number

    def bytes(self, where: str) -> bytes:
        """Return bytes with a length of 4 bytes before them."""
        return self.take(self.count(1, f"length of {where}"), where)

    def optional_text(self, where: str) -> str | None:
        """Return a text with a length of 4 bytes before it; -1 is None."""
        size = self.int32(f"length of {where}")
        if size == -1:
            return None
        if not 0 <= size <= self.left:
            expected = f"-1 to {self.left}"
            raise Malformed(self.what, f"length of {where}", expected, size)
        return utf8(self.take(size, where), self.what, where)

    def text(self, where: str) -> str:
        """Return a text that may not be null."""
        text = self.optional_text(where)
        if text is None:
            raise Malformed(self.what, where, "a text", "none")
        return text

    def short_text(self, where: str) -> str:
        """Return a text whose length is in groups of 7 bits, the lowest first."""
        size = 0
        for group in range(_LONGEST_GROUPS):
            byte = self.uint8(f"length of {where}")
            size |= (byte & 0x7F) << 7 * group
            if byte < 0x80:  # noqa: PLR2004 - the bit that says that another group follows
                break
        else:
            raise Malformed(self.what, f"length of {where}", "at most 5 bytes", "more")
        if size > self.left:
            raise Truncated(self.what, where, size, self.left)
        return utf8(self.take(size, where), self.what, where)


def utf8(data: bytes, what: str, where: str) -> str:
    """Return a text.

    :raises Malformed: the bytes are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(what, where, "UTF-8", f"byte {error.object[error.start]:#x}") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption("text", text, str(error)) from None


def pack_text(text: str | None) -> bytes:
    """Return a text with its length in 4 bytes before it; None is the length -1.

    :raises InvalidOption: it has halves of characters.
    """
    if text is None:
        return _NULL
    data = _encoded(text)
    return INT32.pack(len(data)) + data


def pack_short_text(text: str) -> bytes:
    """Return a text with its length in groups of 7 bits before it.

    :raises InvalidOption: it has halves of characters.
    """
    data = _encoded(text)
    size = len(data)
    groups = bytearray()
    while size > 0x7F:  # noqa: PLR2004 - what one group can hold
        groups.append(size & 0x7F | 0x80)
        size >>= 7
    groups.append(size)
    return bytes(groups) + data


def check_int32(name: str, value: int) -> int:
    """Return the value.

    :raises InvalidOption: it does not fit in 32 bits.
    """
    if value not in _INT32_RANGE:
        raise InvalidOption(name, value, "must fit in 32 bits")
    return value


def hear_one(connection: Connection, decoder: Decoder[_T]) -> _T | None:
    """Return the first record of a peer; None if it disconnects.

    :raises Malformed: it does not follow the format.
    :raises TimeoutError: it does not come within the time limit of the connection.
    """
    view = memoryview(bytearray(_RECEIVED_AT_ONCE))
    while count := connection.receive(view):
        if found := decoder.feed(bytes(view[:count])):
            connection.welcome()
            return found[0]
    return None


class Decoder(ABC, Generic[_T]):
    """Takes the bytes of one direction of a connection in any pieces, and returns whole records.

    It buffers what has come, and refuses a length above its limit before it waits for the bytes.
    """

    #: What the stream is, for errors.
    what = "psi stream"

    def __init__(self) -> None:
        #: Why the bytes after the last record cannot be read.
        self.fault: Malformed | None = None
        self._held = bytearray()
        #: Bytes that the next record needs, as far as is known.
        self._needed = 1

    @property
    def held(self) -> int:
        """Bytes of a record that is not complete yet."""
        return len(self._held)

    def feed(self, data: BytesLike) -> list[_T]:
        """Take bytes, and return the complete records.

        Records before a fault are still returned; the next call raises the fault.

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
        """Note the end of the stream.

        :raises Truncated: they ended within a record.
        :raises Malformed: they did not follow the format.
        """
        if self.fault is not None:
            raise self.fault
        if self._held:
            raise Truncated(self.what, "the end", self._needed, len(self._held))

    @abstractmethod
    def _parse(self, view: memoryview, records: list[_T]) -> int:
        """Append the complete records, set `_needed`, and return the bytes that they took."""


class StepDecoder(Decoder[_T]):
    """A decoder written as a generator, which yields the bytes that it needs next."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[_T] = []
        self._inside = False
        self._is_done = False
        #: Bytes after the last possible record; they are dropped.
        self.surplus = 0
        self._steps = self._read()
        self._needed = next(self._steps)

    @abstractmethod
    def _read(self) -> Generator[int, bytes, None]:
        """Yield a number to receive that many bytes; call `_give` with each record."""

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
