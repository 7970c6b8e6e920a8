"""How do floors and counts survive kill -9 without a system call?"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.whole_files import sync_names, write_whole
from penstock.dispatch.outbox.records import CLASSES
from penstock.dispatch.outbox.settled import Reason, Settled
from penstock.queue.log.recovery import set_aside
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["LaneState", "StateFile"]

log = logging.getLogger(__name__)

_MAGIC: Final = b"PNOUTBOX"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sI")
_PAGE: Final = 4096
#: A page of header, and a page for each slot: a device writes a page in one piece.
_FILE_SIZE: Final = 3 * _PAGE

#: Generation and largest arrival number; then for each lane its log's epoch, first and floor, and
#: the messages from first up to floor by reason; then the checksum of all that.
_LANE_WORDS: Final = 3 + len(Reason)
_WORDS: Final = 2 + CLASSES * _LANE_WORDS
_CRC: Final = struct.Struct("<I")
_SLOT_SIZE: Final = 8 * _WORDS + _CRC.size
_WORD: Final = (1 << 64) - 1
assert _SLOT_SIZE <= _PAGE


class LaneState(NamedTuple):
    """What is known of a lane."""

    #: The epoch of its log; 0: there is none yet.
    epoch: int
    floor: int
    #: By reason, as in `Settled.below`.
    below: Sequence[int]


class StateFile:
    """Two slots that are written in turn. Whatever is cut short, the other one is whole."""

    def __init__(self, path: Path) -> None:
        """Read it, if there is one that can be used. `open` is to follow.

        :raises Unsupported: a newer Penstock made it.
        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._map: mmap.mmap | None = None
        self._is_dirty = False
        #: Whether there was one, and what was wrong with it.
        self.is_new = not path.exists()
        self.damage: DamagedQueue | None = None
        self._buffer = bytearray(8 * _WORDS)
        if not self.is_new:
            try:
                self._buffer = _newest(path)
            except DamagedQueue as error:
                aside = set_aside(path)
                log.warning("%s; it was put aside as %s", error, aside)
                self.damage = error
                self.is_new = True
        self._words = memoryview(self._buffer).cast("Q")

    def open(self, *, sync: bool) -> None:
        """Make the file if it is new; from now on what is kept is in it.

        :raises StorageError: the operating system refuses.
        """
        path = self._path
        if self.is_new:
            _make(path, bytes(self._buffer), sync=sync)
        with storage_errors("opening", str(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(self._fd, _FILE_SIZE)
            except BaseException:
                os.close(self._fd)
                raise

    @property
    def last_arrival(self) -> int:
        """The largest arrival number; what is set is kept with the next `keep`."""
        return self._words[1]

    @last_arrival.setter
    def last_arrival(self, number: int) -> None:
        self._words[1] = number

    def lane(self, priority: int) -> LaneState:
        at = 2 + priority * _LANE_WORDS
        words = self._words[at : at + _LANE_WORDS].tolist()
        return LaneState(words[0], words[2], [0, *words[3:]])

    def set_lane(self, priority: int, epoch: int, settled: Settled) -> None:
        """Take over the floor of a lane and what is below it. `keep` keeps it."""
        words, at = self._words, 2 + priority * _LANE_WORDS
        below = settled.below
        words[at] = epoch
        words[at + 1] = settled.floor - sum(below) & _WORD
        words[at + 2] = settled.floor
        for i in range(1, len(below)):
            words[at + 2 + i] = below[i]

    def keep(self) -> None:
        """Make what was set outlive this process: a copy in memory, no system call."""
        if self._map is None:
            return  # the file is made with it
        words = self._words
        words[0] += 1
        at = _PAGE * (1 + words[0] % 2)
        buffer = self._buffer
        self._map[at : at + _SLOT_SIZE] = bytes(buffer) + _CRC.pack(zlib.crc32(buffer))
        self._is_dirty = True

    def sync(self) -> None:
        """Return when it would outlive the machine.

        :raises StorageError: the device refuses.
        """
        if self._is_dirty:
            self._is_dirty = False
            with storage_errors("syncing", str(self._path)):
                os.fdatasync(self._fd)

    def close(self) -> None:
        """Let go of the file; `open` takes it again."""
        if self._map is not None:
            self._map.close()
            self._map = None
            os.close(self._fd)


def _newest(path: Path) -> bytearray:
    """Return the newest slot that is whole.

    :raises DamagedQueue: there is none.
    """
    with storage_errors("reading", str(path)), path.open("rb") as file:
        data = file.read(_FILE_SIZE + 1)
    name = str(path)
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamagedQueue(name, "magic", 0, _MAGIC, data[:8])
    version = _HEADER.unpack_from(data)[1]
    if version > _VERSION:
        raise Unsupported(
            f"{path} has version {version} of an outbox; this Penstock knows {_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    slots = [slot for at in (_PAGE, 2 * _PAGE) if (slot := _slot(data, at)) is not None]
    if len(data) != _FILE_SIZE:
        raise DamagedQueue(name, "size", 0, _FILE_SIZE, len(data))
    if not slots:
        raise DamagedQueue(name, "crc32 of both slots", _PAGE, "right", "wrong")
    return max(slots, key=lambda slot: int.from_bytes(slot[:8], "little"))


def _slot(data: bytes, at: int) -> bytearray | None:
    slot = data[at : at + 8 * _WORDS]
    checksum = data[at + 8 * _WORDS : at + _SLOT_SIZE]
    if len(checksum) < _CRC.size or _CRC.pack(zlib.crc32(slot)) != checksum:
        return None
    return bytearray(slot)


def _make(path: Path, words: bytes, *, sync: bool) -> None:
    slot = (words + _CRC.pack(zlib.crc32(words))).ljust(_PAGE, b"\0")
    with storage_errors("creating", str(path)):
        # Written, not left as a hole: a store to the mapping then needs no space.
        head = _HEADER.pack(_MAGIC, _VERSION).ljust(_PAGE, b"\0")
        write_whole(path, head + slot + slot, sync=sync)
        if sync:
            sync_names(path.parent)
