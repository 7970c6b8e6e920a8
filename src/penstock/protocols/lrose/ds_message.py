"""What is in a message of LROSE's servers?

A `DsMessage` is a header and any number of parts, each with a type of its own
(docs/specs/lrose.md 2.3).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import InvalidOption, Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Category",
    "CommonPart",
    "DsMessage",
    "ErrorCode",
    "Part",
    "StatusRequest",
    "error_reply",
    "int_part",
    "is_known_category",
    "text_part",
]

_WHAT = "DsMessage"

#: type, subType, mode, flags, majorVersion, minorVersion, serialNum, category, error, nParts,
#: partsAre64Bit, spare[5].
_HEADER: Final = struct.Struct(">11i20x")
#: dataType, offset from the start of the message, len, spare[3].
_PART_32: Final = struct.Struct(">3i12x")
_PART_64: Final = struct.Struct(">3q24x")
_INT: Final = struct.Struct(">i")
#: From this size on a message has 64-bit headers.
_SMALL_LIMIT: Final = 2**31 - 1
#: Parts are padded to a multiple of this, with at least one byte.
_ALIGNMENT: Final = 8
_PADDING: Final = bytes(_ALIGNMENT)


class Category(IntEnum):
    """The category of a message."""

    GENERIC = 8389420
    SERVER_STATUS = 8389421
    START_PUT = 8389422
    START_GET = 8389423
    END_SERIES = 8389424
    #: The last one that LROSE's servers accept.
    OTHER = 8389425


_CATEGORIES: Final = range(Category.GENERIC, Category.OTHER + 1)


def is_known_category(category: int) -> bool:
    """Tell whether LROSE's servers accept messages of this category."""
    return category in _CATEGORIES


class StatusRequest(IntEnum):
    """Types of messages of the category `SERVER_STATUS` (docs/specs/lrose.md 2.4)."""

    IS_ALIVE = 0
    CLIENT_COUNT = 1
    SHUTDOWN = 2


class CommonPart(IntEnum):
    """Parts that all servers share. Texts end with a NUL, which their length includes."""

    URL = 1
    VERSION = 2
    SERIAL = 4
    ERR_STRING = 8
    STRING = 16
    INT = 32
    CLIENT_USER = 64
    CLIENT_HOST = 128
    CLIENT_IPADDR = 256


class ErrorCode(IntEnum):
    """Values of `error`, besides a service's own -1."""

    NONE = 0
    FAILED = -1
    SERVICE_DENIED = 0x08000000
    BAD_MESSAGE = 0x10000000
    SERVER_ERROR = 0x20000000
    UNKNOWN_COMMAND = 0x40000000
    #: 0x80000000 as a signed 32-bit number.
    NOT_SUPPORTED = -0x80000000


class Part(NamedTuple):
    """One part of a message."""

    type: int
    data: bytes

    @property
    def text(self) -> str:
        """The text in it: up to its NUL; bytes that are not UTF-8 as `os.fsdecode` gives them."""
        return bytes(self.data).partition(b"\0")[0].decode(errors="surrogateescape")

    @property
    def number(self) -> int:
        """The number in a part of the type `INT`; 0 if it is too short for one."""
        return (
            int.from_bytes(self.data[: _INT.size], signed=True)
            if len(self.data) >= _INT.size
            else 0
        )


def text_part(type: int, text: str) -> Part:
    """Return a part with a text and its NUL."""
    return Part(type, text.encode(errors="surrogateescape") + b"\0")


def int_part(value: int) -> Part:
    """Return a part of the type `INT`."""
    return Part(CommonPart.INT, _INT.pack(value))


