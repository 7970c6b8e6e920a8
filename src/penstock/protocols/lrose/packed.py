"""How are several messages packed into one, as Fmq2MultMsgFmq packs a queue?

The body of such a message is a `DsMessage`, with a part for each message (docs/specs/lrose.md 2.7).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ds_message import DsMessage, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PACKED_SUBTYPE", "PACKED_TYPE", "PackedMessage", "pack", "unpack"]

#: Type and subtype of a packed message of a queue. The body has the same type, and each of its
#: parts the other number.
PACKED_TYPE: Final = 888999
PACKED_SUBTYPE: Final = 777888

#: Only messages of servers have a category.
_NO_CATEGORY: Final = 0
#: Type and subtype of the message in a part; its bytes, never compressed, follow.
_HEADER: Final = struct.Struct(">2i")


class PackedMessage(NamedTuple):
    """One of the messages in a packed one."""

    type: int
    subtype: int
    payload: bytes


def pack(messages: Iterable[PackedMessage]) -> bytes:
    """Return the body of a message of `PACKED_TYPE` and `PACKED_SUBTYPE`.

    :raises InvalidOption: a type or a subtype does not fit in 32 bits.
    """
    return DsMessage(
        PACKED_TYPE, category=_NO_CATEGORY, parts=tuple(map(_part, messages))
    ).to_bytes()


def _part(message: PackedMessage) -> Part:
    try:
        header = _HEADER.pack(message.type, message.subtype)
    except struct.error:
        kinds = (message.type, message.subtype)
        raise InvalidOption("type, subtype", kinds, "must fit in 32 bits") from None
    return Part(PACKED_SUBTYPE, header + message.payload)


def unpack(body: bytes) -> list[PackedMessage]:
    """Return the messages in a packed one, in order. Their total size never exceeds its size.

    :raises Malformed: it is not such a body.
    """
    message = DsMessage.from_bytes(body)
    if message.type != PACKED_TYPE:
        raise Malformed("packed message", "type", PACKED_TYPE, message.type)
    found = []
    for part in message.parts_of(PACKED_SUBTYPE):
        if len(part.data) < _HEADER.size:
            raise Malformed(
                "packed message", "part", f"at least {_HEADER.size} bytes", len(part.data)
            )
        type, subtype = _HEADER.unpack_from(part.data)
        found.append(PackedMessage(type, subtype, part.data[_HEADER.size :]))
    return found
