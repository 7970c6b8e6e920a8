"""What became of each message of an outbox, and how does that survive kill -9 and power cuts?"""

from __future__ import annotations

import enum
import itertools
import logging
import mmap
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.whole_files import sync_names, write_whole
from penstock.dispatch.outbox.log import CLASSES
from penstock.queue.log.recovery import set_aside
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.dispatch.outbox.log import OutboxLog

__all__ = [
    "BLOCK",
    "UNKNOWN",
    "Contents",
    "Floor",
    "Marks",
    "Notes",
    "Reason",
    "StateFile",
    "load_notes",
    "newest_slot",
    "pack_notes",
    "read_notes",
    "save_notes",
    "where_to_go_on",
]

log = logging.getLogger(__name__)

#: Messages per block.
BLOCK: Final = 1024
_SHIFT: Final = 10
_MASK: Final = BLOCK - 1


class Reason(enum.IntEnum):
    """Why a message is no longer queued."""

    #: The receiver's transport accepted it.
    ACKED = 1
    #: It expired.
    EXPIRED = 2
    #: It was evicted for a message of a higher class.
    QUEUE_FULL = 3
    #: It failed with an error that no retry can fix.
    PERMANENT = 4
    #: An operator dropped it.
    ADMIN = 5
    #: Its subscription is gone.
    GONE = 6
    #: A newer message of its key replaced it.
    SUPERSEDED = 7
    #: Its bytes on the disk are missing or corrupt.
    DAMAGED = 8


#: The mark of a queued message is its class, or this while its class is unknown.
UNKNOWN: Final = CLASSES
#: The mark of a settled message is this plus its reason.
_SETTLED: Final = 0x40
#: The mark of a number that is not assigned yet.
_NONE: Final = 0x80
_NEW_BLOCK: Final = bytes((_NONE,)) * BLOCK
_not_settled = re.compile(b"[^%c-%c]" % (_SETTLED, _SETTLED + len(Reason))).search
_VALID: Final = bytes([*range(UNKNOWN + 1), *(_SETTLED + r for r in Reason), _NONE])
_SETTLED_MARKS: Final = bytes([*(_SETTLED + r for r in Reason), _NONE])


