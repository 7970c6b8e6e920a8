"""Where in its bytes are a message's attributes, its id and its payload?"""

from __future__ import annotations

from typing import Final

__all__ = ["ID_SIZE", "places", "tagged", "with_attributes"]

#: Bytes of the id with its tags, which are the first of the attributes.
ID_SIZE: Final = 20
_ID_BEGINS: Final = b"\x0a\x12\x09"


def places(raw: bytes) -> tuple[int, int, int] | None:
    """Find the attributes' begin and end, and the payload's begin, 0 for none.

    :returns: None when something is not where it usually is, or is cut off, or the id is not of
        version 7: that is left to the protobuf library, and to the rules.
    """
    try:
        length, begin = raw[1], 2
        if length > 0x7F:  # noqa: PLR2004 - a varint goes on, here and below
            length, begin = length & 0x7F | raw[2] << 7, 3
            if raw[2] > 0x7F:  # noqa: PLR2004
                return None
        end = begin + length
        if (
            raw[0] != 0x0A  # noqa: PLR2004
            or length < ID_SIZE
            or not raw.startswith(_ID_BEGINS, begin)
            or raw[begin + 11] != 0x11  # noqa: PLR2004
            or raw[begin + 4] >> 4 != 7  # noqa: PLR2004
            or raw[begin + 19] >> 6 != 2  # noqa: PLR2004
        ):
            return None
        if end == len(raw):
            return begin, end, 0
        at, size, shift = end, 0x80, 0
        length = 0
        while size > 0x7F and shift < 28:  # noqa: PLR2004
            at += 1
            size = raw[at]
            length |= (size & 0x7F) << shift
            shift += 7
    except IndexError:
        return None
    at += 1
    return (begin, end, at) if raw[end] == 0x12 and at + length == len(raw) else None  # noqa: PLR2004


def with_attributes(raw: bytes, begin: int, end: int, attributes: bytes) -> bytes:
    """Return a message whose attributes behind the id are others; `places` found them."""
    tag = tagged(1, ID_SIZE + len(attributes))
    return b"".join((tag, raw[begin : begin + ID_SIZE], attributes, raw[end:]))


def tagged(field: int, length: int) -> bytes:
    """Return what stands before the bytes of a field of protobuf, whose number is below 16."""
    tag = bytearray((field << 3 | 2,))
    while length > 0x7F:  # noqa: PLR2004 - a varint goes on
        tag.append(length & 0x7F | 0x80)
        length >>= 7
    tag.append(length)
    return bytes(tag)
