"""How does a person hear of what the operating system refuses?"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_thread", "storage_error", "storage_errors"]

_MANY = "there are too many files or threads: end some, or raise ulimit -n and ulimit -u"
_HINTS = {
    errno.EMFILE: _MANY,
    errno.ENFILE: _MANY,
    errno.ENOSPC: "free some space, or create a smaller queue",
    errno.EACCES: "check who owns the files and their permissions",
    errno.EPERM: "check who owns the files and their permissions",
    errno.EROFS: "the file system is read-only",
    errno.EINVAL: "see the limits in /proc/sys/kernel/shmmax and shmall",
    errno.ENOMEM: "see the limits in /proc/sys/kernel/shmmax and shmall",
}


def storage_error(doing: str, path: str, error: OSError) -> StorageError:
    """Put into words what the operating system refused, and what to do about it."""
    return StorageError(doing, path, error, hint=_HINTS.get(error.errno or 0))


def no_thread(path: str) -> StorageError:
    """Put into words that the operating system has no thread left, which Python says otherwise."""
    refused = OSError(errno.EAGAIN, "no thread can be started")
    return StorageError("working in the background for", path, refused, hint=_MANY)


@contextlib.contextmanager
def storage_errors(doing: str, path: str) -> Iterator[None]:
    """Turn what the operating system refuses into a `StorageError`."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise storage_error(doing, path, error) from error