class Marks:
    """A byte for each message from the `floor` on, in blocks: its class, or why it is settled.

    The marks are both the map of settled messages and the index of priorities. All messages below
    the floor are settled; only their counts are kept.
    """

    __slots__ = ("above", "ahead", "below", "blocks", "changes", "floor", "head", "queued")

    def __init__(self, floor: int = 0, below: Sequence[int] | None = None) -> None:
        self.floor = self.head = floor
        #: Messages below the floor and above it, by reason.
        self.below = [0] * (len(Reason) + 1) if below is None else list(below)
        self.above = [0] * (len(Reason) + 1)
        #: Settled messages above the floor, in all.
        self.ahead = 0
        #: Queued messages by class.
        self.queued = [0] * (CLASSES + 1)
        self.blocks: dict[int, bytearray] = {}
        #: Number of changes above the floor.
        self.changes = 0

    def __contains__(self, seq: int) -> bool:
        """Tell whether a message is settled."""
        if seq < self.floor:
            return True
        block = self.blocks.get(seq >> _SHIFT)
        return block is not None and block[seq & _MASK] & _SETTLED != 0

    def class_of(self, seq: int) -> int:
        """Return the class of a message that is queued."""
        return self.blocks[seq >> _SHIFT][seq & _MASK]

    def append(self, classes: Sequence[int]) -> None:
        """Add queued messages of these classes at the head."""
        data = bytes(classes)
        at, end = self.head, self.head + len(data)
        done = 0
        while at < end:
            number, start = at >> _SHIFT, at & _MASK
            stop = min(BLOCK, start + end - at)
            block = self.blocks.get(number)
            if block is None:
                block = self.blocks[number] = bytearray(_NEW_BLOCK)
            block[start:stop] = data[done : done + stop - start]
            done += stop - start
            at += stop - start
        self.head = end
        self._count(data, 1)

    def _count(self, marks: bytes | bytearray, sign: int) -> None:
        """Add marks of queued messages to the counts (`sign` 1), or subtract them (-1)."""
        if not marks:
            return
        first = marks[0]
        count = marks.count(first)
        self.queued[first] += sign * count
        if count < len(marks):
            for other in range(CLASSES + 1):
                if other != first and (count := marks.count(other)):
                    self.queued[other] += sign * count

    def classify(self, seq: int, priority: int) -> None:
        """Set the class of a queued message."""
        block = self.blocks[seq >> _SHIFT]
        self.queued[block[seq & _MASK]] -= 1
        self.queued[priority] += 1
        block[seq & _MASK] = priority

    def settle(self, first: int, count: int, reason: Reason) -> None:
        """Settle a run of consecutive messages, all of them queued."""
        end = first + count
        at = first
        mark = bytes((_SETTLED + reason,))
        while at < end:
            number, start = at >> _SHIFT, at & _MASK
            stop = min(BLOCK, start + end - at)
            block = self.blocks[number]
            self._count(block[start:stop], -1)
            block[start:stop] = mark * (stop - start)
            at += stop - start
        if first == self.floor and not self.ahead:
            self.below[reason] += count
            self._go_to(end)
            return
        self._settled_above(first, count, reason)

    def settle_some(self, priority: int, seqs: Sequence[int], reason: Reason) -> None:
        """Settle queued messages of one class, given in ascending order."""
        mark, number, block = _SETTLED + reason, -1, bytearray()
        for seq in seqs:
            if seq >> _SHIFT != number:
                number = seq >> _SHIFT
                block = self.blocks[number]
            block[seq & _MASK] = mark
        self.queued[priority] -= len(seqs)
        self._settled_above(seqs[0], len(seqs), reason)

    def _settled_above(self, first: int, count: int, reason: Reason) -> None:
        self.above[reason] += count
        self.ahead += count
        self.changes += 1
        if first == self.floor:
            self._raise_floor()

    def _go_to(self, floor: int) -> None:
        for number in range(self.floor >> _SHIFT, floor >> _SHIFT):
            del self.blocks[number]
        self.floor = floor

    def _raise_floor(self) -> None:
        while self.floor < self.head:
            block = self.blocks[self.floor >> _SHIFT]
            start = self.floor & _MASK
            found = _not_settled(block, start)
            end = BLOCK if found is None else found.start()
            run = block[start:end]
            for reason in Reason:
                if count := run.count(_SETTLED + reason):
                    self.below[reason] += count
                    self.above[reason] -= count
            self.ahead -= end - start
            self._go_to(self.floor + end - start)
            if end < BLOCK:
                return

    def numbers_of(self, priority: int, at: int, end: int, most: int) -> tuple[Sequence[int], int]:
        """Return up to `most` queued messages of a class in one block, and where to continue."""
        at = max(at, self.floor)
        while at < end:
            number, start = at >> _SHIFT, at & _MASK
            stop = min(BLOCK, start + end - at)
            block = self.blocks[number]
            first = block.find(priority, start, stop)
            if first < 0:
                at += stop - start
                continue
            base = number << _SHIFT
            last = min(first + most, stop)
            if block.count(priority, first, last) == last - first:
                return range(base + first, base + last), base + last
            found: list[int] = []
            while first >= 0 and len(found) < most:
                found.append(base + first)
                first = block.find(priority, first + 1, stop)
            return found, found[-1] + 1 if first >= 0 else base + stop
        return (), end

    def count_in(self, number: int, priority: int | None = None) -> int:
        """Return how many messages of a block are queued, in one class or in all."""
        block = self.blocks.get(number)
        if block is None:
            return 0
        if priority is not None:
            return block.count(priority)
        return len(block.translate(None, _SETTLED_MARKS))

    def restore(self, blocks: Mapping[int, bytes], end: int) -> None:
        """Apply saved marks to messages below `end`, all of them queued so far."""
        for number, marks in sorted(blocks.items()):
            at = max(number << _SHIFT, self.floor)
            stop = min(number + 1 << _SHIFT, end, self.head)
            for mark, run in itertools.groupby(marks[at & _MASK : BLOCK][: max(0, stop - at)]):
                count = sum(1 for _ in run)
                if mark & _SETTLED:
                    self.settle(at, count, Reason(mark - _SETTLED))
                elif mark < CLASSES:
                    block, start = self.blocks[number], at & _MASK
                    self._count(block[start : start + count], -1)
                    block[start : start + count] = bytes((mark,)) * count
                    self.queued[mark] += count
                at += count

    def count(self, reason: Reason) -> int:
        return self.below[reason] + self.above[reason]


