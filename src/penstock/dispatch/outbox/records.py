"""Which bytes of a lane's log are one message of an outbox?"""

from __future__ import annotations

import struct
from functools import partial
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.message import Message

__all__ = [
    "CLASSES",
    "OVERHEAD",
    "Columns",
    "Entry",
    "Item",
    "decode",
    "encode",
    "items_of",
    "key_of",
]

#: Priority classes, CS0 to CS6.
CLASSES: Final = 7

#: Arrival number, expires_at_ms, stored_ms, source key, type of message, flags, and nothing yet.
_HEADER: Final = struct.Struct("<QQQQBB6x")
#: Behind the header, with the flag: which others it takes the place of.
_KEY: Final = struct.Struct("<Q")
_HAS_KEY: Final = 1

#: Bytes of a record that are not the message's own, at most.
OVERHEAD: Final = _HEADER.size + _KEY.size

_pack, _unpack = _HEADER.pack, _HEADER.unpack_from
_SIZE: Final = _HEADER.size


class Entry(NamedTuple):
    """A message that is to be stored for a receiver."""

    #: Its class, 0 to 6: CS0 to CS6.
    priority: int
    #: Its number in the order of arrival; 0: the one after the largest.
    arrival: int
    #: When it is of no use any more, milliseconds since 1970 UTC; 0: never.
    expires_at_ms: int
    #: Where it comes from, as a number of 64 bits: those of one source keep their order.
    source: int
    #: The kind of message, 0 to 255.
    type: int
    #: The message itself.
    raw: bytes


class Item(NamedTuple):
    """A message that is stored."""

    priority: int
    #: Its number in the log of its class.
    seq: int
    arrival: int
    expires_at_ms: int
    #: When it was stored, milliseconds since 1970 UTC.
    stored_ms: int
    source: int
    type: int
    raw: bytes


#: As `Item._make`, at a third of its time.
_item = cast("Callable[[tuple[Any, ...]], Item]", partial(tuple.__new__, Item))


class Columns(NamedTuple):
    """Messages of an `append`, as one sequence for each field of `Entry`. That is fast."""

    priorities: Sequence[int]
    arrivals: Sequence[int]
    times: Sequence[int]
    sources: Sequence[int]
    types: Sequence[int]
    raws: Sequence[bytes]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Columns:
        """Return the columns of messages, of which there is at least one."""
        return cls(*zip(*entries, strict=True))

    def entries(self) -> list[Entry]:
        """Return the messages one by one."""
        return list(map(Entry._make, zip(*self, strict=True)))

    def first(self, count: int) -> Columns:
        """Return those of the first messages."""
        return self if count == len(self.raws) else Columns._make(column[:count] for column in self)

    def of_class(self, priority: int) -> Columns:
        """Return those of the messages of a class."""
        rows = (row for row in zip(*self, strict=True) if row[0] == priority)
        return Columns(*zip(*rows, strict=True))


def encode(columns: Columns, stored_ms: int, key: int | None = None) -> list[bytes]:
    """Return the records of messages; all have the key, if there is one.

    :raises ValueError: a number does not fit.
    """
    _, arrivals, times, sources, types, raws = columns
    rows = zip(arrivals, times, sources, types, raws, strict=True)
    try:
        if key is None:
            return [_pack(n, ms, stored_ms, source, t, 0) + raw for n, ms, source, t, raw in rows]
        tail = _KEY.pack(key)
        return [
            _pack(n, ms, stored_ms, source, t, _HAS_KEY) + tail + raw
            for n, ms, source, t, raw in rows
        ]
    except struct.error as error:
        raise ValueError(f"a number of a message does not fit: {error}") from None


def items_of(columns: Columns, first: int, stored_ms: int) -> list[Item]:
    """Return messages of one class as they are stored, from this number on."""
    priorities, arrivals, times, sources, types, raws = columns
    numbers = range(first, first + len(raws))
    rows = zip(
        priorities, numbers, arrivals, times, repeat(stored_ms), sources, types, raws, strict=False
    )
    return list(map(_item, rows))


def decode(message: Message, priority: int, keys: dict[int, int]) -> Item | None:
    """Return what a record holds, and add its key, if it has one; None when it is no record."""
    payload = message.payload
    if len(payload) < _SIZE:
        return None
    arrival, expires_at_ms, stored_ms, source, kind, flags = _unpack(payload)
    start = _SIZE
    if flags:
        if flags != _HAS_KEY or len(payload) < OVERHEAD:
            return None
        (keys[message.seq],) = _KEY.unpack_from(payload, _SIZE)
        start = OVERHEAD
    raw = payload[start:]
    return _item((priority, message.seq, arrival, expires_at_ms, stored_ms, source, kind, raw))


def key_of(key: int | bytes) -> int:
    """Return the number that stands for a key: 64 bits."""
    if isinstance(key, int):
        return key & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
