"""Which segments has a log, and how does one begin and end?"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import DamagedQueue, NotFound, Unsupported
from penstock.core.whole_files import open_new, share_as_folder, sync_names
from penstock.queue.log.settings import SETTINGS
from penstock.queue.storage import storage_errors
from penstock.queue.wide.creation import new_header, write_new_file
from penstock.queue.wide.file import (
    SUFFIX,
    Geometry,
    Header,
    QueueFile,
    boot_id,
    check_head,
    check_header,
    mark,
    store_state,
    unpack_slot,
)
from penstock.queue.wide.layout import HEADER, PAGE, SLOT, HeaderFlag, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.layout import Slot

__all__ = [
    "Segment",
    "begin_segment",
    "disk_bytes",
    "evict",
    "is_log",
    "look",
    "no_log",
    "numbers_of",
    "open_segment",
    "path_of",
    "remove_segment",
    "seal",
    "slot_at",
]

log = logging.getLogger(__name__)

_NAME: Final = re.compile(rf"(\d{{20}}){re.escape(SUFFIX)}", re.ASCII)
#: A sequence number has 63 bits.
_NUMBERS_END: Final = 1 << 63
_BLOCK: Final = 512
#: Flags of `fallocate`: free the blocks of a range, and keep the file's size.
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A snapshot of a segment."""

    path: Path
    #: The number of its first message, which is its name.
    first: int
    #: Its messages are those from `tail` up to `head` - 1.
    tail: int
    head: int
    state: State
    epoch: int
    #: Append times of its oldest and newest message; None if it is empty.
    oldest_ns: int | None
    newest_ns: int | None
    #: Bytes of the buffer in use.
    used: int
    #: Bytes on the disk.
    disk: int
    geometry: Geometry
    #: Range of its messages' `time_ns`, if recorded.
    source: tuple[int, int] | None = None
    #: Range of its messages' `origin_ns`, if recorded.
    origin: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return self.head - self.tail


def no_log(folder: Path) -> NotFound:
    """Return the error for a path where no log is."""
    hint = f"create it: penstock create log:{folder}"
    if Path(f"{folder}{SUFFIX}").exists():
        hint = f"there is a queue of this name: fmq:{folder}"
    return NotFound(f"there is no log at {folder}", hint=hint)


def path_of(folder: Path, first: int) -> Path:
    """Return the path of the segment that starts at `first`."""
    return folder / f"{first:020d}{SUFFIX}"


def numbers_of(folder: Path) -> list[int]:
    """Return the first number of every segment, in order; empty if there is no directory."""
    with storage_errors("looking at", str(folder)):
        try:
            names = os.listdir(folder)  # noqa: PTH208 - there may be many, and names will do
        except (FileNotFoundError, NotADirectoryError):
            return []
    numbers = (int(match[1]) for match in map(_NAME.fullmatch, names) if match)
    return sorted(number for number in numbers if number < _NUMBERS_END)


def is_log(folder: Path) -> bool:
    """Tell whether a directory is a log."""
    return (folder / SETTINGS).is_file() or bool(numbers_of(folder))


def disk_bytes(path: Path) -> int:
    """Return the disk usage of a file; 0 if it is missing."""
    try:
        return path.stat().st_blocks * _BLOCK
    except FileNotFoundError:
        return 0


