"""What does a server do with a queue of its machine, whatever its layout?"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed
from penstock.core.position import Position
from penstock.protocols.lrose.fmq_wire import SeekTo
from penstock.queue.classic.compression import decompress
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.wide.queue_file import file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.lrose.fmq_messages import Messages
    from penstock.protocols.lrose.sessions import Encoded

__all__ = [
    "MOST_BYTES",
    "MOST_MESSAGES",
    "OPENING",
    "PLACES",
    "ServedQueue",
    "layout_of",
    "unpacked",
]

#: A reply ends with the message that goes beyond one of these (spec lrose 2.5).
MOST_MESSAGES: Final = 100
MOST_BYTES: Final = 1_000_000
#: Opening a queue may wait so long (seconds) for a lock.
OPENING: Final = 5.0

#: Where SEEK goes, but for BACK.
PLACES: Final = {
    SeekTo.START: Position.START,
    SeekTo.END: Position.END,
    SeekTo.LAST: Position.LAST,
}


def layout_of(path: str) -> str | None:
    """Tell the layout of a queue, or None if there is none."""
    if os.path.exists(file_of(path)):  # noqa: PTH110 - a Path refuses some names
        return "wide"
    has_stat = os.path.exists(f"{path}.stat")  # noqa: PTH110
    return "classic" if has_stat or shared_memory_key(path) is not None else None


def unpacked(messages: Messages, limit: int) -> list[bytes]:
    """Return the payloads of messages, decompressed.

    :raises Malformed: one of them is not what it says it is, or is larger than the limit.
    """
    payloads = list(messages.payloads)
    for row, is_compressed in enumerate(messages.pre_compressed):
        if is_compressed and payloads[row]:
            said = messages.uncompressed_lens[row]
            payloads[row] = decompress(payloads[row], limit)
            if len(payloads[row]) != said:
                raise Malformed("DsFmq message", "uncompressedLen", len(payloads[row]), said)
    return payloads


class ServedQueue(ABC):
    """One client's view of a queue: a place to read at, and a way to append."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: Messages that the last call of `append` appended, also if it failed.
        self.appended = 0
        #: How often the queue was created anew before the messages that `take` returned last.
        self.restarts = 0
        #: Appends a payload that is not compressed, of a type and a subtype, and lies between two
        #: places of a buffer; returns its number, or None: that takes more, and nothing is done.
        #: There is no such way where all takes more.
        self.append_plain: Callable[[bytearray, int, int, int, int], int | None] | None = None

    @abstractmethod
    def take(self, wanted: int, most: int) -> Encoded:
        """Return what is there from here on, up to the limits; of one type only if that is >= 0.

        As the reply to a READ, which is `NOTHING_THERE` if there is nothing.
        """

    @abstractmethod
    def seek(self, place: SeekTo) -> None:
        """Go somewhere."""

    @abstractmethod
    def seek_after_id(self, id: int) -> None:
        """Go behind a message.

        :raises PositionError: it is not there.
        """

    @abstractmethod
    def append(self, messages: Messages, payloads: Sequence[bytes], first: int) -> int:
        """Append the messages from number `first` on, and return the id of the last.

        :raises LockTimeout: another writer is in the way just now.
        :raises WriteTimeout: the reader that is waited for is behind.
        """

    @abstractmethod
    def set_blocking(self) -> None:
        """Wait for the reader from now on instead of overwriting."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
