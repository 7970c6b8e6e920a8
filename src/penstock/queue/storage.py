"""How does a person hear of what the operating system refuses?"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["storage_error", "storage_errors"]

_HINTS = {
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


@contextlib.contextmanager
def storage_errors(doing: str, path: str) -> Iterator[None]:
    """Turn what the operating system refuses into a `StorageError`."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise storage_error(doing, path, error) from error
