"""Who is the one writer of a log?"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import LockTimeout, NotFound
from penstock.core.whole_files import make_as_folder
from penstock.queue.storage import LockFile, storage_errors

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOCK", "WriterLock", "writer_pid"]

#: The name of the lock file. It holds the writer's pid, for information only.
LOCK: Final = "lock"
_BYTE: Final = 0
#: Poll interval (seconds) while another process holds the lock.
_LOOK_FOR_WRITER: Final = 0.01


class WriterLock:
    """The exclusive right to write to a log; the kernel releases it when the process ends."""

    def __init__(self, folder: Path, timeout: float) -> None:
        """Take the lock; wait up to `timeout` seconds. The directory exists.

        :raises LockTimeout: another process held it for `timeout` seconds.
        :raises StorageError: no permission.
        """
        path = folder / LOCK
        with storage_errors("opening", str(path)):
            make_as_folder(path)
        self._locks = LockFile(str(path))
        began = time.monotonic()
        try:
            while not self._locks.try_lock(_BYTE):
                _give_up_after(timeout, began, folder)
                time.sleep(_LOOK_FOR_WRITER)
            with storage_errors("writing", str(path)):
                path.write_text(f"{os.getpid()}\n", encoding="ascii")
        except BaseException:
            self._locks.close()
            raise
        #: Seconds spent waiting for the lock.
        self.waited = time.monotonic() - began

    def close(self) -> None:
        """Release the lock."""
        self._locks.close()


def _give_up_after(timeout: float, began: float, folder: Path) -> None:
    if time.monotonic() - began >= timeout:
        raise LockTimeout(
            f"process {_pid_in(folder / LOCK)} writes to {folder}; waited {timeout:g} s",
            hint="a log has one writer at a time; lock_timeout= waits longer",
        )


def writer_pid(folder: Path) -> int | None:
    """Return the pid of the log's writer; None: no writer, or no permission to see."""
    path = folder / LOCK
    try:
        locks = LockFile(str(path))
    except (NotFound, OSError):
        return None
    try:
        return _pid_in(path) if locks.is_locked(_BYTE) else None
    finally:
        locks.close()


def _pid_in(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return 0