_MAGIC: Final = b"PNOUTBOX"
#: Version 1 had a log, a floor and counts for each class.
_VERSION: Final = 2
_HEADER: Final = struct.Struct("<8sI")
_PAGE: Final = 4096
#: A page for the header and one for each slot: devices write a page atomically.
_FILE_SIZE: Final = 3 * _PAGE

#: Generation, largest arrival number, epoch of the log, first, floor, and the counts by reason of
#: the messages from first to floor; a checksum of these follows.
_WORDS: Final = 5 + len(Reason)
_CRC: Final = struct.Struct("<I")
_WORD: Final = (1 << 64) - 1


class Floor(NamedTuple):
    """The number below which all messages of a log are settled."""

    #: The epoch of the log; 0: no log exists yet.
    epoch: int
    floor: int
    #: By reason, as in `Marks.below`.
    below: Sequence[int]


def where_to_go_on(state: Floor, messages: OutboxLog) -> tuple[Marks, str | None]:
    """Return the marks to resume with, and the fault that was found, if any.

    In doubt a message counts as unsettled, and is redelivered.
    """
    marks = Marks(state.floor, state.below)
    known = messages.successor(state.epoch, state.floor) if state.epoch else state.floor
    if known is None:
        marks.floor = messages.oldest
        return marks, "it was created anew; what the one before held is gone"
    end = min(known, messages.head)
    if marks.floor > end:
        # After a power failure these numbers are reused, and must not count as settled.
        lost = marks.floor - end
        marks.floor = end
        return marks, f"{lost} messages, which are settled, did not get to the disk"
    if marks.floor >= messages.oldest:
        return marks, None
    lost = messages.oldest - marks.floor
    marks.floor = messages.oldest
    if not state.epoch:  # the state is a new one, and knows nothing of what is not there any more
        return marks, None
    marks.below[Reason.DAMAGED] += lost
    return marks, f"{lost} messages are not there any more"