def look(folder: Path, first: int) -> Segment:
    """Inspect a segment without mapping it.

    :raises NotFound: there is no such segment.
    :raises DamagedQueue: the file is no segment, or has the wrong name.
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
    """Return the error for a missing segment; a dangling link is damage, which ends retries."""
    if path.is_symlink():
        return DamagedQueue(str(path), "the file", 0, "a segment", "a link to nothing")
    return NotFound(f"there is no segment {path}")


def _look(path: Path, first: int, descriptor: int) -> Segment:
    status = os.fstat(descriptor)
    page = os.pread(descriptor, PAGE, 0)
    geometry = check_header(str(path), page, status.st_size)
    header = Header(page)
    if (check := header["head_check"]) > header["head"]:
        head = Header(os.pread(descriptor, PAGE, 0))["head"]  # the writer may have gone on
        check_head(str(path), check, head, partial(slot_at, descriptor, geometry))
    _check_range(path, first, header)
    tail, head = header["tail"], header["head"]
    oldest = newest = None
    used = 0
    if head > tail:
        oldest = slot_at(descriptor, geometry, tail).created_ns
        last = slot_at(descriptor, geometry, head - 1)
        newest = last.created_ns
        used = min(last.end, geometry.buffer_size)
    return Segment(
        path,
        first,
        tail,
        head,
        State(header.state),
        header["epoch"],
        oldest,
        newest,
        used,
        status.st_blocks * _BLOCK,
        geometry,
        header.noted_times("source"),
        header.noted_times("origin"),
    )


def slot_at(descriptor: int, geometry: Geometry, seq: int) -> Slot:
    """Read the slot of a message; it is empty behind the end of a file that was cut off."""
    data = os.pread(descriptor, SLOT.size, geometry.slot_offset(seq))
    return unpack_slot(data.ljust(SLOT.size, b"\0"))


def _check_range(path: Path, first: int, header: Header) -> None:
    """Check that a segment begins at `first`, and has all of its messages or none.

    :raises DamagedQueue: it does not, and readers would pass over messages.
    """
    if header["first_seq"] != first:
        hint = "the file has another's name"
        raise DamagedQueue(str(path), "first_seq", 96, first, header["first_seq"], hint=hint)
    # In this order: the tail becomes the head when all are removed, and the head only grows.
    tail, head = header["tail"], header["head"]
    if tail not in {first, head} or head < first:
        offset = HEADER.fields["tail"].offset
        raise DamagedQueue(str(path), "tail", offset, f"{first}, or {head} if it is empty", tail)


def open_segment(folder: Path, first: int, *, to_write: bool = False) -> QueueFile:
    """Map a segment; with `to_write` the caller is the log's writer.

    :raises NotFound: there is no such segment.
    :raises DamagedQueue: the file is no segment, or has the wrong name.
    """
    path = path_of(folder, first)
    name = str(path)
    try:
        file = QueueFile.open(name, writable=True) if to_write else QueueFile.open_to_read(name)
    except NotFound:
        raise _missing(path) from None
    try:
        if to_write:
            file.restore_head()
        _check_range(path, first, file.header)
    except BaseException:
        file.close()
        raise
    return file


def begin_segment(folder: Path, settings: Settings, first: int, *, sync: bool) -> QueueFile:
    """Create the segment that starts at `first`, and map it. The caller is the log's writer.

    The file gets its name when it is complete. With `sync`, file and name are synced to disk. An
    existing empty segment, left by a writer that died, is reused.

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
        descriptor = open_new(unfinished, 0o600)
        try:
            share_as_folder(descriptor, folder)
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
    Header(page).boot_id = boot_id()
    return bytes(page)


# --- the end of a segment -------------------------------------------------------------------------


def seal(file: QueueFile) -> None:
    """Seal a segment: it takes no more messages, and its unused space is freed. Idempotent.

    The next segment exists already: a reader that finds this one sealed switches to it.
    """
    if file.field("state") == State.LIVE:
        first, head = file.field("first_seq"), file.field("head")
        if head > first:
            from penstock.queue.wide import arrow  # noqa: PLC0415 - loads numpy

            # A search by time can skip the whole segment.
            file.header.note_times("source", arrow.source_times(file, first, head))
            file.header.note_times("origin", arrow.origin_times(file, first, head))
        mark(file, State.SEALED)
    for start, end in _unused(file):
        _punch(file, start, end)


def _unused(file: QueueFile) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a segment that no message uses."""
    geometry = file.geometry
    first, head = file.field("first_seq"), file.field("head")
    position = 0
    if head > first:
        position = file.slot(head - 1).end
    if position < geometry.buffer_size:
        yield geometry.buffer_offset + position, geometry.file_size
    # The slots form a ring, which starts at the slot of the first message.
    begin = head % geometry.slots
    end = begin + geometry.slots - (head - first)
    for start, stop in ((begin, min(end, geometry.slots)), (0, end - geometry.slots)):
        if start < stop:
            at = geometry.slots_offset
            yield at + start * SLOT.size, at + stop * SLOT.size


def evict(file: QueueFile, state: State) -> None:
    """Remove all messages from a segment, and free its space even while it is mapped.

    A reader in the middle of a copy notices afterwards, as if it had been overwritten.
    """
    store_state(file, state)  # first, so that a reader knows the reason
    file.header["tail"] = file.field("head")
    mark(file, state)
    _punch(file, file.geometry.slots_offset, file.geometry.file_size)


def remove_segment(path: Path, state: State = State.SEALED) -> None:
    """Remove a complete segment. Idempotent.

    :raises StorageError: the operating system reports an error.
    """
    try:
        file = QueueFile.open(str(path), writable=True)
    except NotFound:
        return
    except (DamagedQueue, Unsupported) as error:
        log.warning("%s is removed as it is: %s", path, error)
    else:
        try:
            evict(file, state)
        finally:
            file.close()
    with storage_errors("removing", str(path)):
        path.unlink(missing_ok=True)


def _punch(file: QueueFile, start: int, end: int) -> None:
    if end <= start:
        return
    # Errors are ignored: without hole punching, removal and unmapping free the space.
    import ctypes  # noqa: PLC0415 - when a segment ends

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate(file.descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)
