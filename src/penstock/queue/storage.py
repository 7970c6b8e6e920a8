"""How do queues lock files, and report errors of the operating system?"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed, NotFound, PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LockFile",
    "data_ranges",
    "no_thread",
    "storage_error",
    "storage_errors",
    "write_again",
]

#: `struct flock`: kind, whence, start, length (0 = to the end), pid.
_FLOCK: Final = struct.Struct("hhqqi4x")

_MANY = "there are too many files or threads: end some, or raise ulimit -n and ulimit -u"
_HINTS = {
    errno.EMFILE: _MANY,
    errno.ENFILE: _MANY,
    errno.ENOSPC: "free some space, or write to another place",
    errno.EACCES: "check who owns the files and their permissions",
    errno.EPERM: "check who owns the files and their permissions",
    errno.EROFS: "the file system is read-only",
    errno.EINVAL: "see the limits in /proc/sys/kernel/shmmax and shmall",
    errno.ENOMEM: "see the limits in /proc/sys/kernel/shmmax and shmall",
}


def storage_error(doing: str, path: str, error: OSError) -> StorageError:
    """Return a `StorageError` for an error of the operating system, with a hint."""
    return StorageError(doing, path, error, hint=_HINTS.get(error.errno or 0))


def no_thread(path: str) -> StorageError:
    """Return a `StorageError` for a thread that cannot start (a `RuntimeError` of Python)."""
    refused = OSError(errno.EAGAIN, "no thread can be started")
    return StorageError("working in the background for", path, refused, hint=_MANY)


@contextlib.contextmanager
def storage_errors(doing: str, path: str) -> Iterator[None]:
    """Convert an `OSError` into a `StorageError`."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise storage_error(doing, path, error) from error


class LockFile:
    """An open file description that owns locks.

    A lock is on one byte, far past the end of the file. The kernel releases it when the process
    ends; so it tells other processes whether its owner is alive.
    """

    def __init__(self, path_or_fd: str | int) -> None:
        self.path = self._opened = str(path_or_fd)
        self._forked = False
        if isinstance(path_or_fd, int):
            # /proc opens the same file, wherever it is now, with a new file description.
            self._opened = f"/proc/self/fd/{path_or_fd}"
            with contextlib.suppress(OSError):
                self.path = str(Path(self._opened).readlink())
        with storage_errors("opening", self.path), _opening:
            try:
                self.fd = os.open(self._opened, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotFound(f"there is no file {self.path} to lock") from None
            # Also if it is never closed: its cursor would stay in use until the process ends.
            self._close = weakref.finalize(self, _close_unlocked, self.fd)
            # Not at exit: other exit handlers may still move a cursor.
            self._close.atexit = False
            _lock_files.add(self)

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def check(self) -> None:
        """Check that this process can use the locks.

        :raises Closed: the file was closed, or belongs to the parent of a fork.
        """
        if self._forked:
            raise Closed(
                f"{self.path}: this belongs to the process that this one was forked from",
                hint="open it in the process that uses it",
            )
        if not self._close.alive:
            raise Closed(f"{self.path}: it was closed")

    def try_lock(self, byte: int, count: int = 1) -> bool:
        """Lock `count` bytes from `byte` on; False: another description has locked one of them."""
        self.check()
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte, count))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise storage_error("locking", self.path, error) from error
        return True

    def unlock(self, byte: int) -> None:
        self.check()
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))
        except OSError as error:
            raise storage_error("unlocking", self.path, error) from error

    def is_locked(self, byte: int, count: int = 1) -> bool:
        """Tell whether another description has locked any of `count` bytes from `byte` on."""
        self.check()
        with storage_errors("looking at the locks of", self.path):
            found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, count))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        self._close()

    def leave_to_parent(self) -> None:
        """Close the descriptor in a forked child; the parent keeps its locks."""
        self._forked = True
        if self._close.detach():
            os.close(self.fd)


def _close_unlocked(fd: int) -> None:
    # A mere close would leave the locks with a child forked at this moment.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    os.close(fd)


# A forked child shares its parent's file descriptions and thus the locks, so that a parent's cursor
# would outlive the parent. At a fork, every open description must be in the set: hence the lock,
# which is reentrant for a thread that forks while it opens one.
_lock_files: weakref.WeakSet[LockFile] = weakref.WeakSet()
_opening = threading.RLock()


def _leave_all_to_parent() -> None:
    _opening.release()
    for file in list(_lock_files):
        file.leave_to_parent()


os.register_at_fork(
    before=_opening.acquire,
    after_in_parent=_opening.release,
    after_in_child=_leave_all_to_parent,
)


@functools.lru_cache
def _flock(kind: int, byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, length, 0)


#: Bytes that are written again at a time.
_WRITTEN_AGAIN: Final = 1 << 20


def write_again(fd: int, at: int) -> None:
    """Write the data of a file from `at` on once more; nobody else may write there meanwhile.

    After a sync that failed, the kernel takes the pages that it could not write for written.

    :raises OSError: the operating system refuses.
    """
    for start, end in data_ranges(fd, at):
        place = start
        while place < end and (data := os.pread(fd, min(_WRITTEN_AGAIN, end - place), place)):
            place += os.pwrite(fd, data, place)  # maybe not all of it


def data_ranges(fd: int, at: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the data of a file from `at` on, without the holes of a sparse one.

    :raises OSError: the operating system refuses.
    """
    with contextlib.suppress(_NoMoreData):
        while True:
            start = _seek(fd, at, os.SEEK_DATA)
            at = _seek(fd, start, os.SEEK_HOLE)
            yield start, at


class _NoMoreData(Exception):
    """A file has no data from an offset on."""


def _seek(fd: int, at: int, what: int) -> int:
    try:
        return os.lseek(fd, at, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _NoMoreData from None
        raise
