"""How are cursors kept in a file of their own?"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed, DamagedQueue, InvalidOption, Unsupported
from penstock.core.interfaces import Closable
from penstock.core.whole_files import make_whole
from penstock.queue.cursors import ENTRY_SIZE, POSITION_AT, CursorTable
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from penstock.queue.cursors import Cursor, CursorEntry

__all__ = ["CursorFile"]

_HEADER: Final = struct.Struct("<8sII")
_HEADER_SIZE: Final = 4096
_MAGIC: Final = b"PNCURSOR"
_VERSION: Final = 1
_MOST_ENTRIES: Final = 65536


class CursorFile(Closable):
    """A table of cursors in a file of its own."""

    def __init__(self, path: str, count: int = 128, *, as_folder: bool = False) -> None:
        """Open the file, or create one for `count` cursors.

        :param as_folder: whether a new file gets the permissions of its folder
        :raises DamagedQueue: the file is no cursor file.
        :raises Unsupported: a newer Penstock wrote it.
        :raises StorageError: the operating system reports an error.
        """
        if not 1 <= count <= _MOST_ENTRIES:
            raise InvalidOption("count", count, f"must be from 1 to {_MOST_ENTRIES}")
        self.path = path
        with contextlib.ExitStack() as undo:
            with storage_errors("opening", path):
                self._fd = _open_or_make(path, count, as_folder=as_folder)
                self._close_fd = weakref.finalize(self, os.close, self._fd)
                undo.callback(self._close_fd)
                size = _check_file(path, self._fd)
                self._map = mmap.mmap(self._fd, size)
            self._memory = memoryview(self._map)[_HEADER_SIZE:]
            self.table = CursorTable(self._fd, self._memory, offset=_HEADER_SIZE)
            undo.pop_all()

    def claim(
        self, name: str | None, *, epoch: int = 0, seq: int = 0, timeout: float = 5.0
    ) -> Cursor:
        """Claim a cursor; see `CursorTable.claim`."""
        return self.table.claim(name, epoch=epoch, seq=seq, timeout=timeout)

    def reserve(self, name: str, *, epoch: int = 0, seq: int = 0) -> None:
        """Create the cursor of this name if missing; see `CursorTable.reserve`."""
        self.table.reserve(name, epoch=epoch, seq=seq)

    def entries(self) -> list[CursorEntry]:
        """Return the entries in use; see `CursorTable.entries`."""
        return self.table.entries()

    def find(self, name: str) -> CursorEntry | None:
        """Return the cursor of this name, or None."""
        return self.table.find(name)

    def forget(self, name: str, *, timeout: float = 5.0) -> bool:
        """Free the cursor of this name; see `CursorTable.forget`."""
        return self.table.forget(name, timeout=timeout)

    def offset(self, cursor: Cursor) -> int:
        """Return the file offset of a cursor's position."""
        return _HEADER_SIZE + cursor.index * ENTRY_SIZE + POSITION_AT

    def is_named(self) -> bool:
        """Tell whether the path still names this file."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))  # noqa: PTH116
        return False

    def sync(self) -> None:
        """Sync all positions to disk.

        :raises StorageError: the sync fails.
        """
        if not self._close_fd.alive:
            raise Closed(f"{self.path}: the file of cursors was closed")
        with storage_errors("writing", self.path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Release every cursor claimed here, and close the file."""
        self.table.close()
        self._memory.release()
        self._map.close()
        self._close_fd()


def _open_or_make(path: str, count: int, *, as_folder: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        head = _HEADER.pack(_MAGIC, _VERSION, count).ljust(_HEADER_SIZE, b"\0")
        # Written, not sparse: a store to the mapping must not need disk space.
        make_whole(Path(path), head + bytes(count * ENTRY_SIZE), as_folder=as_folder)
    return os.open(path, flags)


def _check_file(path: str, fd: int) -> int:
    """Check the header of a cursor file, and return its size."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, _HEADER.size, 0) if size >= _HEADER_SIZE else b""
    if not header:
        raise _damaged(path, "size", size, f"{_HEADER_SIZE} bytes or more", f"{size} bytes")
    magic, version, count = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _damaged(path, "magic", 0, _MAGIC, magic)
    if version > _VERSION:
        raise Unsupported(
            f"{path} is a file of cursors of version {version}; this Penstock knows {_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    if version != _VERSION:
        raise _damaged(path, "version", 8, _VERSION, version)
    if not 1 <= count <= _MOST_ENTRIES:
        raise _damaged(path, "count", 12, f"1 to {_MOST_ENTRIES}", count)
    expected = _HEADER_SIZE + count * ENTRY_SIZE
    if size != expected:
        raise _damaged(path, "size", size, f"{expected} bytes", f"{size} bytes")
    return size


def _damaged(path: str, field: str, offset: int, expected: object, found: object) -> DamagedQueue:
    hint = "restore it, or move it away: then the cursors start anew"
    return DamagedQueue(path, field, offset, expected, found, hint=hint)
