"""How does a psi message travel in UDP datagrams? (spec psi 5)

Each is cut into a set of chunks. psi's receiver puts one set together at a time and has no way to
ask for a lost chunk. Ours follows it, but for its faults: a chunk that comes twice is not counted
as two, and what is left of a set that was given up does not push out the one under way.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed, MessageTooLarge
from penstock.protocols.psi.errors import Truncated

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike

__all__ = [
    "CHUNK_HEADER_SIZE",
    "CHUNK_PAYLOAD",
    "MAX_DATAGRAM",
    "Chunk",
    "Chunker",
    "Unchunker",
    "UnchunkerStatistics",
    "decode_chunk",
]

_WHAT: Final = "psi datagram"
#: id, count, number, and 28 bytes that psi never sets.
_HEADER: Final = struct.Struct("<qHH28x")
CHUNK_HEADER_SIZE: Final = _HEADER.size
MAX_DATAGRAM: Final = 65536 - 40
CHUNK_PAYLOAD: Final = MAX_DATAGRAM - CHUNK_HEADER_SIZE
_MOST_CHUNKS: Final = 65535
#: Sets that are over and whose stragglers are known for it.
_REMEMBERED: Final = 1024
_MAX_SET_BYTES: Final = 1 << 28
#: No sender gets so many sets ahead while nothing arrives: such an id is garbage, and would ruin
#: the count of what is missing.
_FARTHEST: Final = 1 << 32


class Chunk(NamedTuple):
    """One datagram."""

    #: Of the set; counts from 0 at each sender.
    set_id: int
    chunk_count: int
    #: From 0.
    number: int
    payload: bytes


def decode_chunk(datagram: BytesLike) -> Chunk:
    """Take a datagram apart.

    :raises Malformed: it is no chunk, or cannot be of such a set.
    """
    if len(datagram) < CHUNK_HEADER_SIZE:
        raise Truncated(_WHAT, "header", CHUNK_HEADER_SIZE, len(datagram))
    set_id, count, number = _HEADER.unpack_from(datagram)
    size = len(datagram) - CHUNK_HEADER_SIZE
    if set_id < 0:
        raise Malformed(_WHAT, "id", "0 or more", set_id)
    if not number < count:
        raise Malformed(_WHAT, "number", f"below the count of {count}", number)
    # All but the last are full, or their places in the message would not be known.
    if size > CHUNK_PAYLOAD or (number < count - 1 and size != CHUNK_PAYLOAD):
        raise Malformed(_WHAT, "payload", f"{CHUNK_PAYLOAD} bytes", size)
    return Chunk(set_id, count, number, bytes(datagram[CHUNK_HEADER_SIZE:]))


class Chunker:
    """Cuts messages into datagrams, with psi's fault at some sizes left out."""

    def __init__(self, first_id: int = 0) -> None:
        self.next_id = first_id

    def split(self, data: BytesLike) -> list[bytes]:
        """Return the datagrams of one message, or of a session id.

        :raises MessageTooLarge: more chunks would be needed than can be counted.
        """
        view = memoryview(data)
        count = max(1, -(-len(view) // CHUNK_PAYLOAD))
        if count > _MOST_CHUNKS:
            raise MessageTooLarge(
                len(view), _MOST_CHUNKS * CHUNK_PAYLOAD, hint="send it by tcp: UDP cannot hold it"
            )
        set_id, self.next_id = self.next_id, self.next_id + 1
        return [
            _HEADER.pack(set_id, count, number)
            + view[number * CHUNK_PAYLOAD : (number + 1) * CHUNK_PAYLOAD]
            for number in range(count)
        ]


class UnchunkerStatistics(NamedTuple):
    """Books of an `Unchunker`.

    Datagrams: `datagrams` = `used` + `refused` + `duplicate` + `late`. Sets: every id from the
    first to the highest seen is `completed`, `abandoned`, `missing` or `under_way`.
    """

    datagrams: int
    #: Datagrams that became part of a set, whatever became of it.
    used: int
    #: Datagrams that are no chunks, or of a set that is too large.
    refused: int
    #: Datagrams that came again while their set was put together.
    duplicate: int
    #: Datagrams of a set that was over.
    late: int
    #: Sets that were delivered.
    completed: int
    #: Sets of which some chunks came and others did not: lost.
    abandoned: int
    #: Sets of which nothing came, as far as the ids tell: lost.
    missing: int
    #: 1 while a set is incomplete.
    under_way: int

    @property
    def lost(self) -> int:
        """Messages lost, as far as is known."""
        return self.abandoned + self.missing


class Unchunker:
    """Puts one set of chunks together at a time, and counts what is lost."""

    def __init__(self, max_bytes: int = _MAX_SET_BYTES, *, first_id: int = 0) -> None:
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        #: What was wrong with the last datagram that was refused.
        self.last_fault: Malformed | None = None
        self._first_id = first_id
        self._highest = first_id - 1
        self._set_id = -1
        self._count = 0
        self._chunks: dict[int, bytes] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        self._datagrams = self._used = self._refused = self._duplicate = self._late = 0
        self._completed = self._abandoned = 0

    def feed(self, datagram: BytesLike) -> bytes | None:
        """Take a datagram, and return the message that it makes whole, if any.

        Whatever is in it, nothing is raised: see `statistics` and `last_fault`.
        """
        self._datagrams += 1
        try:
            chunk = decode_chunk(datagram)
            self._check(chunk)
        except Malformed as fault:
            self._refused += 1
            self.last_fault = fault
            return None
        set_id, count, number, payload = chunk
        if set_id in self._over:
            self._late += 1
            return None
        self._highest = max(self._highest, set_id)
        if count == 1 and set_id != self._set_id:
            # Whole by itself: what is under way can stay.
            self._used += 1
            self._completed += 1
            self._end(set_id)
            return payload
        if set_id != self._set_id:
            self.abandon()
            self._set_id, self._count = set_id, count
        elif number in self._chunks:
            self._duplicate += 1
            return None
        self._used += 1
        self._chunks[number] = payload
        if len(self._chunks) < count:
            return None
        message = b"".join(self._chunks[number] for number in range(count))
        self._completed += 1
        self._end(set_id)
        self._forget()
        return message

    def abandon(self) -> None:
        """Give up what is under way, such as at the end of a connection."""
        if self._chunks:
            self._abandoned += 1
            self._end(self._set_id)
            self._forget()

    def statistics(self) -> UnchunkerStatistics:
        """Return what came and what was lost so far."""
        under_way = int(bool(self._chunks))
        seen = self._highest - self._first_id + 1
        missing = max(0, seen - self._completed - self._abandoned - under_way)
        return UnchunkerStatistics(
            self._datagrams,
            self._used,
            self._refused,
            self._duplicate,
            self._late,
            self._completed,
            self._abandoned,
            missing,
            under_way,
        )

    def _check(self, chunk: Chunk) -> None:
        if (chunk.chunk_count - 1) * CHUNK_PAYLOAD > self.max_bytes:
            most = self.max_bytes // CHUNK_PAYLOAD + 1
            raise Malformed(_WHAT, "count", f"at most {most}", chunk.chunk_count)
        last = self._highest + _FARTHEST
        if not self._first_id <= chunk.set_id <= last:
            raise Malformed(_WHAT, "id", f"{self._first_id} to {last}", chunk.set_id)
        if chunk.set_id == self._set_id and chunk.chunk_count != self._count:
            raise Malformed(_WHAT, "count", f"{self._count} as before", chunk.chunk_count)

    def _end(self, set_id: int) -> None:
        self._over[set_id] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _forget(self) -> None:
        self._set_id, self._count, self._chunks = -1, 0, {}
