"""Which bytes is a cursor, and in which order are they stored?"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption
from penstock.queue.wide import _ring

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CHECK_AT",
    "ENTRY_SIZE",
    "FREE",
    "NAMED",
    "PASSING",
    "POSITION_AT",
    "Entries",
    "check_word",
    "encode_name",
]

#: One entry: state, pid, epoch, position, updated_ns, name. For looking at only: what is stored
#: goes in field by field, each number in one store, so that nobody ever sees half of one.
_ENTRY: Final = struct.Struct("<IIQQq96s")
ENTRY_SIZE: Final = _ENTRY.size
POSITION_AT: Final = 16
_NAME_AT: Final = 32
_LONGEST_NAME: Final = 95
#: The checksum of a named entry is in the last word of the name, unless that is so long.
CHECK_AT: Final = 120
_CHECKED_NAME: Final = CHECK_AT - _NAME_AT
_HALF: Final = 1 << 32

FREE: Final = 0
NAMED: Final = 1
PASSING: Final = 2

#: An entry that changes hands each time it is looked at is shown as it was seen last.
_LOOKS: Final = 8


class Entries:
    """The bytes of a table. The order of the stores leaves it whole if one is the last."""

    def __init__(self, memory: memoryview) -> None:
        """Use these bytes.

        :raises InvalidOption: they are read-only, not aligned, or not whole entries.
        """
        _check_memory(memory)
        self._bytes = memory.cast("B")
        self._halves = self._bytes.cast("I")
        self._words = self._bytes.cast("Q")
        self._times = self._bytes.cast("q")
        self.count = len(self._bytes) // ENTRY_SIZE

    def in_state(self, state: int) -> Iterator[int]:
        return (index for index in range(self.count) if self._halves[index * 32] == state)

    def index_of(self, name: bytes) -> int | None:
        """Return the entry of this name, also if only its checksum is still of that name."""
        padded = name + b"\0"
        for index in self.in_state(NAMED):
            at = index * ENTRY_SIZE + _NAME_AT
            if self._bytes[at : at + len(padded)] == padded:
                return index
        for index in self.in_state(NAMED):
            word = self._words[index * 16 + 15]
            if word and self._checked(index) is None:
                epoch, seq = self.epoch(index), self._words[index * 16 + 2]
                if check_word(name, epoch, seq) == word:
                    return index
        return None

    def look(self, index: int) -> tuple[int, int, int, int, int, bytes]:
        """Return state, pid, epoch, position, time and name, of one moment if at all possible."""
        at = index * ENTRY_SIZE
        head = None
        for _ in range(_LOOKS):
            seq = self.seq(index)
            data = bytes(self._bytes[at : at + ENTRY_SIZE])
            if data[:POSITION_AT] == head:
                break
            head = data[:POSITION_AT]
        state, pid, epoch, _, updated_ns, name = _ENTRY.unpack(data)
        return state, pid, epoch, seq, updated_ns, name.partition(b"\0")[0]

    def is_whole(self, index: int) -> bool:
        """Tell whether an entry passes its checksum, if it has one."""
        return self._checked(index) is not None

    def _checked(self, index: int) -> int | None:
        """Return the position that an entry's checksum vouches for; None: for none.

        It is stored before the position. So the checksum of a position near to the one that is
        there means that who moved it was killed between, or that a bit of the position changed.
        """
        at = index * ENTRY_SIZE
        for _ in range(_LOOKS):
            word, seq = self._words[index * 16 + 15], self._words[index * 16 + 2]
            has_none = self._halves[index * 32] != NAMED or self._bytes[at + CHECK_AT - 1] != 0
            if has_none or word == 0:
                return seq
            name = bytes(self._bytes[at + _NAME_AT : at + CHECK_AT])
            ahead = ((word >> 32) - seq + _HALF // 2) % _HALF - _HALF // 2
            known = seq + ahead
            if 0 <= known < 1 << 64 and check_word(name, self.epoch(index), known) == word:
                return known
        return None

    def raw(self, index: int) -> bytes:
        """Return the bytes of an entry."""
        return bytes(self._bytes[index * ENTRY_SIZE : (index + 1) * ENTRY_SIZE])

    def protect(self, index: int) -> None:
        """Give a named entry its checksum. The caller owns it, and nothing else moves it."""
        check = self._check_of(index, self.epoch(index), self._words[index * 16 + 2])
        if check:
            self._words[index * 16 + 15] = check

    def _check_of(self, index: int, epoch: int, seq: int) -> int:
        """Return the checksum of an entry that stands there; 0: its name leaves no room for one."""
        at = index * ENTRY_SIZE
        if self._bytes[at + CHECK_AT - 1]:
            return 0
        return check_word(bytes(self._bytes[at + _NAME_AT : at + CHECK_AT]), epoch, seq)

    def pid(self, index: int) -> int:
        return self._halves[index * 32 + 1]

    def epoch(self, index: int) -> int:
        return self._words[index * 16 + 1]

    def seq(self, index: int) -> int:
        seq = self._checked(index)
        return self._words[index * 16 + 2] if seq is None else seq

    def start(self, index: int, name: bytes, epoch: int, seq: int, pid: int) -> None:
        """Take an entry, with its state last: until then it is as free as it was."""
        self.free(index)
        self.move(index, seq, epoch)
        self.set_owner(index, pid)
        at = index * ENTRY_SIZE
        self._bytes[at + _NAME_AT : at + ENTRY_SIZE] = name.ljust(ENTRY_SIZE - _NAME_AT, b"\0")
        if name:
            self.protect(index)
        self._halves[index * 32] = NAMED if name else PASSING

    def set_owner(self, index: int, pid: int) -> None:
        self._times[index * 16 + 3] = time.time_ns()
        self._halves[index * 32 + 1] = pid

    def move(self, index: int, seq: int, epoch: int | None) -> None:
        check = 0
        if self._halves[index * 32] == NAMED:
            check = self._check_of(index, self.epoch(index) if epoch is None else epoch, seq)
        if check:  # between these stores it has none
            self._words[index * 16 + 15] = 0
        self._words[index * 16 + 2] = seq
        if epoch is not None:
            # After the position: should this store never come, the old epoch tells that the
            # position is not to be trusted. The other way round an old position would be.
            self._words[index * 16 + 1] = epoch
        if check:
            self._words[index * 16 + 15] = check
        self._times[index * 16 + 3] = time.time_ns()

    def free(self, index: int) -> None:
        self._halves[index * 32] = FREE

    def close(self) -> None:
        for view in (self._times, self._words, self._halves, self._bytes):
            view.release()


def check_word(name: bytes, epoch: int, seq: int) -> int:
    """Return the checksum of an entry: half of the position, and of all three a CRC-32C."""
    content = struct.pack(f"<{_CHECKED_NAME}sQQ", name, epoch, seq)
    return (seq % _HALF) << 32 | _ring.crc32c(content) or 1


def encode_name(name: str) -> bytes:
    """Return a name as it is stored.

    :raises InvalidOption: it cannot be.
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidOption("cursor", name, "cannot be written in UTF-8") from None
    if not encoded:
        raise InvalidOption("cursor", name, "must not be empty")
    if b"\0" in encoded:
        raise InvalidOption("cursor", name, "must not contain a zero byte")
    if len(encoded) > _LONGEST_NAME:
        reason = f"must be at most {_LONGEST_NAME} bytes in UTF-8, this has {len(encoded)}"
        raise InvalidOption("cursor", name, reason)
    return encoded


def _check_memory(memory: memoryview) -> None:
    size = memory.nbytes
    if memory.readonly:
        raise InvalidOption("memory", size, "is read-only")
    if not size or size % ENTRY_SIZE:
        raise InvalidOption("memory", size, f"must be a multiple of {ENTRY_SIZE} bytes")
    # Only a word at its own boundary is stored in one piece.
    if ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 8:
        raise InvalidOption("memory", size, "must start at a multiple of 8 bytes")
