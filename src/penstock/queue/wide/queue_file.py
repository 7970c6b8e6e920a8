"""How is the file of a wide queue found, made and mapped?"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import (
    AlreadyExists,
    DamagedQueue,
    LockTimeout,
    NotFound,
    PenstockError,
)
from penstock.core.whole_files import open_new, sync_names
from penstock.queue.cursors import CursorTable
from penstock.queue.liveness import LockFile
from penstock.queue.storage import storage_error, storage_errors
from penstock.queue.wide import _ring
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.layout import (
    HEADER,
    LIVE_READER,
    LIVE_WRITER,
    MAGIC,
    PAGE,
    READER_SIZE,
    VERSION,
    Geometry,
    HeaderFlag,
    State,
    check_header,
    check_of,
    check_progress,
    header_of,
    lineage_of,
    state_of,
    state_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Ancestor
    from penstock.core.stream_id import StreamId

__all__ = [
    "SUFFIX",
    "QueueFile",
    "create_queue",
    "file_of",
    "groups_of",
    "mark",
    "new_header",
    "protect",
    "reader_table",
    "store_state",
    "write_new_file",
]

SUFFIX: Final = ".fmq"
#: Rights of a new file: its owner alone.
_PRIVATE: Final = 0o600
#: Numbers of writers, from that of the only one on.
_ALL_WRITERS: Final = 1 << 31
#: Bytes of the header that only recovery changes.
_CONSTANT: Final = 128
_NO_FLAGS: Final = HeaderFlag(0)

#: A queue that a parent process hands to its children.
_DESCRIPTOR = re.compile(r"/dev/fd/\d+|/proc/(self|\d+)/fd/\d+")

#: Where files are in memory.
_IN_MEMORY: Final = ("/dev/shm/", "/dev/fd/", "/proc/")  # noqa: S108 - no file is made here

#: `MADV_POPULATE_WRITE` of Linux 5.14: fault pages in, ready to be written.
_POPULATE_WRITE: Final = 23
#: Pages of a queue up to this size are faulted in when a writer opens it; more would take long.
_MOST_PREFAULTED: Final = 256 << 20


def file_of(path: str) -> str:
    """Return the file that a path names: `/data/beams` is in `/data/beams.fmq`."""
    if path.endswith(SUFFIX) or _DESCRIPTOR.fullmatch(path):
        return path
    return path + SUFFIX


def groups_of(path: str) -> Path:
    """Return the folder that keeps what the groups of readers of a queue have settled."""
    return Path(f"{file_of(path)}.groups")


class QueueFile:
    """An open, mapped queue. Closing lets go of it; memory in use elsewhere stays mapped."""

    def __init__(self, path: str, descriptor: int, *, writable: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.writable = writable
        self._close: Callable[[], object] = lambda: None
        with storage_errors("opening", path):
            status = os.fstat(descriptor)
            self.identity = status.st_dev, status.st_ino
            self.geometry = _checked(path, descriptor, status.st_size)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self.mapping = mmap.mmap(descriptor, self.geometry.file_size, prot=access)
        weakref.finalize(self.mapping, _ring.unwatch, _ring.watch(self.mapping)).atexit = False
        self.memory = memoryview(self.mapping)
        #: The header's fields, as they are at any moment; an array of one.
        self.header = header_of(self.mapping)
        check_progress(path, self.header, self.geometry)
        self.compression = Compression.of_code(int(self.header["compression"][0]))

    @classmethod
    def open(cls, path: str, *, writable: bool) -> QueueFile:
        """Map an existing queue.

        :raises NotFound: there is none.
        :raises DamagedQueue: it is none.
        """
        file = file_of(path)
        try:
            descriptor = os.open(file, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(
                f"there is no queue at {path}", hint=f"create it with: penstock create fmq:{path}"
            ) from None
        except OSError as error:
            raise storage_error("opening", file, error) from error
        try:
            queue = cls(file, descriptor, writable=writable)
        except BaseException:
            os.close(descriptor)
            raise
        queue._close = weakref.finalize(queue, os.close, descriptor)
        return queue

    @classmethod
    def open_to_read(cls, path: str) -> QueueFile:
        """Map a queue to read from: writable where that is allowed, to be in its reader table."""
        try:
            return cls.open(path, writable=True)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
                raise
        return cls.open(path, writable=False)

    def field(self, name: str) -> int:
        """Return a number of the header as it is now."""
        return state_of(self.header) if name == "state" else int(self.header[name][0])

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The epochs that this queue continues after power failures."""
        return lineage_of(self.header)

    @property
    def flags(self) -> HeaderFlag:
        return HeaderFlag(self.field("flags"))

    @property
    def is_memory(self) -> bool:
        """Whether it is in memory only: in /dev/shm, or a memfd."""
        return self.path.startswith(_IN_MEMORY)

    @property
    def mode(self) -> int:
        """Who may use the file, as `chmod` has it."""
        return os.fstat(self.descriptor).st_mode & 0o777

    def is_named(self) -> bool:
        """Tell whether the path names this queue, and not another or none."""
        if _DESCRIPTOR.fullmatch(self.path):
            return True  # it has no other name
        try:
            # Once a second for every idle reader: a Path costs five times as much.
            status = os.stat(self.path)  # noqa: PTH116
        except FileNotFoundError:
            return False
        except OSError:
            return True  # who knows
        return (status.st_dev, status.st_ino) == self.identity

    def has_writer(self) -> bool:
        """Tell whether somebody writes to it now, as far as this process may know."""
        if not self.writable:
            return False
        with contextlib.suppress(PenstockError):
            locks = LockFile(self.descriptor)
            try:
                is_many = HeaderFlag.MANY_WRITERS in self.flags
                return locks.is_locked(LIVE_WRITER, _ALL_WRITERS if is_many else 1)
            finally:
                locks.close()
        return False

    def is_current(self) -> bool:
        """Tell whether there is nothing better by that name: this queue, or none now."""
        return self.is_named() or not os.path.lexists(self.path)

    def prefault(self) -> None:
        """Fault all pages in, ready to be written, so that no write has to wait for one."""
        if self.geometry.file_size > _MOST_PREFAULTED or HeaderFlag.SPARSE in self.flags:
            return
        with contextlib.suppress(OSError):  # an older kernel: pages come one by one, later
            self.mapping.madvise(_POPULATE_WRITE)

    def cut_off(self) -> DamagedQueue:
        """Return the error for a file that has lost pages while it was mapped."""
        try:
            size: object = os.fstat(self.descriptor).st_size
        except OSError as error:
            size = error
        return DamagedQueue(
            self.path,
            "the file",
            0,
            f"{self.geometry.file_size} bytes, with their disk space",
            size,
            hint="it was cut off, or the disk is full, while it was in use: create it anew",
        )

    def close(self) -> None:
        # Not `mapping.close()`: a message in place, or an Arrow batch, may still be in use.
        if not hasattr(self, "mapping"):
            return  # closed before, by one who then met an error
        del self.header
        del self.memory
        del self.mapping
        self._close()


