"""What are the bytes of a classic (LROSE) queue? (docs/specs/lrose.md 1.2 to 1.7)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "BUFFER_COOKIE",
    "FRAME_EXTRA",
    "FRAME_HEAD",
    "FREE_SLOT",
    "ID_COUNT",
    "LAST_ID_READ_OFFSET",
    "MAX_BUFFER",
    "MAX_SLOTS",
    "MESSAGE_MAGIC",
    "SLOT_SIZE",
    "STATUS_MAGIC",
    "STATUS_SIZE",
    "Slot",
    "Slots",
    "Status",
    "decode_slots",
    "id_distance",
    "slot_checksums_hold",
    "slot_offset",
    "stat_size",
    "unwrap",
]

STATUS_MAGIC: Final = 88008801
MESSAGE_MAGIC: Final = 88008802
#: Content of a new buffer's start, before the first message.
BUFFER_COOKIE: Final = struct.pack(">i", MESSAGE_MAGIC)

STATUS_SIZE: Final = 56
SLOT_SIZE: Final = 40
LAST_ID_READ_OFFSET: Final = 48

#: Frame of a message in the buffer: cookie and slot number, payload, padding, id.
FRAME_HEAD: Final = 8
FRAME_EXTRA: Final = 12

#: Ids count from 0 to ID_COUNT - 1, and then wrap around.
ID_COUNT: Final = 1_000_000_000

#: Everything is a signed 32-bit number.
MAX_BUFFER: Final = 2**31 - 1
MAX_SLOTS: Final = (2**31 - 1 - STATUS_SIZE) // SLOT_SIZE

_STATUS = struct.Struct(">14i")
_SLOT = struct.Struct(">10i")
_WORD = 0xFFFFFFFF


def _signed(word: int) -> int:
    """Truncate a sum to a signed 32-bit number."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word


class Status(NamedTuple):
    """The 14 words at the head of `.stat`."""

    magic_cookie: int
    youngest_id: int
    youngest_slot: int
    oldest_slot: int
    nslots: int
    buf_size: int
    begin_insert: int
    end_insert: int
    begin_append: int
    append_mode: int
    time_written: int
    blocking_write: int
    last_id_read: int
    checksum: int

    @classmethod
    def of_empty_queue(cls, nslots: int, buf_size: int, now: int) -> Status:
        empty = cls(
            STATUS_MAGIC, -1, -1, -1, nslots, buf_size, 0, 0, 0, 1, now, blocking_write=0,
            last_id_read=0, checksum=0,
        )  # fmt: skip
        return empty.sealed()

    @classmethod
    def decode(cls, data: bytes) -> Status:
        return cls._make(_STATUS.unpack(data))

    def encode(self) -> bytes:
        return _STATUS.pack(*self)

    def sealed(self) -> Status:
        """Return the status with its checksum computed."""
        return self._replace(checksum=self.computed_checksum())

    def computed_checksum(self) -> int:
        # last_id_read is left out on purpose: a reader patches it in place
        # (docs/specs/lrose.md 1.5).
        return _signed(
            self.magic_cookie
            + ~self.youngest_id
            + self.youngest_slot
            + ~self.oldest_slot
            + self.nslots
            + self.buf_size
            + ~self.begin_insert
            + self.end_insert
            + ~self.begin_append
            + self.append_mode
            + self.time_written
            + ~self.blocking_write
        )

    @property
    def is_all_freed(self) -> bool:
        """True if all messages were freed: the next one will be the oldest."""
        following = 0 if self.youngest_slot >= self.nslots - 1 else self.youngest_slot + 1
        return self.youngest_id >= 0 and self.begin_append == 0 and self.oldest_slot == following

    @property
    def checksum_holds(self) -> bool:
        """True if the checksum is correct, or 0: old writers computed none."""
        return self.checksum in (0, self.computed_checksum())


class Slot(NamedTuple):
    """The 10 words of one message in the slot table."""

    active: int
    id: int
    time: int
    msg_len: int
    stored_len: int
    offset: int
    type: int
    subtype: int
    compress: int
    checksum: int

    @classmethod
    def decode(cls, data: bytes) -> Slot:
        return cls._make(_SLOT.unpack(data))

    def encode(self) -> bytes:
        return _SLOT.pack(*self)

    def computed_checksum(self) -> int:
        return _signed(
            self.active
            + ~self.id
            + self.time
            + ~self.msg_len
            + self.stored_len
            + self.offset
            + ~self.type
            + self.subtype
            + ~self.compress
        )


#: A free slot is zeros with the checksum of zeros, never a checksum of 0 (docs/specs/lrose.md 1.4).
FREE_SLOT: Final = _SLOT.pack(*[0] * 9, -4)

#: Many slots at once: a table of n rows and the ten columns of `Slot`.
Slots: TypeAlias = "npt.NDArray[np.int64]"


def decode_slots(data: bytes) -> Slots:
    """Decode a run of slots into a table, one row per slot."""
    return np.frombuffer(data, dtype=">i4").reshape(-1, len(Slot._fields)).astype(np.int64)


def slot_checksums_hold(slots: Slots) -> npt.NDArray[np.bool_]:
    """Return for each slot whether its checksum is correct, or 0 (old writers)."""
    # +1 for each of the four fields that go in inverted: ~x == -x - 1.
    computed = slots[:, (0, 2, 4, 5, 7)].sum(axis=1) - slots[:, (1, 3, 6, 8)].sum(axis=1) - 4
    stored = slots[:, 9]
    holds: npt.NDArray[np.bool_] = (stored == 0) | ((computed - stored) & _WORD == 0)
    return holds


def slot_offset(slot: int) -> int:
    """Return the offset of a slot in `.stat`."""
    return STATUS_SIZE + SLOT_SIZE * slot


def stat_size(nslots: int) -> int:
    """Return the size of `.stat` for `nslots` slots."""
    return STATUS_SIZE + SLOT_SIZE * nslots


def id_distance(a: int, b: int) -> int:
    """Return the shortest distance from id `b` to `a` around the ids; negative if `a` is behind."""
    distance = (a - b) % ID_COUNT
    return distance - ID_COUNT if distance > ID_COUNT // 2 else distance


def unwrap(id: int, near: int) -> int:
    """Return the sequence number of an id: the one with that remainder nearest to `near`."""
    return max(near + id_distance(id, near), id)
