"""How does a position outlive the process that moves it, and who owns it now?"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import (
    Closed,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    LockTimeout,
    PositionError,
    Unsupported,
)
from penstock.queue.liveness import LockFile
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENTRY_SIZE",
    "LIVE_BASE",
    "Cursor",
    "CursorEntry",
    "CursorFile",
    "CursorTable",
]

#: One entry: state, pid, epoch, position, updated_ns, name. For looking at only: what is stored
#: goes in field by field, each number in one store, so that nobody ever sees half of one.
_ENTRY: Final = struct.Struct("<IIQQq96s")
ENTRY_SIZE: Final = _ENTRY.size
_POSITION_AT: Final = 16
_NAME_AT: Final = 32
_LONGEST_NAME: Final = 95

_FREE: Final = 0
_NAMED: Final = 1
_PASSING: Final = 2

#: The owner of entry i holds a lock on this byte + i. The byte before it serialises who takes an
#: entry. It is far behind the end of any file, so that these locks meet no others.
LIVE_BASE: Final = 1 << 62

_FILE_END: Final = 2**63 - 1
_WORD_END: Final = 2**64

#: While another process takes an entry, look again this often. That is a matter of microseconds.
_FIRST_PAUSE: Final = 0.000_02
_LONGEST_PAUSE: Final = 0.001

#: An entry that changes hands each time it is looked at is shown as it was seen last.
_LOOKS: Final = 8

_HEADER: Final = struct.Struct("<8sII")
_HEADER_SIZE: Final = 4096
_MAGIC: Final = b"PNCURSOR"
_VERSION: Final = 1
_MOST_ENTRIES: Final = 65536


class CursorEntry(NamedTuple):
    """One taken entry of a table, as it was a moment ago."""

    #: Which entry of the table. (It hides the method of tuples, which nobody needs here.)
    index: int  # type: ignore[assignment]
    #: The name it is found by again; empty for a reader that is only passing.
    name: str
    #: The process that owns it, or owned it last if that was killed; 0 when it was released.
    pid: int
    #: The epoch of the stream that `seq` counts in.
    epoch: int
    #: The next message wanted: all before it are done.
    seq: int
    #: When it was claimed or released, or moved from Python; nanoseconds since 1970 UTC.
    updated_ns: int
    #: Whether somebody owns it now.
    alive: bool


class CursorTable:
    """Positions in mapped memory, each owned by at most one process at a time.

    The kernel knows who is alive: an owner holds a lock that ends with the process, however that
    ends. Safe to share between threads. A forked child has to open a table of its own.
    """

    def __init__(
        self, path_or_fd: str | int, memory: memoryview, *, live_base: int = LIVE_BASE
    ) -> None:
        """Use the table in `memory`, with the locks of this file.

        :raises NotFound: there is no such file.
        :raises InvalidOption: the memory is read-only, not aligned, or not whole entries.
        """
        _check_memory(memory)
        if not 1 <= live_base <= _FILE_END - memory.nbytes:
            raise InvalidOption("live_base", live_base, "leaves no room for the locks")
        self._base = live_base
        self._locks = LockFile(path_or_fd)
        self._entries = _Entries(memory)
        # The kernel's lock for taking an entry is held by the table: threads need one of theirs.
        self._allocation = threading.Lock()
        # Likewise the lock of an entry: a second claim within this table is found out here.
        self._claimed: dict[int, Cursor] = {}

    def claim(
        self, name: str | None, *, epoch: int = 0, seq: int = 0, timeout: float = 5.0
    ) -> Cursor:
        """Own the cursor of this name, or an unnamed one that is forgotten after use.

        One that exists keeps its position; a new one starts at (`epoch`, `seq`).

        :raises CursorInUse: it has an owner.
        :raises CursorTableFull: it would be one too many.
        :raises LockTimeout: others kept the table busy for all that time.
        """
        wanted = b"" if name is None else _encode(name)
        _check_number("epoch", epoch)
        _check_number("seq", seq)
        deadline = time.monotonic() + timeout
        with self._allocating(timeout):
            index = self._entries.index_of(wanted) if wanted else None
            is_new = index is None
            if index is None:
                index = self._lock_free_one()
            else:
                self._lock_named_one(index, name or "", deadline)
            try:
                if is_new:
                    self._entries.start(index, wanted, epoch, seq)
                else:
                    self._entries.set_owner(index, os.getpid())
                cursor = Cursor(index, name or "", is_new, self._entries, self._locks, self._let_go)
                self._claimed[index] = cursor
            except BaseException:
                self._locks.unlock(self._base + index)
                raise
            return cursor

    def entries(self) -> list[CursorEntry]:
        """Return those that are taken: all named ones, and passing ones that have an owner."""
        self._locks.check()
        found = (self._look(index) for index in range(self._entries.count))
        return [entry for entry in found if entry is not None]

    def find(self, name: str) -> CursorEntry | None:
        """Return the cursor of this name, or None."""
        self._locks.check()
        index = self._entries.index_of(_encode(name))
        return None if index is None else self._look(index)

    def is_alive(self, index: int) -> bool:
        """Tell whether somebody owns this entry."""
        if not 0 <= index < self._entries.count:
            raise IndexError(f"entry {index} of a table of {self._entries.count}")
        self._locks.check()
        # The kernel tells of the locks of others only.
        return index in self._claimed or self._locks.is_locked(self._base + index)

    def forget(self, name: str, *, timeout: float = 5.0) -> bool:
        """Free the cursor of this name; tell whether there was one.

        :raises CursorInUse: it has an owner.
        :raises LockTimeout: others kept the table busy for all that time.
        """
        wanted = _encode(name)
        deadline = time.monotonic() + timeout
        with self._allocating(timeout):
            index = self._entries.index_of(wanted)
            if index is None:
                return False
            self._lock_named_one(index, name, deadline)
            try:
                self._entries.free(index)
            finally:
                self._locks.unlock(self._base + index)
            return True

    def close(self) -> None:
        """Release every cursor claimed here, and let go of the memory."""
        if self._locks.is_open:
            with self._allocation:
                for cursor in list(self._claimed.values()):
                    cursor.release()
                self._locks.close()
        self._entries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _allocating(self, timeout: float) -> Iterator[None]:
        """Be the only one, here and in all processes, who gives entries away."""
        self._locks.check()
        deadline = time.monotonic() + timeout
        if not self._allocation.acquire(timeout=min(max(timeout, 0), threading.TIMEOUT_MAX)):
            raise self._busy(timeout)
        try:
            pauses = _pauses(deadline)
            while not self._locks.try_lock(self._base - 1):
                if not next(pauses):
                    raise self._busy(timeout)
            try:
                yield
            finally:
                self._locks.unlock(self._base - 1)
        finally:
            self._allocation.release()

    def _busy(self, timeout: float) -> LockTimeout:
        return LockTimeout(
            f"{self._locks.path}: another process kept the table of cursors for {timeout:g} s",
            hint="end or resume the process that stopped while it opened a reader of this",
        )

    def _lock_free_one(self) -> int:
        # Those that were left by a kill last: whether they were, only trying their lock tells.
        for state in (_FREE, _PASSING):
            for index in self._entries.in_state(state):
                # One that is just being released is free by its state, and still locked.
                if index not in self._claimed and self._locks.try_lock(self._base + index):
                    return index
        raise CursorTableFull(
            self._entries.count, hint="forget the cursors that nobody comes back to"
        )

    def _lock_named_one(self, index: int, name: str, deadline: float) -> None:
        if index in self._claimed:
            raise CursorInUse(name, os.getpid(), hint="release it first, or choose another name")
        pauses = _pauses(deadline)
        while not self._locks.try_lock(self._base + index):
            # Without a pid it is locked by somebody about to unlock it.
            pid = self._entries.pid(index)
            if pid or not next(pauses):
                raise CursorInUse(name, pid, hint="end that process, or choose another name")

    def _let_go(self, cursor: Cursor) -> None:
        index = cursor.index
        # All stores while the lock is held: after it the entry may be somebody else's.
        if cursor.name:
            self._entries.set_owner(index, 0)
        else:
            self._entries.free(index)
        self._locks.unlock(self._base + index)
        del self._claimed[index]

    def _look(self, index: int) -> CursorEntry | None:
        state, pid, epoch, seq, updated_ns, name = self._entries.look(index)
        if state not in (_NAMED, _PASSING):
            return None
        alive = self.is_alive(index)
        if state == _PASSING and not alive:
            return None
        return CursorEntry(index, name.decode(errors="replace"), pid, epoch, seq, updated_ns, alive)


class Cursor:
    """A position that this process owns, until it is released. For one thread at a time."""

    def __init__(
        self,
        index: int,
        name: str,
        is_new: bool,
        entries: _Entries,
        locks: LockFile,
        let_go: Callable[[Cursor], None],
    ) -> None:
        #: Which entry of the table.
        self.index = index
        #: The name it is found by again, or empty.
        self.name = name
        #: Whether it started where the caller said, for want of an earlier position.
        self.is_new = is_new
        self._entries = entries
        self._locks = locks
        self._let_go: Callable[[Cursor], None] | None = let_go

    @property
    def offset(self) -> int:
        """Where its `position` is in the table, in bytes, for native code to store to."""
        return self.index * ENTRY_SIZE + _POSITION_AT

    @property
    def epoch(self) -> int:
        """The epoch of the stream that `seq` counts in."""
        self._check()
        return self._entries.epoch(self.index)

    @property
    def seq(self) -> int:
        """The next message wanted: all before it are done."""
        self._check()
        return self._entries.seq(self.index)

    def move(self, seq: int, epoch: int | None = None) -> None:
        """Say that all messages before `seq` are done.

        :raises Closed: it was released, or belongs to the process that this one was forked from.
        """
        self._check()
        _check_number("seq", seq)
        if epoch is not None:
            _check_number("epoch", epoch)
        self._entries.move(self.index, seq, epoch)

    def release(self) -> None:
        """Let others have it. A named one keeps its position. Again, or in a fork: nothing."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None and self._locks.is_open:
            let_go(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self) -> None:
        self._locks.check()
        if self._let_go is None:
            raise Closed(f"the cursor {self.name!r} was released")


