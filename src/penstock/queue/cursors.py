"""How does a position outlive the process that moves it, and who owns it now?"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import (
    Closed,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    LockTimeout,
    PositionError,
)
from penstock.core.interfaces import Closable
from penstock.queue.storage import LockFile
from penstock.queue.wide import _ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENTRY_SIZE",
    "LIVE_BASE",
    "POSITION_AT",
    "Cursor",
    "CursorEntry",
    "CursorTable",
    "check_word",
]

# --- the bytes of a cursor ----------------------------------------------------------------------

#: One entry: state, pid, epoch, position, updated_ns, name. For reading only: stores go field by
#: field, each number in one atomic store.
_ENTRY: Final = struct.Struct("<IIQQq96s")
ENTRY_SIZE: Final = _ENTRY.size
POSITION_AT: Final = 16
_NAME_AT: Final = 32
_LONGEST_NAME: Final = 95
#: The checksum of a named entry is in the last word of the name, unless the name needs it.
_CHECK_AT: Final = 120
_CHECKED_NAME: Final = _CHECK_AT - _NAME_AT
_HALF: Final = 1 << 32

_FREE: Final = 0
_NAMED: Final = 1
_PASSING: Final = 2

#: Attempts at a consistent read of an entry; then the last one counts.
_LOOKS: Final = 8


class _Entries:
    """The bytes of a table. The order of stores keeps it consistent after a kill at any point."""

    def __init__(self, memory: memoryview) -> None:
        """Use these bytes.

        :raises InvalidOption: they are read-only, not aligned, or of a wrong size.
        """
        _check_memory(memory)
        self._bytes = memory.cast("B")
        self._halves = self._bytes.cast("I")
        self._words = self._bytes.cast("Q")
        self._times = self._bytes.cast("q")
        self.count = len(self._bytes) // ENTRY_SIZE

    def taken(self) -> list[int]:
        """Return the indexes of the entries in use."""
        states = self._halves[::32].tolist()
        return [index for index, state in enumerate(states) if state != _FREE]

    def in_state(self, state: int) -> Iterator[int]:
        return (index for index in range(self.count) if self._halves[index * 32] == state)

    def index_of(self, name: bytes) -> int | None:
        """Return the entry of this name, also a damaged one whose checksum matches it."""
        padded = name + b"\0"
        for index in self.in_state(_NAMED):
            at = index * ENTRY_SIZE + _NAME_AT
            if self._bytes[at : at + len(padded)] == padded:
                return index
        for index in self.in_state(_NAMED):
            word = self._words[index * 16 + 15]
            if word and self._checked(index) is None:
                epoch, seq = self.epoch(index), self._words[index * 16 + 2]
                if check_word(name, epoch, seq) == word:
                    return index
        return None

    def look(self, index: int) -> tuple[int, int, int, int, int, bytes]:
        """Return state, pid, epoch, position, time and name, as a consistent read if possible."""
        at = index * ENTRY_SIZE
        head = None
        for _ in range(_LOOKS):
            seq = self.seq(index)
            data = bytes(self._bytes[at : at + ENTRY_SIZE])
            if data[:POSITION_AT] == head:
                break
            head = data[:POSITION_AT]
        state, pid, epoch, _, updated_ns, name = _ENTRY.unpack(data)
        return state, pid, epoch, seq, updated_ns, name.partition(b"\0")[0]

    def is_whole(self, index: int) -> bool:
        """Tell whether an entry passes its checksum, if it has one."""
        return self._checked(index) is not None

    def _checked(self, index: int) -> int | None:
        """Return the position that matches an entry's checksum; None: the entry is damaged.

        The checksum, stored before the position, contains half of it. If it matches a nearby
        position, the owner was killed between the stores, or a bit of the position flipped.
        """
        at = index * ENTRY_SIZE
        for _ in range(_LOOKS):
            word, seq = self._words[index * 16 + 15], self._words[index * 16 + 2]
            has_none = self._halves[index * 32] != _NAMED or self._bytes[at + _CHECK_AT - 1] != 0
            if has_none or word == 0:
                return seq
            name = bytes(self._bytes[at + _NAME_AT : at + _CHECK_AT])
            ahead = ((word >> 32) - seq + _HALF // 2) % _HALF - _HALF // 2
            known = seq + ahead
            if 0 <= known < 1 << 64 and check_word(name, self.epoch(index), known) == word:
                return known
        return None

    def raw(self, index: int) -> bytes:
        """Return the bytes of an entry."""
        return bytes(self._bytes[index * ENTRY_SIZE : (index + 1) * ENTRY_SIZE])

    def protect(self, index: int) -> None:
        """Store the checksum of a named entry. The caller owns the entry."""
        check = self._check_of(index, self.epoch(index), self._words[index * 16 + 2])
        if check:
            self._words[index * 16 + 15] = check

    def _check_of(self, index: int, epoch: int, seq: int) -> int:
        """Return the checksum of an entry at this position; 0: the name leaves no room for one."""
        at = index * ENTRY_SIZE
        if self._bytes[at + _CHECK_AT - 1]:
            return 0
        return check_word(bytes(self._bytes[at + _NAME_AT : at + _CHECK_AT]), epoch, seq)

    def pid(self, index: int) -> int:
        return self._halves[index * 32 + 1]

    def epoch(self, index: int) -> int:
        return self._words[index * 16 + 1]

    def seq(self, index: int) -> int:
        seq = self._checked(index)
        return self._words[index * 16 + 2] if seq is None else seq

    def start(self, index: int, name: bytes, epoch: int, seq: int, pid: int) -> None:
        """Initialize an entry; the state is stored last, so it is free until complete."""
        self.free(index)
        self.move(index, seq, epoch)
        self.set_owner(index, pid)
        at = index * ENTRY_SIZE
        self._bytes[at + _NAME_AT : at + ENTRY_SIZE] = name.ljust(ENTRY_SIZE - _NAME_AT, b"\0")
        if name:
            self.protect(index)
        self._halves[index * 32] = _NAMED if name else _PASSING

    def set_owner(self, index: int, pid: int) -> None:
        self._times[index * 16 + 3] = time.time_ns()
        self._halves[index * 32 + 1] = pid

    def move(self, index: int, seq: int, epoch: int | None) -> None:
        check = 0
        if self._halves[index * 32] == _NAMED:
            check = self._check_of(index, self.epoch(index) if epoch is None else epoch, seq)
        if check:  # no checksum between these stores
            self._words[index * 16 + 15] = 0
        self._words[index * 16 + 2] = seq
        if epoch is not None:
            # After the position: if a kill prevents this store, the old epoch shows that the
            # position is invalid. In reverse order, an old position would seem valid.
            self._words[index * 16 + 1] = epoch
        if check:
            self._words[index * 16 + 15] = check
        self._times[index * 16 + 3] = time.time_ns()

    def free(self, index: int) -> None:
        self._halves[index * 32] = _FREE

    def close(self) -> None:
        for view in (self._times, self._words, self._halves, self._bytes):
            view.release()


def check_word(name: bytes, epoch: int, seq: int) -> int:
    """Return the checksum of an entry: the low half of `seq`, and a CRC-32C of all three."""
    content = struct.pack(f"<{_CHECKED_NAME}sQQ", name, epoch, seq)
    return (seq % _HALF) << 32 | _ring.crc32c(content) or 1


def _encode_name(name: str) -> bytes:
    """Encode a name for storage.

    :raises InvalidOption: the name is empty, too long, or not encodable.
    """
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


def _check_memory(memory: memoryview) -> None:
    size = memory.nbytes
    if memory.readonly:
        raise InvalidOption("memory", size, "is read-only")
    if not size or size % ENTRY_SIZE:
        raise InvalidOption("memory", size, f"must be a multiple of {ENTRY_SIZE} bytes")
    # Only aligned words are stored atomically.
    if ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 8:
        raise InvalidOption("memory", size, "must start at a multiple of 8 bytes")


# --- tables and cursors -------------------------------------------------------------------------

#: The owner of entry i holds a lock on this byte + i. The byte before it is the allocation lock.
#: All are far past the end of any file, so that they meet no other locks.
LIVE_BASE: Final = 1 << 62

_FILE_END: Final = 2**63 - 1
_WORD_END: Final = 2**64

#: Pauses (seconds) while another process allocates an entry, which takes microseconds.
_FIRST_PAUSE: Final = 0.000_02
_LONGEST_PAUSE: Final = 0.001


class CursorEntry(NamedTuple):
    """A snapshot of an entry in use."""

    #: Index in the table. (Hides the method of tuples, which is not needed here.)
    index: int  # type: ignore[assignment]
    #: The name that keeps its position; empty for an unnamed (passing) reader.
    name: str
    #: The owner, or the last owner if it was killed; 0 after a release.
    pid: int
    #: The epoch of the stream that `seq` belongs to.
    epoch: int
    #: The next message to read: all before it are done.
    seq: int
    #: When it was claimed or released, or moved from Python; nanoseconds since 1970 UTC.
    updated_ns: int
    #: Whether it has an owner.
    alive: bool
    #: Whether it passes its checksum; if not, `seq` is not reliable.
    is_whole: bool = True


class CursorTable(Closable):
    """Positions in mapped memory, each owned by at most one process at a time.

    An owner holds a file lock, which the kernel releases when the process ends. Thread-safe. A
    forked child has to open a table of its own.
    """

    def __init__(
        self,
        path_or_fd: str | int,
        memory: memoryview,
        *,
        live_base: int = LIVE_BASE,
        offset: int = 0,
    ) -> None:
        """Use the table in `memory`, mapped from `offset` of the file, with locks on this file.

        :raises NotFound: there is no such file.
        :raises InvalidOption: the memory is read-only, not aligned, or of a wrong size.
        """
        if not 1 <= live_base <= _FILE_END - memory.nbytes:
            raise InvalidOption("live_base", live_base, "leaves no room for the locks")
        self._base = live_base
        self._offset = offset
        self._entries = _Entries(memory)
        self._locks = LockFile(path_or_fd)
        # The file lock for allocation belongs to the table: its threads need a lock, too.
        self._allocation = threading.Lock()
        # Likewise the lock of an entry: this detects a second claim within the table.
        self._claimed: dict[int, Cursor] = {}

    def claim(
        self, name: str | None, *, epoch: int = 0, seq: int = 0, timeout: float = 5.0
    ) -> Cursor:
        """Claim the cursor of this name, or an unnamed one that is freed on release.

        An existing cursor keeps its position; a new one starts at (`epoch`, `seq`).

        :raises CursorInUse: the cursor has an owner.
        :raises CursorTableFull: the table has no free entry.
        :raises DamagedQueue: the entry fails its checksum.
        :raises LockTimeout: another process kept the table locked for `timeout` seconds.
        """
        wanted = b"" if name is None else _encode_name(name)
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
                    self._entries.start(index, wanted, epoch, seq, os.getpid())
                else:
                    self._check_whole(index)
                    self._entries.set_owner(index, os.getpid())
                    self._entries.move(index, self._entries.seq(index), None)
                cursor = Cursor(index, name or "", is_new, self._entries, self._locks, self._let_go)
                self._claimed[index] = cursor
            except BaseException:
                self._locks.unlock(self._base + index)
                raise
            return cursor

    def reserve(self, name: str, *, epoch: int = 0, seq: int = 0, timeout: float = 5.0) -> None:
        """Create the cursor of this name if it is missing, at (`epoch`, `seq`).

        It never appears owned, so a concurrent claim succeeds.

        :raises CursorTableFull: the table has no free entry.
        :raises LockTimeout: another process kept the table locked for `timeout` seconds.
        """
        wanted = _encode_name(name)
        _check_number("epoch", epoch)
        _check_number("seq", seq)
        with self._allocating(timeout):
            if self._entries.index_of(wanted) is not None:
                return
            index = self._lock_free_one()
            try:
                self._entries.start(index, wanted, epoch, seq, 0)
            finally:
                self._locks.unlock(self._base + index)

    def entries(self) -> list[CursorEntry]:
        """Return the entries in use: all named ones, and unnamed ones with an owner."""
        self._locks.check()
        found = map(self._look, self._entries.taken())
        return [entry for entry in found if entry is not None]

    def find(self, name: str) -> CursorEntry | None:
        """Return the cursor of this name, or None.

        :raises DamagedQueue: the entry fails its checksum.
        """
        self._locks.check()
        index = self._entries.index_of(_encode_name(name))
        if index is not None:
            self._check_whole(index)
        return None if index is None else self._look(index)

    def renumber(self, epoch: int, successor: Callable[[int, int], int | None]) -> None:
        """Move every cursor to `successor(epoch, seq)` in the new epoch, unless that is None."""
        for index in range(self._entries.count):
            entry = self._look(index)
            seq = None if entry is None else successor(entry.epoch, entry.seq)
            if entry is not None and entry.is_whole and seq is not None:
                self._entries.move(index, seq, epoch)

    def _check_whole(self, index: int) -> None:
        if self._entries.is_whole(index):
            return
        raw = self._entries.raw(index)
        raise DamagedQueue(
            self._locks.path,
            f"row {index} of the table of readers",
            self._offset + index * ENTRY_SIZE,
            "a position, an epoch and a name with their checksum",
            f"position {raw[16:24].hex()}, epoch {raw[8:16].hex()}, check {raw[_CHECK_AT:].hex()}",
            hint="where that reader was is not known: choose another name, and where it starts",
        )

    def is_alive(self, index: int) -> bool:
        """Tell whether this entry has an owner."""
        if not 0 <= index < self._entries.count:
            raise IndexError(f"entry {index} of a table of {self._entries.count}")
        self._locks.check()
        # The kernel reports only locks of other file descriptions.
        return index in self._claimed or self._locks.is_locked(self._base + index)

    def forget(self, name: str, *, timeout: float = 5.0) -> bool:
        """Free the cursor of this name; tell whether there was one.

        :raises CursorInUse: the cursor has an owner.
        :raises LockTimeout: another process kept the table locked for `timeout` seconds.
        """
        wanted = _encode_name(name)
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
        """Release all cursors claimed here, and the memory."""
        if self._locks.is_open:
            with self._allocation:
                for cursor in list(self._claimed.values()):
                    cursor.release()
                self._locks.close()
        self._entries.close()

    @contextlib.contextmanager
    def _allocating(self, timeout: float) -> Iterator[None]:
        """Hold the allocation lock, against threads and processes."""
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
        # Last the entries of killed readers, which only a try of their lock reveals.
        for state in (_FREE, _PASSING):
            for index in self._entries.in_state(state):
                # An entry under release is free by its state, but still locked.
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
            # Without a pid, its owner is about to unlock it.
            pid = self._entries.pid(index)
            if pid or not next(pauses):
                raise CursorInUse(name, pid, hint="end that process, or choose another name")

    def _let_go(self, cursor: Cursor) -> None:
        index = cursor.index
        # All stores come before the unlock: after it, the entry may have another owner.
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
        text, is_whole = name.decode(errors="replace"), self._entries.is_whole(index)
        return CursorEntry(index, text, pid, epoch, seq, updated_ns, alive, is_whole)


class Cursor:
    """A position that this process owns until `release`. Not thread-safe."""

    def __init__(
        self,
        index: int,
        name: str,
        is_new: bool,
        entries: _Entries,
        locks: LockFile,
        let_go: Callable[[Cursor], None],
    ) -> None:
        #: Index in the table.
        self.index = index
        #: The name that keeps its position, or empty.
        self.name = name
        #: Whether it had no earlier position, and started where the caller said.
        self.is_new = is_new
        self._entries = entries
        self._locks = locks
        self._let_go: Callable[[Cursor], None] | None = let_go

    @property
    def epoch(self) -> int:
        """The epoch of the stream that `seq` belongs to."""
        self._check()
        return self._entries.epoch(self.index)

    @property
    def seq(self) -> int:
        """The next message to read: all before it are done."""
        self._check()
        return self._entries.seq(self.index)

    def move(self, seq: int, epoch: int | None = None) -> None:
        """Move to `seq`: all messages before it are done.

        :raises Closed: the cursor was released, or belongs to the parent of a fork.
        """
        self._check()
        _check_number("seq", seq)
        if epoch is not None:
            _check_number("epoch", epoch)
        self._entries.move(self.index, seq, epoch)

    def release(self) -> None:
        """Release the cursor; a named one keeps its position. Idempotent; no effect in a fork."""
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


def _pauses(deadline: float) -> Iterator[bool]:
    """Sleep with growing pauses, and yield True; yield False after the deadline."""
    pause = _FIRST_PAUSE
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
        yield True
    while True:
        yield False


def _check_number(what: str, number: int) -> None:
    if not 0 <= number < _WORD_END:
        raise PositionError(f"a cursor cannot stand at {what} {number}: it has 64 bits, unsigned")
