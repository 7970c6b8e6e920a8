"""Where are the bytes of a classic queue: in two files, or in two segments of memory?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    AlreadyExists,
    InvalidURL,
    LockTimeout,
    NotFound,
)
from penstock.queue.classic import sysv
from penstock.queue.classic._appender import Appender
from penstock.queue.classic.layout import LAST_ID_READ_OFFSET, SLOT_SIZE, slot_offset
from penstock.queue.storage import storage_error

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Device",
    "FileDevice",
    "SharedMemoryDevice",
    "keys_are_taken",
    "lock_held",
    "open_lock_file",
    "shared_memory_key",
]

_LAST_ID_READ = struct.Struct(">i")

#: `struct flock`: kind, whence, start, length (0 = to the end), pid.
_FLOCK = struct.Struct("hhqqi4x")
_LOCK: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCK: Final = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)

#: Most characters of a shared-memory key, with a reserve.
_LONGEST_KEY = 20

#: Poll interval while another writer holds the lock, usually for microseconds.
_FIRST_LOCK_PAUSE = 0.000_02
_LONGEST_LOCK_PAUSE = 0.001


def shared_memory_key(path: str) -> int | None:
    """Return the System V key in a path, or None for a file queue.

    The file name contains `shmem` and its last `_` part that is not empty starts with a number
    (docs/specs/lrose.md 1.2).

    :raises InvalidURL: the number, or the next one, is no valid key.
    """
    name = Path(path).name
    number = re.match(r"\s*[+-]?\d+", name.rstrip("_").rpartition("_")[2], re.ASCII)
    if "shmem" not in name or not number:
        return None
    key = int(number[0]) if len(number[0]) <= _LONGEST_KEY else 0
    if key in (-1, 0) or not -(2**31) <= key < 2**31 - 1:
        raise InvalidURL(
            f"fmq:{path}",
            f"{number[0][:_LONGEST_KEY]} is no shared-memory key",
            hint="let the name end in a number from 1 to 2147483646, as in shmem_10002",
        )
    return key


@contextlib.contextmanager
def lock_held(fd: int, path: str, timeout: float) -> Iterator[None]:
    """Hold the writers' lock of a queue, the same one as LROSE's (docs/specs/lrose.md 1.11).

    An open-file-description lock conflicts with LROSE's, and is not released when the file is
    closed elsewhere in this process.

    :raises LockTimeout: another writer held it for the whole timeout.
    """
    deadline = time.monotonic() + timeout
    pause = _FIRST_LOCK_PAUSE
    while not _try_lock(fd):
        if time.monotonic() >= deadline:
            raise LockTimeout(
                f"{path}: another writer{_lock_holder(fd)} held the lock for {timeout:g} s",
                hint="end or resume that process, or allow more time with lock_timeout=",
            )
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_LOCK_PAUSE)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock_holder(fd: int) -> str:
    pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK))[4]
    return f" (process {pid})" if pid > 0 else ""


class Device(ABC):
    """The two parts of a queue, `stat` and `buf`, and its writers' lock."""

    storage: str

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @abstractmethod
    def read_stat(self, offset: int, size: int) -> bytes:
        """Return bytes of the status and slot table; fewer where it ends."""

    @abstractmethod
    def read_buf(self, offset: int, size: int) -> bytes:
        """Return bytes of the message buffer; fewer where it ends."""

    @abstractmethod
    def write_stat(self, offset: int, data: bytes) -> None: ...

    @abstractmethod
    def write_buf(self, offset: int, data: bytes) -> None: ...

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the sizes of `stat` and `buf` in bytes."""

    @abstractmethod
    def clear(self, stat_size: int, buf_size: int) -> None:
        """Zero both parts, at these sizes. The caller holds the lock."""

    @abstractmethod
    def is_current(self) -> bool:
        """Tell whether the path still names this queue."""

    def watchable(self) -> int | None:
        """Return a descriptor to watch for writes, or None."""
        return None

    @abstractmethod
    def appender(self) -> Appender:
        """Return the native writer for this device; drop it before `close`."""

    @abstractmethod
    def report_last_id_read(self, id: int) -> None:
        """Store the reader's position for a blocking writer (docs/specs/lrose.md 1.9).

        :raises OSError: this user may read the queue but not write to it.
        """

    def read_slots(self, first: int, count: int, nslots: int) -> bytes:
        """Return a run of slots, which may wrap around the end of the table."""
        straight = min(count, nslots - first)
        data = self.read_stat(slot_offset(first), SLOT_SIZE * straight)
        if count > straight:
            data += self.read_stat(slot_offset(0), SLOT_SIZE * (count - straight))
        return data

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the writers' lock; see `lock_held`."""
        with lock_held(self._lock_fd, self.path, timeout):
            yield

    @abstractmethod
    def close(self) -> None: ...