def _checked(path: str, descriptor: int, size: int) -> Geometry:
    """Check a header. One that does not pass its checksum may be recovered this very moment."""
    page = os.pread(descriptor, PAGE, 0)
    while True:
        try:
            return check_header(path, page, size)
        except DamagedQueue:
            before, page = page, os.pread(descriptor, PAGE, 0)
            if page[:_CONSTANT] == before[:_CONSTANT]:
                raise


def reader_table(file: QueueFile) -> CursorTable:
    """Return the rows of those who read a queue."""
    rows = memoryview(file.mapping)[PAGE : PAGE + file.geometry.readers * READER_SIZE]
    return CursorTable(file.descriptor, rows, live_base=LIVE_READER, offset=PAGE)


def store_state(file: QueueFile, state: State) -> None:
    """Give a queue another state. Nobody is woken."""
    # The word that has both halves in one store; then the one that older programs look at.
    file.header["state_check"] = state_word(state)
    file.header["state"] = state


def protect(file: QueueFile) -> None:
    """Give a queue of an earlier release the checksums that it lacks. The caller is a writer."""
    if not file.field("state_check"):
        file.header["state_check"] = state_word(file.field("state"))
    if not file.field("check"):
        file.header["check"] = check_of(file.header)


def mark(file: QueueFile, state: State) -> None:
    """Give a queue another state, and wake everybody who waits for it."""
    store_state(file, state)
    assert HEADER.fields is not None
    _ring.wake(file.mapping, HEADER.fields["wakes"][1])


