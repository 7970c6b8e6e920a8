"""Is the process that uses something still there?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import Final

from penstock.core.errors import Closed, NotFound
from penstock.queue.storage import storage_error, storage_errors

__all__ = ["LockFile"]

#: `struct flock`: kind, whence, start, length (0 = to the end), pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


class LockFile:
    """One open file description, which the kernel keeps our locks on.

    A lock is on one byte, far behind the end of the file. It ends with the process, however that
    ends; so whoever looks at it knows whether its owner is alive.
    """

    def __init__(self, path_or_fd: str | int) -> None:
        self.path = self._opened = str(path_or_fd)
        self._forked = False
        if isinstance(path_or_fd, int):
            # Through /proc it is this very file, wherever it is now, and a description of its own.
            self._opened = f"/proc/self/fd/{path_or_fd}"
            with contextlib.suppress(OSError):
                self.path = str(Path(self._opened).readlink())
        with storage_errors("opening", self.path), _opening:
            try:
                self.fd = os.open(self._opened, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotFound(f"there is no file {self.path} to lock") from None
            # Also when nobody closes it: a cursor of nobody would stay in use until the end.
            self._close = weakref.finalize(self, _close_unlocked, self.fd)
            # But not sooner: up to the very end there may be somebody who moves a cursor.
            self._close.atexit = False
            _lock_files.add(self)

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def check(self) -> None:
        """Make sure that there can be locks.

        :raises Closed: there cannot.
        """
        if self._forked:
            raise Closed(
                f"{self.path}: this belongs to the process that this one was forked from",
                hint="open it in the process that uses it",
            )
        if not self._close.alive:
            raise Closed(f"{self.path}: it was closed")

    def try_lock(self, byte: int) -> bool:
        self.check()
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
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
        """Tell whether another description has it, or one of so many bytes from it on, locked."""
        self.check()
        with storage_errors("looking at the locks of", self.path):
            found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, count))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        self._close()

    def leave_to_parent(self) -> None:
        """Let go of the description, which keeps its locks for as long as the parent has it."""
        self._forked = True
        if self._close.detach():
            os.close(self.fd)


def _close_unlocked(fd: int) -> None:
    # By closing alone the locks would stay with a child that is forked just now.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    os.close(fd)


# A child that was forked shares its parent's descriptions and with them the locks, so that a
# parent's cursor would outlive it there. No description may be open and not yet in the set when
# a thread forks, hence the lock; a thread that forks while it opens one has it already.
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


def _flock(kind: int, byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, length, 0)
