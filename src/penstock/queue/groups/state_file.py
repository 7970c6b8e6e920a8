"""How does the state of a group outlive its members, and how do they take turns to change it?"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import zlib
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    DamagedQueue,
    LockTimeout,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Closable
from penstock.core.whole_files import make_as_folder, make_folder, sync_names, write_whole
from penstock.queue.groups.settled import NOBODY
from penstock.queue.groups.state import GroupState, Put, Record
from penstock.queue.storage import LockFile, storage_error, storage_errors
from penstock.queue.wide.file import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["MOST_MEMBERS", "Removed", "StateFile", "group_names", "look"]

_MAGIC: Final = b"PNGROUP\0"
_VERSION: Final = 1
#: Magic, version, checksum and length of the checkpoint; identity of the group, and boot id.
_HEADER: Final = struct.Struct("<8sIII16s16s")
#: Length and checksum of a record. The checksum continues that of all bytes before, so that
#: stale bytes after the last complete record, left by a power failure, never pass as one.
_FRAME: Final = struct.Struct("<II")

#: Longest journal (bytes) before the next checkpoint, or this multiple of the checkpoint's size.
_LONGEST_JOURNAL: Final = 512 << 10
_TIMES_CHECKPOINT: Final = 8
_LARGEST_RECORD: Final = 64 << 20

#: Byte locked by the member in its turn; after it, each live member locks a byte of its own.
_TURN: Final = 1 << 62
MOST_MEMBERS: Final = 4096
#: While another member has its turn, retry with these pauses, for `_PATIENCE` (seconds).
_FIRST_PAUSE: Final = 0.000_02
_LONGEST_PAUSE: Final = 0.001
_PATIENCE: Final = 10.0

_STATE: Final = ".state"
_LOCK: Final = ".lock"


class Removed(NotFound):
    """The group was removed while open, and possibly recreated."""


class StateFile(Closable):
    """A checkpoint of the state, followed by a journal of later changes.

    Members take turns by a lock that the kernel releases when its owner dies. In its turn, a
    member reads the records of the others, decides, and appends its own records with one write.
    Each keeps a copy of the state in memory, so the cost of a turn is that of the new records.
    """

    def __init__(self, folder: Path, name: str, make: Callable[[], GroupState]) -> None:
        """Open the state of a group, or create it by `make`.

        :raises DamagedQueue: the file is no state of a group.
        :raises Unsupported: a newer Penstock wrote it.
        :raises StorageError: the operating system reports an error.
        """
        self.path = folder / f"{name}{_STATE}"
        #: The state as of the last turn.
        self.state: GroupState
        self._fd = -1
        self._identity = self._boot = b""
        #: Start and end of the journal, and the checksum up to its end.
        self._start = self._at = self._crc = 0
        #: Whether the copy must be reloaded, because the last turn failed.
        self._is_stale = True
        self._pending: list[bytes] = []
        #: Count of records applied, of all members, since the file was opened.
        self.changes = 0
        lock = folder / f"{name}{_LOCK}"
        with storage_errors("creating", str(lock)):
            make_folder(folder)
            make_as_folder(lock)
        self._locks = LockFile(str(lock))
        try:
            self._lock()
            with storage_errors("opening", str(self.path)):
                if not self.path.exists():
                    self._write_checkpoint(make(), secrets.token_bytes(16))
                self._load()
                if self._boot != _boot():
                    self._begin_boot()
            self._unlock()
        except BaseException:
            self.close()
            raise

    # --- turns ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self) -> Iterator[GroupState]:
        """Lock the state to read and change it. Records of `add` are written at the end.

        :raises LockTimeout: another member did not end its turn.
        :raises Removed: the group was removed.
        :raises StorageError: the operating system reports an error; the change was discarded.
        """
        try:
            self._lock()
            self._catch_up()
            yield self.state
            self._append()
        except OSError as error:
            self._is_stale = True
            if isinstance(error, PenstockError):
                raise
            raise storage_error("using", str(self.path), error) from error
        except BaseException:
            self._is_stale = True
            raise
        finally:
            try:
                self._pending.clear()
                self._unlock()
            except BaseException:  # a signal came first, and the other members wait
                self._unlock()
                raise

    def add(self, record: Record) -> None:
        """Apply a record; only within a turn."""
        body = record.encode()
        self.state.apply(body)
        self._pending.append(body)
        self.changes += 1

    def sync(self) -> None:
        """Sync all turns so far to disk.

        :raises StorageError: the sync fails.
        """
        with storage_errors("syncing", str(self.path)):
            os.fdatasync(self._fd)

    def _lock(self) -> None:
        pause, deadline = _FIRST_PAUSE, time.monotonic() + _PATIENCE
        while not self._locks.try_lock(_TURN):
            if time.monotonic() >= deadline:
                raise LockTimeout(
                    f"{self.path}: another member of the group did not end its turn for "
                    f"{_PATIENCE:g} s",
                    hint="end or resume the process that stopped while it read or acknowledged",
                )
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _unlock(self) -> None:
        if self._locks.is_open:
            self._locks.unlock(_TURN)

    # --- members -------------------------------------------------------------------------------

    def claim(self, member: int) -> bool:
        """Take this member number until `close` or death; False: another process has it."""
        return self._locks.try_lock(_TURN + 1 + member)

    def is_alive(self, member: int) -> bool:
        """Tell whether another process has this member number."""
        return self._locks.is_locked(_TURN + 1 + member)

    # --- the file ------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Apply the records that other members appended since the last turn."""
        if self._is_stale or os.fstat(self._fd).st_nlink == 0:
            self._load()
        elif data := _read_from(self._fd, self._at):
            self._replay(data)

    def _load(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Removed(f"the group {self.path} was removed", hint="open it again") from None
        before, self._fd = self._fd, fd
        if before >= 0:
            os.close(before)
        data = _read_from(fd, 0)
        identity, boot, state, start = _checkpoint(str(self.path), data)
        if self._identity not in (b"", identity):
            # Its identity is not taken over: this member has neither its lock nor a number in it.
            raise Removed(f"the group {self.path} was made anew", hint="open it again")
        self._identity, self._boot, self.state, self._start = identity, boot, state, start
        self._at, self._crc = self._start, zlib.crc32(data[: self._start])
        self._is_stale = False
        self._replay(data[self._start :])

    def _replay(self, data: bytes) -> None:
        size, count, self._crc = _apply_records(self.state, data, self._crc, self.path, self._at)
        self._at += size
        self.changes += count
        if size < len(data):
            # A torn record of a member that died while writing: no member applies it.
            os.ftruncate(self._fd, self._at)

    def _append(self) -> None:
        if not self._pending:
            return
        if self._at - self._start > max(_LONGEST_JOURNAL, _TIMES_CHECKPOINT * self._start):
            self._write_checkpoint(self.state, self._identity)
            self._load()
            return
        crc, data = self._crc, bytearray()
        for body in self._pending:
            crc = zlib.crc32(body, crc)
            data += _FRAME.pack(len(body), crc) + body
        written = os.pwrite(self._fd, data, self._at)
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._at + written)
        self._at += len(data)
        self._crc = crc

    def _write_checkpoint(self, state: GroupState, identity: bytes) -> None:
        """Replace the file, and sync it, whatever the `sync` option: this is rare."""
        text = state.to_json()
        header = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text), identity, _boot())
        write_whole(self.path, header + text, sync=True, as_folder=True)
        sync_names(self.path.parent)

    def _begin_boot(self) -> None:
        """End all leases and waits after a reboot: no member is left, and the clock restarted."""
        spans = [(s.first, s.end, s.deliveries, s.key) for s in self.state.map.spans]
        self.state.members.clear()
        self.state.apply(Put(NOBODY, 0, spans).encode())
        self._write_checkpoint(self.state, self._identity)
        self._load()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._locks.close()


