"""How does psi write numbers and texts?

Little-endian, without any padding. A text has its length before it: in 4 bytes on psi's own
channels (spec psi 1), in groups of 7 bits at rendezvous, clock and interop (spec psi 10).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import Truncated

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike

__all__ = ["INT32", "Cursor", "check_int32", "pack_short_text", "pack_text", "utf8"]

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


class Cursor:
    """Reads one thing after the other from bytes that are all there."""

    __slots__ = ("at", "data", "end", "what")

    def __init__(self, data: BytesLike, what: str, at: int = 0) -> None:
        self.data = data
        #: What the bytes are, in the words of an error.
        self.what = what
        self.at = at
        self.end = len(data)

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self.end - self.at

    def step(self, size: int, where: str) -> int:
        """Pass over so many bytes, and return where they begin.

        :raises Truncated: there are not so many.
        """
        at = self.at
        if size > self.end - at:
            raise Truncated(self.what, where, size, self.end - at)
        self.at = at + size
        return at

    def take(self, size: int, where: str) -> bytes:
        """Return so many bytes, as a copy."""
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
        """Return how many things follow, which need at least so many bytes each.

        :raises Malformed: there cannot be so many.
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
        """Return a text that must be there."""
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