def create_queue(
    path: str,
    geometry: Geometry,
    *,
    flags: HeaderFlag = _NO_FLAGS,
    compression: Compression = Compression.NONE,
    stream: StreamId | None = None,
    first_seq: int = 0,
    replace: bool = False,
    mode: int | None = None,
) -> None:
    """Make a queue: nobody ever sees a half-made one, and a full disk is an error now.

    Its owner alone may use it, unless `mode` says more, or the one that it replaces did.

    :raises AlreadyExists: there is one, and `replace` is not set.
    :raises LockTimeout: there is one, and somebody writes to it now.
    :raises StorageError: there is no space, or no permission.
    """
    file = file_of(path)
    old = _to_be_replaced(path) if replace else None
    header = new_header(geometry, flags, compression, stream, first_seq)
    folder = Path(file).parent
    with storage_errors("creating", file):
        if not replace and os.path.lexists(file):
            raise AlreadyExists(
                f"there is a queue at {path} already", hint="penstock create --replace empties it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{Path(file).name}.{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = open_new(made, _PRIVATE)
        try:
            if mode is None and old is not None:
                mode = old.mode
            os.fchmod(descriptor, _PRIVATE if mode is None else mode)
            write_new_file(descriptor, header, geometry, sparse=HeaderFlag.SPARSE in flags)
            is_on_disk = not file.startswith(_IN_MEMORY)
            if is_on_disk:  # after a power failure there is all of it under its name, or none
                os.fsync(descriptor)
            if replace:
                made.rename(file)
            else:
                _link(made, file, path)
            if is_on_disk:
                sync_names(folder)
        finally:
            os.close(descriptor)
            made.unlink(missing_ok=True)
    if old is not None:
        mark(old, State.REPLACED)
        old.close()


def write_new_file(descriptor: int, header: bytes, geometry: Geometry, *, sparse: bool) -> None:
    """Give a new file its size, its space on the disk and its header."""
    if sparse:
        os.ftruncate(descriptor, geometry.file_size)
        os.posix_fallocate(descriptor, 0, geometry.slots_offset)
    else:
        os.posix_fallocate(descriptor, 0, geometry.file_size)
    os.pwrite(descriptor, header, 0)


def _link(made: Path, file: str, path: str) -> None:
    """Let the finished file appear, unless somebody was quicker."""
    try:
        os.link(made, file)
    except FileExistsError:
        raise AlreadyExists(f"there is a queue at {path} already") from None


def _to_be_replaced(path: str) -> QueueFile | None:
    try:
        old = QueueFile.open(path, writable=True)
    except (NotFound, DamagedQueue):
        return None
    locks = LockFile(old.descriptor)
    has_writer = locks.is_locked(LIVE_WRITER)
    locks.close()
    if not has_writer:
        return old
    writer = old.field("writer_pid")
    old.close()
    raise LockTimeout(
        f"process {writer} writes to {path} now", hint="end it first; what it writes would be lost"
    )


def new_header(
    geometry: Geometry,
    flags: HeaderFlag = _NO_FLAGS,
    compression: Compression = Compression.NONE,
    stream: StreamId | None = None,
    first_seq: int = 0,
    epoch: int | None = None,
) -> bytes:
    """Return the first page of a queue without messages; of a new epoch, if none is given."""
    header = np.zeros(1, HEADER)
    for name, value in {
        "magic": MAGIC,
        "version": VERSION,
        "flags": flags,
        "epoch": secrets.randbits(63) | 1 if epoch is None else epoch,
        "slots": geometry.slots,
        "buffer_size": geometry.buffer_size,
        "readers": geometry.readers,
        "compression": compression.code,
        "slots_offset": geometry.slots_offset,
        "buffer_offset": geometry.buffer_offset,
        "file_size": geometry.file_size,
        "created_ns": time.time_ns(),
        "first_seq": first_seq,
        "head": first_seq,
        "tail": first_seq,
        "state_check": state_word(State.LIVE),
    }.items():
        header[name] = value
    if stream is not None:
        header["stream"] = np.void(bytes(stream))
    header["check"] = check_of(header)
    return header.tobytes()
