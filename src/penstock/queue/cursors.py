"""How does a position outlive the process that moves it, and who owns it now?"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.closing import Closable
from penstock.core.errors import (
    Closed,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    LockTimeout,
    PositionError,
)
from penstock.queue.cursor_entries import (
    CHECK_AT,
    ENTRY_SIZE,
    FREE,
    NAMED,
    PASSING,
    Entries,
    encode_name,
)
from penstock.queue.liveness import LockFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENTRY_SIZE",
    "LIVE_BASE",
    "Cursor",
    "CursorEntry",
    "CursorTable",
]

#: The owner of entry i holds a lock on this byte + i. The byte before it serialises who takes an
#: entry. It is far behind the end of any file, so that these locks meet no others.
LIVE_BASE: Final = 1 << 62

_FILE_END: Final = 2**63 - 1
_WORD_END: Final = 2**64

#: While another process takes an entry, look again this often. That is a matter of microseconds.
_FIRST_PAUSE: Final = 0.000_02
_LONGEST_PAUSE: Final = 0.001


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
    #: Whether it passes its checksum; if not, `seq` is not to be trusted.
    is_whole: bool = True


class CursorTable(Closable):
    """Positions in mapped memory, each owned by at most one process at a time.

    The kernel knows who is alive: an owner holds a lock that ends with the process, however that
    ends. Safe to share between threads. A forked child has to open a table of its own.
    """

    def __init__(
        self,
        path_or_fd: str | int,
        memory: memoryview,
        *,
        live_base: int = LIVE_BASE,
        offset: int = 0,
    ) -> None:
        """Use the table in `memory`, which begins there in the file, with the locks of this file.

        :raises NotFound: there is no such file.
        :raises InvalidOption: the memory is read-only, not aligned, or not whole entries.
        """
        if not 1 <= live_base <= _FILE_END - memory.nbytes:
            raise InvalidOption("live_base", live_base, "leaves no room for the locks")
        self._base = live_base
        self._offset = offset
        self._entries = Entries(memory)
        self._locks = LockFile(path_or_fd)
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
        :raises DamagedQueue: its bytes do not pass their checksum.
        :raises LockTimeout: others kept the table busy for all that time.
        """
        wanted = b"" if name is None else encode_name(name)
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
        """Make sure that there is a cursor of this name; a new one starts at (`epoch`, `seq`).

        Nobody ever sees it owned, so whoever claims it at the same time gets it.

        :raises CursorTableFull: it would be one too many.
        :raises LockTimeout: others kept the table busy for all that time.
        """
        wanted = encode_name(name)
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
        """Return those that are taken: all named ones, and passing ones that have an owner."""
        self._locks.check()
        found = (self._look(index) for index in range(self._entries.count))
        return [entry for entry in found if entry is not None]

    def find(self, name: str) -> CursorEntry | None:
        """Return the cursor of this name, or None.

        :raises DamagedQueue: its bytes do not pass their checksum.
        """
        self._locks.check()
        index = self._entries.index_of(encode_name(name))
        if index is not None:
            self._check_whole(index)
        return None if index is None else self._look(index)

    def renumber(self, epoch: int, successor: Callable[[int, int], int | None]) -> None:
        """Let every cursor that `successor` knows a place for stand there, in another epoch."""
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
            f"position {raw[16:24].hex()}, epoch {raw[8:16].hex()}, check {raw[CHECK_AT:].hex()}",
            hint="where that reader was is not known: choose another name, and where it starts",
        )

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
        wanted = encode_name(name)
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
        for state in (FREE, PASSING):
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
        if state not in (NAMED, PASSING):
            return None
        alive = self.is_alive(index)
        if state == PASSING and not alive:
            return None
        text, is_whole = name.decode(errors="replace"), self._entries.is_whole(index)
        return CursorEntry(index, text, pid, epoch, seq, updated_ns, alive, is_whole)


class Cursor:
    """A position that this process owns, until it is released. For one thread at a time."""

    def __init__(
        self,
        index: int,
        name: str,
        is_new: bool,
        entries: Entries,
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


def _pauses(deadline: float) -> Iterator[bool]:
    """Wait a little longer each time; yield False once the time is over."""
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