class FileDevice(Device):
    """A queue in `PATH.stat` and `PATH.buf`. The lock is on `.stat` itself."""

    storage = "files"

    def __init__(self, path: str, stat_fd: int, buf_fd: int) -> None:
        super().__init__(path, stat_fd)
        self._stat_fd = stat_fd
        self._buf_fd = buf_fd
        self._report_fd: int | None = None

    @classmethod
    def open(cls, path: str, *, writable: bool) -> FileDevice:
        """Open an existing queue.

        :raises NotFound: one of its files is missing.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        return cls._open(path, flags)

    @classmethod
    def open_or_make(cls, path: str) -> FileDevice:
        """Open the files of a queue for writing; create missing ones, empty."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return cls._open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    @classmethod
    def _open(cls, path: str, flags: int) -> FileDevice:
        with contextlib.ExitStack() as undo:
            fds = []
            for part in (".stat", ".buf"):
                try:
                    fd = os.open(path + part, flags, 0o666)
                except FileNotFoundError:
                    if flags & os.O_CREAT:
                        raise  # a file system without file creation, such as /proc
                    raise NotFound(
                        f"there is no queue at {path} ({Path(path).name}{part} is missing)",
                        hint=f"create one: penstock create 'fmq:{path}?layout=classic'",
                    ) from None
                undo.callback(os.close, fd)
                fds.append(fd)
            undo.pop_all()
        return cls(path, fds[0], fds[1])

    def read_stat(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._stat_fd, size, offset)
        except OSError as error:
            raise storage_error("reading", self.path, error) from error

    def read_buf(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._buf_fd, size, offset)
        except OSError as error:
            raise storage_error("reading", self.path, error) from error

    def write_stat(self, offset: int, data: bytes) -> None:
        _write_all(self._stat_fd, data, offset)

    def write_buf(self, offset: int, data: bytes) -> None:
        _write_all(self._buf_fd, data, offset)

    def sizes(self) -> tuple[int, int]:
        return os.fstat(self._stat_fd).st_size, os.fstat(self._buf_fd).st_size

    def clear(self, stat_size: int, buf_size: int) -> None:
        # In place, as LROSE does: readers have these files open.
        os.ftruncate(self._stat_fd, 0)
        os.ftruncate(self._buf_fd, 0)
        os.ftruncate(self._buf_fd, buf_size)
        os.ftruncate(self._stat_fd, stat_size)

    def is_current(self) -> bool:
        # If one file is missing, LROSE recreates it, and reuses the other in place.
        try:
            return all(
                os.path.samestat(os.stat(self.path + part), os.fstat(fd))  # noqa: PTH116 - often
                for part, fd in ((".stat", self._stat_fd), (".buf", self._buf_fd))
            )
        except FileNotFoundError:
            return False

    def watchable(self) -> int | None:
        return self._stat_fd

    def appender(self) -> Appender:
        return Appender(self._lock_fd, stat_fd=self._stat_fd, buf_fd=self._buf_fd)

    def report_last_id_read(self, id: int) -> None:
        if self._report_fd is None:
            # Through /proc: the open file, even if the path names another one.
            own = f"/proc/self/fd/{self._stat_fd}"
            self._report_fd = os.open(own, os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(self._report_fd, _LAST_ID_READ.pack(id), LAST_ID_READ_OFFSET)

    def close(self) -> None:
        for fd in (self._stat_fd, self._buf_fd, self._report_fd):
            if fd is not None:
                os.close(fd)


class SharedMemoryDevice(Device):
    """A queue in two System V segments, keys N and N+1. The lock is on `PATH.lock`."""

    storage = "shared memory"

    def __init__(
        self, path: str, key: int, lock_fd: int, stat: sysv.Segment, buf: sysv.Segment
    ) -> None:
        super().__init__(path, lock_fd)
        self._key = key
        self._stat = stat
        self._buf = buf

    @classmethod
    def open(cls, path: str, key: int, *, writable: bool) -> SharedMemoryDevice:
        """Attach to an existing queue.

        :raises NotFound: one of its segments is missing.
        """
        ids = []
        for part in (key, key + 1):
            id = sysv.find(part)
            if id is None:
                raise NotFound(
                    f"there is no queue at {path} (shared memory key {part} does not exist)",
                    hint=f"create one: penstock create 'fmq:{path}?layout=classic'",
                )
            ids.append(id)
        return cls._attach(path, key, ids, writable=writable)

    @classmethod
    def make(
        cls, path: str, key: int, stat_size: int, buf_size: int, *, replace: bool
    ) -> SharedMemoryDevice:
        """Create the segments, or attach existing ones. The caller holds the lock.

        :raises AlreadyExists: a key belongs to something else, and `replace` is not set.
        """
        sizes = {key: stat_size, key + 1: buf_size}
        found = {part: sysv.find(part) for part in sizes}
        is_half = sum(id is None for id in found.values()) == 1
        if is_half and not replace:
            raise keys_are_taken(path, key)
        ids = [
            sysv.create(part, size) if replace or found[part] is None else found[part]
            for part, size in sizes.items()
        ]
        return cls._attach(path, key, [id for id in ids if id is not None], writable=True)

    @classmethod
    def _attach(cls, path: str, key: int, ids: list[int], *, writable: bool) -> SharedMemoryDevice:
        with contextlib.ExitStack() as undo:
            lock_fd = -1
            if writable:
                lock_fd = open_lock_file(path)
                undo.callback(os.close, lock_fd)
            stat = sysv.attach(ids[0], writable=writable)
            undo.callback(stat.detach)
            buf = sysv.attach(ids[1], writable=writable)
            undo.pop_all()
        return cls(path, key, lock_fd, stat, buf)

    def read_stat(self, offset: int, size: int) -> bytes:
        return bytes(self._stat.memory[offset : offset + size])

    def read_buf(self, offset: int, size: int) -> bytes:
        return bytes(self._buf.memory[offset : offset + size])

    def write_stat(self, offset: int, data: bytes) -> None:
        self._stat.memory[offset : offset + len(data)] = data

    def write_buf(self, offset: int, data: bytes) -> None:
        self._buf.memory[offset : offset + len(data)] = data

    def sizes(self) -> tuple[int, int]:
        return len(self._stat.memory), len(self._buf.memory)

    def clear(self, stat_size: int, buf_size: int) -> None:
        # The status first, so that no reader follows it into the buffer.
        self._stat.memory[:stat_size] = bytes(stat_size)
        self._buf.memory[:buf_size] = bytes(buf_size)

    def is_current(self) -> bool:
        return sysv.find(self._key) == self._stat.id and sysv.find(self._key + 1) == self._buf.id

    def appender(self) -> Appender:
        return Appender(
            self._lock_fd,
            stat_mem=self._stat.memory,
            buf_mem=self._buf.memory,
            shm_key=self._key,
            stat_shm_id=self._stat.id,
            buf_shm_id=self._buf.id,
        )

    def report_last_id_read(self, id: int) -> None:
        if self._stat.memory.readonly:
            reader = self._stat
            self._stat = sysv.attach(reader.id, writable=True)
            reader.detach()
        at = slice(LAST_ID_READ_OFFSET, LAST_ID_READ_OFFSET + _LAST_ID_READ.size)
        self._stat.memory[at] = _LAST_ID_READ.pack(id)

    def close(self) -> None:
        self._stat.detach()
        self._buf.detach()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


def keys_are_taken(path: str, key: int) -> AlreadyExists:
    """Return the error for keys that belong to something else."""
    return AlreadyExists(
        f"{path} needs the shared memory keys {key} and {key + 1}, and something that is not this "
        "queue has one of them",
        hint="choose another number (ipcs -m lists those in use), or penstock create --replace",
    )


def open_lock_file(path: str) -> int:
    """Open the lock file of a shared-memory queue; create it if missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