class DsMessage(NamedTuple):
    """One request, or one reply."""

    type: int
    sub_type: int = -1
    mode: int = -1
    flags: int = 0
    major_version: int = 1
    minor_version: int = 0
    serial_num: int = -1
    category: int = Category.GENERIC
    error: int = ErrorCode.NONE
    parts: tuple[Part, ...] = ()

    def parts_of(self, type: int) -> list[Part]:
        """Return the parts of one type, in order."""
        return [part for part in self.parts if part.type == type]

    def part(self, type: int) -> Part | None:
        """Return the first part of a type, or None."""
        return next((part for part in self.parts if part.type == type), None)

    @property
    def error_text(self) -> str | None:
        """The text of the error, if any."""
        part = self.part(CommonPart.ERR_STRING)
        return None if part is None else part.text

    def to_bytes(self, *, wide: bool = False) -> bytes:
        """Encode the message; `wide` uses 64-bit headers for a small one, too.

        :raises InvalidOption: a field does not fit in 32 bits.
        """
        parts = self.parts
        if not parts:
            return self._header(0, wide=False)
        sizes = [len(part.data) for part in parts]
        body = sum([size // _ALIGNMENT + 1 for size in sizes]) * _ALIGNMENT
        wide = wide or _HEADER.size + len(parts) * _PART_32.size + body >= _SMALL_LIMIT
        layout = _PART_64 if wide else _PART_32
        at = _HEADER.size + len(parts) * layout.size
        headers = [self._header(len(parts), wide=wide)]
        bodies: list[bytes] = []
        try:
            for (type, data), size in zip(parts, sizes, strict=True):
                headers.append(layout.pack(type, at, size))
                padding = _ALIGNMENT - size % _ALIGNMENT
                bodies += (data, _PADDING[:padding])
                at += size + padding
        except struct.error as error:
            raise InvalidOption("part", type, str(error)) from None
        return b"".join(headers + bodies)

    def _header(self, n_parts: int, *, wide: bool) -> bytes:
        try:
            return _HEADER.pack(*self[:9], n_parts, wide)
        except struct.error as error:
            raise InvalidOption("message", self[:9], str(error)) from None

    @classmethod
    def head_of(cls, data: bytes) -> Self:
        """Decode a message without its parts.

        :raises Malformed: it is shorter than a header.
        """
        if len(data) < _HEADER.size:
            raise Malformed(_WHAT, "length", f"at least {_HEADER.size} bytes", len(data))
        return cls(*_HEADER.unpack_from(data)[:9])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode a message.

        :raises Malformed: it is truncated, or a part is out of bounds or overlaps another.
        """
        if len(data) < _HEADER.size:
            raise Malformed(_WHAT, "length", f"at least {_HEADER.size} bytes", len(data))
        *fields, n_parts, wide = _HEADER.unpack_from(data)
        if wide not in {0, 1}:
            raise Malformed(_WHAT, "partsAre64Bit", "0 or 1", wide)
        if n_parts == 0:
            return cls(*fields)
        layout = _PART_64 if wide else _PART_32
        start = _HEADER.size + n_parts * layout.size
        # The count is untrusted: nothing is allocated before the bytes for it are there.
        if n_parts < 0 or start > len(data):
            most = (len(data) - _HEADER.size) // layout.size
            raise Malformed(_WHAT, "nParts", f"0 to {most}", n_parts)
        headers = layout.iter_unpack(memoryview(data)[_HEADER.size : start])
        return cls(*fields, tuple(_parts(data, headers, start)))  # type: ignore[call-arg]


def _parts(data: bytes, headers: Iterator[tuple[int, ...]], start: int) -> list[Part]:
    parts: list[Part] = []
    room = len(data) - start
    for type, offset, size in headers:
        # Parts do not overlap, so no more bytes are copied than were received.
        if not 0 <= size <= room:
            raise Malformed(_WHAT, f"len of part {len(parts)}", f"0 to {room}", size)
        if not start <= offset <= len(data) - size:
            where = f"{start} to {len(data) - size}"
            raise Malformed(_WHAT, f"offset of part {len(parts)}", where, offset)
        room -= size
        parts.append(Part(type, data[offset : offset + size]))
    return parts


def error_reply(
    type: int, sub_type: int, error: int, text: str | None = None, *, mode: int = -1
) -> DsMessage:
    """Return the reply that reports why a request failed."""
    parts = () if text is None else (text_part(CommonPart.ERR_STRING, text),)
    return DsMessage(type, sub_type, mode, error=error, parts=parts)