class CursorFile:
    """A table of cursors in a file of its own, for those that have no other place for it."""

    def __init__(self, path: str, count: int = 128) -> None:
        """Open the file; make one for `count` cursors if there is none.

        :raises DamagedQueue: it is not a file of cursors.
        :raises Unsupported: a newer Penstock made it.
        :raises StorageError: the operating system refuses.
        """
        if not 1 <= count <= _MOST_ENTRIES:
            raise InvalidOption("count", count, f"must be from 1 to {_MOST_ENTRIES}")
        self.path = path
        with contextlib.ExitStack() as undo:
            with storage_errors("opening", path):
                self._fd = _open_or_make(path, count)
                self._close_fd = weakref.finalize(self, os.close, self._fd)
                undo.callback(self._close_fd)
                size = _check_file(path, self._fd)
                self._map = mmap.mmap(self._fd, size)
            self._memory = memoryview(self._map)[_HEADER_SIZE:]
            self.table = CursorTable(self._fd, self._memory)
            undo.pop_all()

    def claim(
        self, name: str | None, *, epoch: int = 0, seq: int = 0, timeout: float = 5.0
    ) -> Cursor:
        """Own a cursor; see `CursorTable.claim`."""
        return self.table.claim(name, epoch=epoch, seq=seq, timeout=timeout)

    def entries(self) -> list[CursorEntry]:
        """Return those that are taken; see `CursorTable.entries`."""
        return self.table.entries()

    def find(self, name: str) -> CursorEntry | None:
        """Return the cursor of this name, or None."""
        return self.table.find(name)

    def forget(self, name: str, *, timeout: float = 5.0) -> bool:
        """Free the cursor of this name; see `CursorTable.forget`."""
        return self.table.forget(name, timeout=timeout)

    def sync(self) -> None:
        """Return when all positions up to now would survive a power failure.

        :raises StorageError: the device refuses.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Entries:
    """The bytes of a table. The order of the stores leaves it whole if one is the last."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory.cast("B")
        self._halves = self._bytes.cast("I")
        self._words = self._bytes.cast("Q")
        self._times = self._bytes.cast("q")
        self.count = len(self._bytes) // ENTRY_SIZE

    def in_state(self, state: int) -> Iterator[int]:
        return (index for index in range(self.count) if self._halves[index * 32] == state)

    def index_of(self, name: bytes) -> int | None:
        padded = name + b"\0"
        for index in self.in_state(_NAMED):
            at = index * ENTRY_SIZE + _NAME_AT
            if self._bytes[at : at + len(padded)] == padded:
                return index
        return None

    def look(self, index: int) -> tuple[int, int, int, int, int, bytes]:
        """Return state, pid, epoch, position, time and name, of one moment if at all possible."""
        at = index * ENTRY_SIZE
        head = None
        for _ in range(_LOOKS):
            seq = self.seq(index)
            data = bytes(self._bytes[at : at + ENTRY_SIZE])
            if data[:_POSITION_AT] == head:
                break
            head = data[:_POSITION_AT]
        state, pid, epoch, _, updated_ns, name = _ENTRY.unpack(data)
        return state, pid, epoch, seq, updated_ns, name.partition(b"\0")[0]

    def pid(self, index: int) -> int:
        return self._halves[index * 32 + 1]

    def epoch(self, index: int) -> int:
        return self._words[index * 16 + 1]

    def seq(self, index: int) -> int:
        return self._words[index * 16 + 2]

    def start(self, index: int, name: bytes, epoch: int, seq: int) -> None:
        """Take an entry, with its state last: until then it is as free as it was."""
        self.free(index)
        self.move(index, seq, epoch)
        self.set_owner(index, os.getpid())
        at = index * ENTRY_SIZE
        self._bytes[at + _NAME_AT : at + ENTRY_SIZE] = name.ljust(ENTRY_SIZE - _NAME_AT, b"\0")
        self._halves[index * 32] = _NAMED if name else _PASSING

    def set_owner(self, index: int, pid: int) -> None:
        self._times[index * 16 + 3] = time.time_ns()
        self._halves[index * 32 + 1] = pid

    def move(self, index: int, seq: int, epoch: int | None) -> None:
        self._words[index * 16 + 2] = seq
        if epoch is not None:
            # After the position: should this store never come, the old epoch tells that the
            # position is not to be trusted. The other way round an old position would be.
            self._words[index * 16 + 1] = epoch
        self._times[index * 16 + 3] = time.time_ns()

    def free(self, index: int) -> None:
        self._halves[index * 32] = _FREE

    def close(self) -> None:
        for view in (self._times, self._words, self._halves, self._bytes):
            view.release()


