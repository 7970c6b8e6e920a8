"""Which segments has a log, and how does a new one begin?"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import DamagedQueue, NotFound
from penstock.core.whole_files import open_new, sync_names
from penstock.queue.storage import storage_errors
from penstock.queue.wide.creation import boot_id
from penstock.queue.wide.layout import (
    ALIGN,
    HEADER,
    PAGE,
    SLOT,
    Geometry,
    HeaderFlag,
    State,
    check_header,
    state_of,
)
from penstock.queue.wide.queue_file import SUFFIX, QueueFile, new_header, write_new_file

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.layout import Rows

__all__ = [
    "Segment",
    "begin_segment",
    "disk_bytes",
    "look",
    "numbers_of",
    "open_segment",
    "path_of",
]

_NAME: Final = re.compile(rf"(\d{{20}}){re.escape(SUFFIX)}", re.ASCII)
#: A sequence number has 63 bits.
_NUMBERS_END: Final = 1 << 63
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, as it was a moment ago."""

    path: Path
    #: The number of its first message, which is its name.
    first: int
    #: Its messages are those from `tail` up to `head` - 1.
    tail: int
    head: int
    state: State
    epoch: int
    #: When its oldest and its newest message were appended; None when it has none.
    oldest_ns: int | None
    newest_ns: int | None
    #: Bytes of the buffer that messages have taken.
    used: int
    #: Bytes on the disk.
    disk: int
    geometry: Geometry

    @property
    def count(self) -> int:
        return self.head - self.tail


def path_of(folder: Path, first: int) -> Path:
    """Return the file of the segment that begins with this message."""
    return folder / f"{first:020d}{SUFFIX}"


def numbers_of(folder: Path) -> list[int]:
    """Return the first message of every segment, in order; none if there is no directory."""
    with storage_errors("looking at", str(folder)):
        try:
            names = os.listdir(folder)  # noqa: PTH208 - there may be many, and names will do
        except (FileNotFoundError, NotADirectoryError):
            return []
    numbers = (int(match[1]) for match in map(_NAME.fullmatch, names) if match)
    return sorted(number for number in numbers if number < _NUMBERS_END)


def disk_bytes(path: Path) -> int:
    """Return what a file takes of the disk; 0 when it is gone."""
    try:
        return path.stat().st_blocks * _BLOCK
    except FileNotFoundError:
        return 0


def look(folder: Path, first: int) -> Segment:
    """Look at a segment without mapping it.

    :raises NotFound: it is gone.
    :raises DamagedQueue: it is no segment, or not the one of its name.
    """
    path = path_of(folder, first)
    with storage_errors("looking at", str(path)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(path) from None
        try:
            return _look(path, first, descriptor)
        finally:
            os.close(descriptor)


def _missing(path: Path) -> NotFound | DamagedQueue:
    """Tell that a segment is gone, and not that its name leads nowhere: who would look again?"""
    if path.is_symlink():
        return DamagedQueue(str(path), "the file", 0, "a segment", "a link to nothing")
    return NotFound(f"there is no segment {path}")


def _look(path: Path, first: int, descriptor: int) -> Segment:
    status = os.fstat(descriptor)
    page = os.pread(descriptor, PAGE, 0)
    geometry = check_header(str(path), page, status.st_size)
    fields = np.frombuffer(page, HEADER, 1)
    header = fields[0]
    _check_first(path, first, int(header["first_seq"]))
    tail, head = int(header["tail"]), int(header["head"])
    oldest = newest = None
    used = 0
    if head > tail:
        oldest = int(_slot(descriptor, geometry, tail)["created_ns"])
        last = _slot(descriptor, geometry, head - 1)
        newest = int(last["created_ns"])
        end = int(last["position"]) + int(last["block"]) + int(last["length"])
        used = min(-(-end // ALIGN) * ALIGN, geometry.buffer_size)
    return Segment(
        path,
        first,
        tail,
        head,
        State(state_of(fields)),
        int(header["epoch"]),
        oldest,
        newest,
        used,
        status.st_blocks * _BLOCK,
        geometry,
    )


def _slot(descriptor: int, geometry: Geometry, seq: int) -> np.void:
    at = geometry.slots_offset + seq % geometry.slots * SLOT.itemsize
    slot: Rows = np.frombuffer(os.pread(descriptor, SLOT.itemsize, at), SLOT, 1)
    found: np.void = slot[0]
    return found


def _check_first(path: Path, first: int, found: int) -> None:
    if found != first:
        hint = "the file has another's name"
        raise DamagedQueue(str(path), "first_seq", 96, first, found, hint=hint)


def open_segment(folder: Path, first: int, *, to_write: bool = False) -> QueueFile:
    """Map a segment.

    :raises NotFound: it is gone.
    :raises DamagedQueue: it is no segment, or not the one of its name.
    """
    path = path_of(folder, first)
    name = str(path)
    try:
        file = QueueFile.open(name, writable=True) if to_write else QueueFile.open_to_read(name)
    except NotFound:
        raise _missing(path) from None
    try:
        _check_first(path, first, file.field("first_seq"))
    except BaseException:
        file.close()
        raise
    return file


def begin_segment(folder: Path, settings: Settings, first: int, *, sync: bool) -> QueueFile:
    """Make the segment that begins with this message, and map it. The caller is the log's writer.

    It has its name only when it is whole. With `sync` both are on the disk when this returns. One
    that is there and has no message, of a writer that died just then, is used.

    :raises StorageError: there is no space, or no permission.
    """
    path = path_of(folder, first)
    with contextlib.suppress(NotFound, DamagedQueue):
        file = open_segment(folder, first, to_write=True)
        if file.field("head") == first and file.field("epoch") == settings.epoch:
            return file
        file.close()
    geometry = settings.geometry
    unfinished = folder / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new"
    with storage_errors("creating", str(path)):
        # Who may look into the folder may read what is in it.
        descriptor = open_new(unfinished, folder.stat().st_mode & 0o666)
        try:
            write_new_file(descriptor, _header(settings, geometry, first), geometry, sparse=True)
            if sync:
                os.fsync(descriptor)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if sync:
            sync_names(folder)
    return open_segment(folder, first, to_write=True)


def _header(settings: Settings, geometry: Geometry, first: int) -> bytes:
    flags = HeaderFlag.SPARSE | HeaderFlag.KEEPS
    if settings.crc:
        flags |= HeaderFlag.CRC
    page = bytearray(
        new_header(geometry, flags, settings.compress, settings.stream, first, settings.epoch)
    )
    header = np.frombuffer(page, HEADER, 1)
    header["boot_id"] = np.void(boot_id().ljust(16, b"\0"))
    return bytes(page)