class StateFile:
    """Two slots written alternately: if a write is torn, the other slot is valid."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """Read the file if a valid one exists. Call `open` next.

        :param anew: ignore an existing file
        :raises Unsupported: a newer Penstock wrote it.
        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._map: mmap.mmap | None = None
        self._is_dirty = False
        #: Whether no valid file was found, and the fault of an invalid one.
        self.is_new = anew or not path.exists()
        self.damage: DamagedQueue | None = None
        self._buffer = bytearray(8 * _WORDS)
        if not self.is_new:
            try:
                self._buffer = newest_slot(path, _VERSION, _WORDS)
            except DamagedQueue as error:
                aside = set_aside(path)
                log.warning("%s; it was put aside as %s", error, aside)
                self.damage = error
                self.is_new = True
        self._words = memoryview(self._buffer).cast("Q")

    def open(self, *, sync: bool) -> None:
        """Map the file, creating it if it is new; from now on `keep` writes to it.

        :raises StorageError: the operating system refuses.
        """
        path = self._path
        if self.is_new:
            self.write(sync=sync)
        with storage_errors("opening", str(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(self._fd, _FILE_SIZE)
            except BaseException:
                os.close(self._fd)
                raise

    def write(self, *, sync: bool) -> None:
        """Create the file, replacing an existing one.

        :raises StorageError: the operating system refuses.
        """
        words = bytes(self._buffer)
        slot = (words + _CRC.pack(zlib.crc32(words))).ljust(_PAGE, b"\0")
        with storage_errors("creating", str(self._path)):
            # No hole in the file: a store to the mapping must not need new disk space.
            head = _HEADER.pack(_MAGIC, _VERSION).ljust(_PAGE, b"\0")
            write_whole(self._path, head + slot + slot, sync=sync)
            if sync:
                sync_names(self._path.parent)

    @property
    def last_arrival(self) -> int:
        """The largest arrival number. A new value is saved by the next `keep`."""
        return self._words[1]

    @last_arrival.setter
    def last_arrival(self, number: int) -> None:
        self._words[1] = number

    @property
    def floor(self) -> Floor:
        words = self._words.tolist()
        return Floor(words[2], words[4], [0, *words[5:]])

    def set_floor(self, epoch: int, floor: int, below: Sequence[int]) -> None:
        """Set the floor and the counts below it. The next `keep` saves them."""
        words = self._words
        words[2] = epoch
        words[3] = floor - sum(below) & _WORD
        words[4] = floor
        for i in range(1, len(below)):
            words[4 + i] = below[i]

    def keep(self) -> None:
        """Save the values so that they survive the process: a memory copy, no system call."""
        if self._map is None:
            return  # `open` writes the values
        words = self._words
        words[0] += 1
        at = _PAGE * (1 + words[0] % 2)
        buffer = self._buffer
        self._map[at : at + len(buffer) + _CRC.size] = buffer + _CRC.pack(zlib.crc32(buffer))
        self._is_dirty = True

    def sync(self) -> None:
        """Sync the file, so that it survives a power failure.

        :raises StorageError: the device refuses.
        """
        if self._is_dirty:
            self._is_dirty = False  # first: `keep` may run meanwhile
            try:
                with storage_errors("syncing", str(self._path)):
                    os.fdatasync(self._fd)
            except BaseException:
                self._is_dirty = True
                raise

    def close(self) -> None:
        """Unmap and close the file; `open` opens it again."""
        if self._map is not None:
            self._map.close()
            self._map = None
            os.close(self._fd)


def newest_slot(path: Path, version: int, words: int) -> bytearray:
    """Return the newest valid slot, of `words` words.

    :raises DamagedQueue: no slot is valid, or the header is not.
    :raises Unsupported: a newer Penstock wrote it.
    """
    with storage_errors("reading", str(path)), path.open("rb") as file:
        data = file.read(_FILE_SIZE + 1)
    name = str(path)
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamagedQueue(name, "magic", 0, _MAGIC, data[:8])
    found = _HEADER.unpack_from(data)[1]
    if found > _VERSION:
        raise Unsupported(
            f"{path} has version {found} of an outbox; this Penstock knows {_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    if found != version:
        raise DamagedQueue(name, "version", 8, version, found)
    size = 8 * words
    slots = [slot for at in (_PAGE, 2 * _PAGE) if (slot := _slot(data, at, size)) is not None]
    if len(data) != _FILE_SIZE:
        raise DamagedQueue(name, "size", 0, _FILE_SIZE, len(data))
    if not slots:
        raise DamagedQueue(name, "crc32 of both slots", _PAGE, "right", "wrong")
    return max(slots, key=lambda slot: int.from_bytes(slot[:8], "little"))


def _slot(data: bytes, at: int, size: int) -> bytearray | None:
    slot = data[at : at + size]
    checksum = data[at + size : at + size + _CRC.size]
    if len(checksum) < _CRC.size or _CRC.pack(zlib.crc32(slot)) != checksum:
        return None
    return bytearray(slot)


_NOTES_MAGIC: Final = b"PNSETTLD"
#: Version 1 had marks of settled messages only, and separate ones for each class.
_NOTES_VERSION: Final = 2
#: Magic, version, crc32 and size of the body.
_NOTES_HEADER: Final = struct.Struct("<8sIIQ")
#: The epoch of the log.
_EPOCH: Final = struct.Struct("<Q")
#: Number of a block; its mark if all are equal, else `_VARIOUS`, followed by the marks; whether
#: `_CONTENTS` follows.
_BLOCK: Final = struct.Struct("<QB?")
_VARIOUS: Final = 0xFF
#: Smallest expires_at_ms, and bytes by class.
_CONTENTS: Final = struct.Struct(f"<Q{CLASSES}Q")


class Contents(NamedTuple):
    """Summary of the queued messages of a block."""

    least_ms: int
    #: By class.
    bytes: Sequence[int]


@dataclass(slots=True)
class Notes:
    """Saved marks above the floor. Without them settled messages are redelivered."""

    epoch: int = 0
    #: The marks of all messages of a block.
    marks: dict[int, bytes] = field(default_factory=dict)
    contents: dict[int, Contents] = field(default_factory=dict)


def pack_notes(notes: Notes) -> bytes:
    """Encode notes as the bytes of their file."""
    parts = [_EPOCH.pack(notes.epoch)]
    for number, marks in notes.marks.items():
        contents = notes.contents.get(number)
        one = marks.count(marks[0]) == BLOCK
        parts.append(_BLOCK.pack(number, marks[0] if one else _VARIOUS, contents is not None))
        if not one:
            parts.append(marks)
        if contents is not None:
            parts.append(_CONTENTS.pack(contents.least_ms, *contents.bytes))
    body = b"".join(parts)
    head = _NOTES_HEADER.pack(_NOTES_MAGIC, _NOTES_VERSION, zlib.crc32(body), len(body))
    return head + body


def save_notes(path: Path, data: bytes, *, sync: bool) -> None:
    """Replace the file of notes atomically.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(path)):
        write_whole(path, data, sync=sync)


def load_notes(path: Path) -> tuple[Notes, DamagedQueue | None]:
    """Return the saved notes; if the file is damaged, set it aside, and return none and the error.

    :raises Unsupported: a newer Penstock wrote it.
    :raises StorageError: the operating system refuses.
    """
    try:
        body = read_notes(path, _NOTES_VERSION)
        return (Notes() if body is None else _unpack(str(path), body)), None
    except DamagedQueue as error:
        log.warning("%s; it was put aside as %s", error, set_aside(path))
        return Notes(), error


def read_notes(path: Path, version: int) -> memoryview | None:
    """Return the body of the file, or None if no file exists.

    :raises DamagedQueue: the file is incomplete, corrupt or of another version.
    :raises Unsupported: a newer Penstock wrote it.
    :raises StorageError: the operating system refuses.
    """
    name = str(path)
    with storage_errors("reading", name):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    if len(data) < _NOTES_HEADER.size or data[:8] != _NOTES_MAGIC:
        raise DamagedQueue(name, "magic", 0, _NOTES_MAGIC, data[:8])
    _, found, checksum, size = _NOTES_HEADER.unpack_from(data)
    if found > _NOTES_VERSION:
        raise Unsupported(
            f"{path} has version {found} of an outbox; this Penstock knows {_NOTES_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    if found != version:
        raise DamagedQueue(name, "version", 8, version, found)
    body = memoryview(data)[_NOTES_HEADER.size :]
    if len(body) != size:
        raise DamagedQueue(name, "size", 16, size, len(body))
    if zlib.crc32(body) != checksum:
        raise DamagedQueue(name, "crc32", 12, checksum, zlib.crc32(body))
    return body


def _unpack(path: str, body: memoryview) -> Notes:
    try:
        notes = Notes(*_EPOCH.unpack_from(body))
        at = _EPOCH.size
        while at < len(body):
            number, mark, is_known = _BLOCK.unpack_from(body, at)
            at += _BLOCK.size
            marks = bytes((mark,)) * BLOCK
            if mark == _VARIOUS:
                marks = bytes(body[at : at + BLOCK])
                at += BLOCK
            if len(marks) < BLOCK or marks.strip(_VALID):
                raise DamagedQueue(path, "marks", at, f"{BLOCK} marks", "something else")
            notes.marks[number] = marks
            if is_known:
                least_ms, *sizes = _CONTENTS.unpack_from(body, at)
                notes.contents[number] = Contents(least_ms, sizes)
                at += _CONTENTS.size
    except struct.error as error:
        raise DamagedQueue(path, "blocks", _NOTES_HEADER.size, "whole", error) from None
    return notes