def _pauses(deadline: float) -> Iterator[bool]:
    """Wait a little longer each time; yield False once the time is over."""
    pause = _FIRST_PAUSE
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
        yield True
    while True:
        yield False


def _encode(name: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidOption("cursor", name, "cannot be written in UTF-8") from None
    if not encoded:
        raise InvalidOption("cursor", name, "must not be empty")
    if b"\0" in encoded:
        raise InvalidOption("cursor", name, "must not contain a zero byte")
    if len(encoded) > _LONGEST_NAME:
        reason = f"must be at most {_LONGEST_NAME} bytes in UTF-8, this has {len(encoded)}"
        raise InvalidOption("cursor", name, reason)
    return encoded


def _check_number(what: str, number: int) -> None:
    if not 0 <= number < _WORD_END:
        raise PositionError(f"a cursor cannot stand at {what} {number}: it has 64 bits, unsigned")


def _check_memory(memory: memoryview) -> None:
    size = memory.nbytes
    if memory.readonly:
        raise InvalidOption("memory", size, "is read-only")
    if not size or size % ENTRY_SIZE:
        raise InvalidOption("memory", size, f"must be a multiple of {ENTRY_SIZE} bytes")
    # Only a word at its own boundary is stored in one piece.
    if ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 8:
        raise InvalidOption("memory", size, "must start at a multiple of 8 bytes")


def _open_or_make(path: str, count: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        _make(path, count)
    return os.open(path, flags)


def _make(path: str, count: int) -> None:
    """Make a whole file under another name first: under its own there is never half of one."""
    directory = Path(path).parent
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = Path(f"{path}.{os.getpid()}-{secrets.token_hex(4)}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, count).ljust(_HEADER_SIZE, b"\0"))
            # Written, not left as a hole: a store to the mapping then needs no space on the disk.
            file.write(bytes(count * ENTRY_SIZE))
            file.flush()
            os.fsync(fd)
        # A link, since a rename would replace the file of somebody who was quicker.
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
    names = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(names)
    finally:
        os.close(names)


def _check_file(path: str, fd: int) -> int:
    """Return the size of a file of cursors, after a look at its header."""
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
