"""What is one message?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.core.stream_id import StreamId

__all__ = ["Message"]


class Message(NamedTuple):
    """One payload of bytes with its header.

    A named tuple, because a reader makes one for every message that passes.
    """

    #: Position in the queue: 64 bits, unwrapped, only grows within one epoch of the queue.
    seq: int
    #: When it happened at the source ("originating time"), nanoseconds since 1970 UTC.
    time_ns: int
    #: When it was appended to this queue, nanoseconds since 1970 UTC.
    created_ns: int
    #: The sender's own kind of message, any signed 32-bit number.
    type: int
    #: A finer kind within `type`, any signed 32-bit number.
    subtype: int
    #: The stream it belongs to, where that is known.
    stream: StreamId | None
    #: The opaque header of the protocol it came by, where there was one.
    attributes: bytes | None
    #: The bytes themselves.
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes in the payload."""
        return len(self.payload)
