"""Which process owns something, and is it still alive?"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import AlreadyExists, InvalidOption, LockTimeout, NotFound
from penstock.queue.storage import LockFile, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AlreadyOwned", "Owner", "Ownership"]

#: Locked briefly by a process that becomes the owner or asks for it, so that no process reads the
#: name of an earlier owner.
_TURN: Final = 1 << 62
#: Locked by the owner. The kernel unlocks it when the process ends.
_OWNED: Final = _TURN + 1

#: While another process has its turn, retry this often, for this long (seconds).
_PAUSE: Final = 0.001
_PATIENCE: Final = 5.0

_LONGEST_NAME: Final = 200
_LARGEST_RECORD: Final = 4096


class AlreadyOwned(AlreadyExists):
    """Another live process owns it."""

    def __init__(self, what: str, owner: str, pid: int) -> None:
        is_here = pid == os.getpid()
        super().__init__(
            f"{what} belongs to {owner or 'somebody'} (process {pid})",
            hint="close it here first" if is_here else "it has one owner: end that process first",
        )
        self.what = what
        self.owner = owner
        self.pid = pid


class Owner(NamedTuple):
    """The owner of something, or its last owner."""

    #: The name of the owner; empty if unknown.
    name: str
    pid: int
    #: Whether the process is alive, and has not released it.
    alive: bool

    @classmethod
    def of(cls, path: str) -> Owner | None:
        """Return the owner recorded in this file, or None if there never was one."""
        try:
            locks = LockFile(path)
        except NotFound:
            return None
        try:
            name, pid = _read(locks)
            return cls(name, pid, locks.is_locked(_OWNED))
        finally:
            locks.close()


class Ownership:
    """Ownership by a process, until it releases it or ends.

    A file beside the owned thing has the owner's name, for other processes. Neither the file nor
    its content prove that there is an owner: only the kernel's lock does.
    """

    def __init__(self, path: str, locks: LockFile) -> None:
        self._path = path
        self._locks = locks

    @classmethod
    def claim(cls, path: str, name: str, what: str) -> Self:
        """Become the owner by the lock of the file at `path`.

        :raises AlreadyOwned: another process is the owner.
        :raises StorageError: the file cannot be written.
        """
        if not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidOption("owner", name, f"must have 1 to {_LONGEST_NAME} characters")
        while True:
            locks = _open_or_make(path)
            try:
                with _turn(locks):
                    is_there = os.fstat(locks.fd).st_nlink > 0
                    if is_there:
                        _become_owner(locks, name, what)
            except BaseException:
                locks.close()
                raise
            if is_there:
                return cls(path, locks)
            locks.close()  # its owner has removed it since it was opened

    @property
    def is_held(self) -> bool:
        """Whether this process is the owner: it has not released it."""
        return self._locks.is_open

    def release(self, *, remove: bool = False) -> None:
        """Release it; `remove` the file if the owned thing is gone, too. Idempotent."""
        if self._locks.is_open:
            if remove:
                with _turn(self._locks), contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)  # noqa: PTH108 - a path is text here
            self._locks.close()


def _open_or_make(path: str) -> LockFile:
    while True:
        with storage_errors("creating", path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        with contextlib.suppress(NotFound):  # removed at this very moment
            return LockFile(path)


@contextlib.contextmanager
def _turn(locks: LockFile) -> Iterator[None]:
    deadline = time.monotonic() + _PATIENCE
    while not locks.try_lock(_TURN):
        if time.monotonic() > deadline:
            raise LockTimeout(
                f"another process kept {locks.path} locked for {_PATIENCE:g} s",
                hint="end or resume the process that stopped while it created this",
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        locks.unlock(_TURN)


def _become_owner(locks: LockFile, name: str, what: str) -> None:
    if not locks.try_lock(_OWNED):
        raise AlreadyOwned(what, *_read(locks))
    _write(locks, name)


def _write(locks: LockFile, name: str) -> None:
    record = json.dumps({"owner": name, "pid": os.getpid()}).encode() + b"\n"
    with storage_errors("writing", locks.path):
        # One write. The rest of a longer record is after the newline.
        os.pwrite(locks.fd, record, 0)
        os.ftruncate(locks.fd, len(record))


def _read(locks: LockFile) -> tuple[str, int]:
    with storage_errors("reading", locks.path):
        record = os.pread(locks.fd, _LARGEST_RECORD, 0).partition(b"\n")[0]
    try:
        match json.loads(record):
            case {"owner": str(name), "pid": int(pid)}:
                return name, pid
    except ValueError:
        pass
    return "", 0