def look(folder: Path, name: str) -> tuple[GroupState, set[int]]:
    """Return the state of a group, and its live members, without changing anything.

    :raises NotFound: no group has this name.
    :raises DamagedQueue: its state is not readable.
    """
    path = folder / f"{name}{_STATE}"
    with storage_errors("reading", str(path)):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no group at {path}") from None
    _, _, state, start = _checkpoint(str(path), data)
    _apply_records(state, data[start:], zlib.crc32(data[:start]), path, start)
    try:
        locks = LockFile(str(folder / f"{name}{_LOCK}"))
    except OSError:
        return state, set()  # no permission: owned by another user
    try:
        return state, {i for i in state.members if locks.is_locked(_TURN + 1 + i)}
    finally:
        locks.close()


def group_names(folder: Path) -> list[str]:
    """Return the names of the groups in a folder."""
    return sorted(path.name.removesuffix(_STATE) for path in folder.glob(f"*{_STATE}"))


def _boot() -> bytes:
    return boot_id().ljust(16, b"\0")


def _read_from(fd: int, at: int) -> bytes:
    data = os.pread(fd, 1 << 16, at)
    if len(data) == 1 << 16:
        data += os.pread(fd, os.fstat(fd).st_size, at + len(data))
    return data


def _checkpoint(path: str, data: bytes) -> tuple[bytes, bytes, GroupState, int]:
    """Return the identity, boot id and state of a checkpoint, and the journal's offset."""
    hint = "restore it, or move it away: then the group begins anew"
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamagedQueue(path, "magic", 0, _MAGIC, data[:8], hint=hint)
    _, version, crc, length, identity, boot = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise Unsupported(
            f"{path} has version {version} of a group; this Penstock knows {_VERSION}",
            hint="use the Penstock that made it, or a newer one",
        )
    end = _HEADER.size + length
    text = data[_HEADER.size : end]
    if len(text) < length or zlib.crc32(text) != crc:
        raise DamagedQueue(path, "crc32 of the checkpoint", 12, "right", "wrong", hint=hint)
    try:
        return identity, boot, GroupState.from_json(text), end
    except ValueError as error:
        raise DamagedQueue(path, "the checkpoint", 20, "a state", error, hint=hint) from None


def _apply_records(
    state: GroupState, data: bytes, crc: int, path: Path, start: int
) -> tuple[int, int, int]:
    """Apply the complete records that `data` starts with; return their size, count and checksum.

    :param crc: checksum up to `start`, where `data` is in the file
    """
    at = count = 0
    while (begin := at + _FRAME.size) < len(data):
        length, expected = _FRAME.unpack_from(data, at)
        body = data[begin : begin + length]
        if not 0 < length <= _LARGEST_RECORD or len(body) < length:
            break
        if (checksum := zlib.crc32(body, crc)) != expected:
            break
        try:
            state.apply(body)
        except ValueError as error:
            hint = "restore it, or move it away: then the group begins anew"
            raise DamagedQueue(
                str(path), "a record", start + at, "one of a group", error, hint=hint
            ) from None
        at, crc = begin + length, checksum
        count += 1
    return at, count, crc
