"""How is a psi message sent in UDP datagrams? (docs/specs/psi.md 5)

A message is a set of chunks. A receiver assembles one set at a time, and cannot ask for a lost
chunk. Unlike psi's, `Unchunker` ignores duplicates, and late chunks of an abandoned set do not
abandon the current one.
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
#: Set id, chunk count, chunk number, and 28 unused bytes.
_HEADER: Final = struct.Struct("<qHH28x")
CHUNK_HEADER_SIZE: Final = _HEADER.size
MAX_DATAGRAM: Final = 65536 - 40
CHUNK_PAYLOAD: Final = MAX_DATAGRAM - CHUNK_HEADER_SIZE
_MOST_CHUNKS: Final = 65535
#: Finished sets whose late chunks are recognized.
_REMEMBERED: Final = 1024
_MAX_SET_BYTES: Final = 1 << 28
#: A set id that is further ahead is refused: it would ruin the count of missing sets.
_FARTHEST: Final = 1 << 32


class Chunk(NamedTuple):
    """One datagram."""

    #: Counts from 0 at each sender.
    set_id: int
    chunk_count: int
    #: From 0.
    number: int
    payload: bytes


def decode_chunk(datagram: BytesLike) -> Chunk:
    """Decode a datagram.

    :raises Malformed: it is no chunk, or its number or size does not fit its set.
    """
    if len(datagram) < CHUNK_HEADER_SIZE:
        raise Truncated(_WHAT, "header", CHUNK_HEADER_SIZE, len(datagram))
    set_id, count, number = _HEADER.unpack_from(datagram)
    size = len(datagram) - CHUNK_HEADER_SIZE
    if set_id < 0:
        raise Malformed(_WHAT, "id", "0 or more", set_id)
    if not number < count:
        raise Malformed(_WHAT, "number", f"below the count of {count}", number)
    # All but the last are full: a chunk's offset is its number times this size.
    if size > CHUNK_PAYLOAD or (number < count - 1 and size != CHUNK_PAYLOAD):
        raise Malformed(_WHAT, "payload", f"{CHUNK_PAYLOAD} bytes", size)
    return Chunk(set_id, count, number, bytes(datagram[CHUNK_HEADER_SIZE:]))


class Chunker:
    """Cuts messages into datagrams, without psi's truncation of some sizes."""

    def __init__(self, first_id: int = 0) -> None:
        self.next_id = first_id

    def split(self, data: BytesLike) -> list[bytes]:
        """Return the datagrams of a message, or of a session id.

        :raises MessageTooLarge: it needs more than 65,535 chunks.
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
    """Counters of an `Unchunker`.

    Datagrams: `datagrams` = `used` + `refused` + `duplicate` + `late`. Sets: every id from the
    first to the highest seen is `completed`, `abandoned`, `missing` or `under_way`.
    """

    datagrams: int
    #: Datagrams that became part of a set.
    used: int
    #: Malformed datagrams, and those of a set that is too large.
    refused: int
    #: Duplicates of chunks of the current set.
    duplicate: int
    #: Datagrams of a finished set.
    late: int
    #: Sets that were assembled.
    completed: int
    #: Sets of which some chunks did not come: lost.
    abandoned: int
    #: Sets of which no chunk came, by their ids: lost.
    missing: int
    #: 1 while a set is incomplete.
    under_way: int

    @property
    def lost(self) -> int:
        """Messages known to be lost."""
        return self.abandoned + self.missing


class Unchunker:
    """Assembles one set of chunks at a time, and counts lost sets."""

    def __init__(self, max_bytes: int = _MAX_SET_BYTES, *, first_id: int = 0) -> None:
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        #: Why the last datagram was refused.
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
        """Take a datagram, and return the message that it completes, if any.

        It never raises: see `statistics` and `last_fault`.
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
            # A complete set: the current one need not be abandoned.
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
        """Abandon the current set, as at the end of a connection."""
        if self._chunks:
            self._abandoned += 1
            self._end(self._set_id)
            self._forget()

    def statistics(self) -> UnchunkerStatistics:
        """Return the counts so far."""
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
