"""What is known of the messages above the floors, for the next who opens an outbox?"""

from __future__ import annotations

import logging
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.whole_files import write_whole
from penstock.dispatch.outbox.records import CLASSES
from penstock.dispatch.outbox.settled import BLOCK, Reason
from penstock.queue.log.recovery import set_aside
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LaneNotes", "load_notes", "pack_notes", "save_notes"]

log = logging.getLogger(__name__)

_MAGIC: Final = b"PNSETTLD"
_VERSION: Final = 1
#: Magic, version, crc32 of what follows, and its size.
_HEADER: Final = struct.Struct("<8sIIQ")
#: Class, epoch, blocks with marks, blocks whose contents are known.
_LANE: Final = struct.Struct("<QQQQ")
_NUMBER: Final = struct.Struct("<Q")
#: Number of a block, smallest expires_at_ms of its messages, bytes of them.
_CONTENTS: Final = struct.Struct("<QQQ")
_REASONS: Final = bytes(range(len(Reason) + 1))


@dataclass(slots=True)
class LaneNotes:
    """What is kept of one lane. Nothing of it is needed: without it messages come again."""

    epoch: int = 0
    #: The reason of each settled message, by the number of the block.
    marks: dict[int, bytes] = field(default_factory=dict)
    #: Smallest expires_at_ms and bytes of whole blocks in which nothing is settled.
    contents: dict[int, tuple[int, int]] = field(default_factory=dict)


def pack_notes(lanes: dict[int, LaneNotes]) -> bytes:
    """Return the bytes of the file."""
    parts = []
    for priority, notes in lanes.items():
        parts.append(_LANE.pack(priority, notes.epoch, len(notes.marks), len(notes.contents)))
        for number, marks in notes.marks.items():
            parts += (_NUMBER.pack(number), marks)
        parts += (_CONTENTS.pack(number, *known) for number, known in notes.contents.items())
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body), len(body)) + body


def save_notes(path: Path, data: bytes, *, sync: bool) -> None:
    """Keep them, whole at any moment.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(path)):
        write_whole(path, data, sync=sync)


def load_notes(path: Path) -> tuple[dict[int, LaneNotes], DamagedQueue | None]:
    """Return what was kept; nothing, and why, when it cannot be used: then it is put aside.

    :raises Unsupported: a newer Penstock made it.
    :raises StorageError: the operating system refuses.
    """
    with storage_errors("reading", str(path)):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return {}, None
    try:
        return _unpack(str(path), data), None
    except DamagedQueue as error:
        log.warning("%s; it was put aside as %s", error, set_aside(path))
        return {}, error


def _unpack(path: str, data: bytes) -> dict[int, LaneNotes]:
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamagedQueue(path, "magic", 0, _MAGIC, data[:8])
    _, version, checksum, size = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise Unsupported(
            f"{path} has version {version} of an outbox; this Penstock knows {_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    body = memoryview(data)[_HEADER.size :]
    if len(body) != size:
        raise DamagedQueue(path, "size", 16, size, len(body))
    if zlib.crc32(body) != checksum:
        raise DamagedQueue(path, "crc32", 12, checksum, zlib.crc32(body))
    try:
        return _lanes(path, body)
    except struct.error as error:
        raise DamagedQueue(path, "blocks", _HEADER.size, "whole", error) from None


def _lanes(path: str, body: memoryview) -> dict[int, LaneNotes]:
    lanes: dict[int, LaneNotes] = {}
    at = 0
    while at < len(body):
        priority, epoch, marked, known = _LANE.unpack_from(body, at)
        if priority >= CLASSES or priority in lanes:
            raise DamagedQueue(path, "class", at, f"below {CLASSES}, once", priority)
        at += _LANE.size
        notes = lanes[priority] = LaneNotes(epoch)
        for _ in range(marked):
            (number,) = _NUMBER.unpack_from(body, at)
            at += _NUMBER.size
            marks = bytes(body[at : at + BLOCK])
            if len(marks) < BLOCK or marks.strip(_REASONS):
                raise DamagedQueue(path, "marks", at, f"{BLOCK} reasons", "something else")
            notes.marks[number] = marks
            at += BLOCK
        for _ in range(known):
            number, least_ms, size = _CONTENTS.unpack_from(body, at)
            notes.contents[number] = (least_ms, size)
            at += _CONTENTS.size
    return lanes
