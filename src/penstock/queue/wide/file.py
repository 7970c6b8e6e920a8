"""How is the file of a wide queue found, checked and mapped?"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound, PenstockError, Unsupported
from penstock.core.interfaces import Ancestor
from penstock.core.stream_id import StreamId
from penstock.queue.storage import LockFile, data_ranges, storage_error, storage_errors
from penstock.queue.wide import _ring
from penstock.queue.wide.layout import (
    COMPRESSIONS,
    HEADER,
    LIVE_WRITER,
    MAGIC,
    MAX_BUFFER,
    MAX_READERS,
    MAX_SLOTS,
    MIN_SLOTS,
    PAGE,
    READER_SIZE,
    SLOT,
    VERSION,
    HeaderFlag,
    Slot,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = [
    "IN_MEMORY",
    "SUFFIX",
    "Geometry",
    "Header",
    "QueueFile",
    "boot_id",
    "check_head",
    "check_header",
    "file_of",
    "groups_of",
    "mark",
    "protect",
    "state_word",
    "store_state",
    "unpack_slot",
]

log = logging.getLogger(__name__)

SUFFIX: Final = ".fmq"
#: Lock bytes of writers, from that of a single writer on.
_ALL_WRITERS: Final = 1 << 31
#: Size of the header's constant part, which only recovery changes.
_CONSTANT: Final = 128
#: Attempts at a consistent read: a writer may wrap around the queue between two loads.
_LOOKS: Final = 100

#: Path of a queue that was inherited as a descriptor.
_DESCRIPTOR = re.compile(r"/dev/fd/\d+|/proc/(self|\d+)/fd/\d+")

#: Prefixes of paths to files in memory.
IN_MEMORY: Final = ("/dev/shm/", "/dev/fd/", "/proc/")  # noqa: S108 - no file is made here

#: `MADV_POPULATE_WRITE` of Linux 5.14: fault pages in, ready to be written.
_POPULATE_WRITE: Final = 23
#: Largest queue that is prefaulted when a writer opens it; more would take too long.
_MOST_PREFAULTED: Final = 256 << 20


_SLOT: Final = struct.Struct("<" + "".join(field.format for field in SLOT.fields.values()))
#: Numeric header fields: format of the memory cast, and index in it.
_NUMBERS: Final = {
    name: (field.format, field.offset // field.size)
    for name, field in HEADER.fields.items()
    if field.format in {"Q", "q", "I"}
}
#: Byte range of each header field.
_PLACES: Final = {
    name: slice(field.offset, field.offset + field.size) for name, field in HEADER.fields.items()
}


def file_of(path: str) -> str:
    """Return the file of a queue: `/data/beams.fmq` for `/data/beams`."""
    if path.endswith(SUFFIX) or _DESCRIPTOR.fullmatch(path):
        return path
    return path + SUFFIX


def groups_of(path: str) -> Path:
    """Return the directory of the states of a queue's groups."""
    return Path(f"{file_of(path)}.groups")


def boot_id() -> bytes:
    """Return the kernel's id of this boot; empty if there is none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


class Geometry(NamedTuple):
    """Sizes of the parts of a queue."""

    slots: int
    buffer_size: int
    readers: int

    @property
    def slots_offset(self) -> int:
        return PAGE + _whole_pages(self.readers * READER_SIZE)

    @property
    def buffer_offset(self) -> int:
        return _whole_pages(self.slots_offset + self.slots * SLOT.size)

    @property
    def file_size(self) -> int:
        return self.buffer_offset + self.buffer_size

    def slot_offset(self, seq: int) -> int:
        """Return the file offset of the slot of a message."""
        return self.slots_offset + seq % self.slots * SLOT.size

    @classmethod
    def fitting(cls, slots: int, buffer_size: int, readers: int) -> Geometry:
        """Return the smallest valid geometry of at least these sizes: slots are a power of two."""
        return cls(1 << max(1, (slots - 1).bit_length()), _whole_pages(buffer_size), readers)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def unpack_slot(memory: Buffer, offset: int = 0) -> Slot:
    """Unpack the slot at `offset`."""
    return Slot._make(_SLOT.unpack_from(memory, offset))


class Header:
    """Live view of a queue's header fields."""

    __slots__ = ("_numbers", "_page")

    def __init__(self, memory: Buffer) -> None:
        self._page = memoryview(memory)[:PAGE]
        # These casts load and store aligned numbers atomically.
        self._numbers = {kind: self._page.cast("B").cast(kind) for kind in ("Q", "q", "I")}

    def __getitem__(self, name: str) -> int:
        kind, index = _NUMBERS[name]
        return self._numbers[kind][index]

    def __setitem__(self, name: str, value: int) -> None:
        kind, index = _NUMBERS[name]
        self._numbers[kind][index] = value

    def _bytes(self, name: str) -> bytes:
        return bytes(self._page[_PLACES[name]])

    def _store(self, name: str, value: bytes) -> None:
        place = _PLACES[name]
        self._page[place] = value.ljust(place.stop - place.start, b"\0")

    @property
    def stream(self) -> StreamId | None:
        """The stream that the messages belong to."""
        own = self._bytes("stream")
        return StreamId(own) if any(own) else None

    @stream.setter
    def stream(self, stream: StreamId) -> None:
        self._store("stream", bytes(stream))

    @property
    def boot_id(self) -> bytes:
        """The boot in which it was written last; zeros: all messages are synced."""
        return self._bytes("boot_id")

    @boot_id.setter
    def boot_id(self, boot: bytes) -> None:
        self._store("boot_id", boot)

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The epochs that the queue continues after power failures, the oldest first."""
        numbers = struct.unpack("<8Q", self._bytes("lineage"))
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return tuple(Ancestor(epoch, end) for epoch, end in pairs if epoch)

    @lineage.setter
    def lineage(self, lineage: Sequence[Ancestor]) -> None:
        numbers = [number for ancestor in lineage for number in ancestor]
        self._store("lineage", struct.pack(f"<{len(numbers)}Q", *numbers))

    @property
    def state(self) -> int:
        """The state of the queue.

        `state_check`, if its halves agree, overrides `state`, which may have a flipped bit or be
        stale: the process was killed between the two stores.
        """
        both = self["state_check"]
        state = both & 0xFFFF_FFFF
        return state if both and both == state_word(state) else self["state"]

    def noted_times(self, kind: Literal["source", "origin"]) -> tuple[int, int] | None:
        """Return the range of times of a sealed segment's messages; None: not recorded."""
        if self[f"{kind}_check"] != self._times_check(kind):
            return None
        return self[f"{kind}_least"], self[f"{kind}_greatest"]

    def note_times(self, kind: Literal["source", "origin"], times: NDArray[np.int64]) -> None:
        """Record the range of these times."""
        self[f"{kind}_check"] = 0  # invalid until all fields are stored
        self[f"{kind}_least"], self[f"{kind}_greatest"] = int(times.min()), int(times.max())
        self[f"{kind}_check"] = self._times_check(kind)

    def _times_check(self, kind: str) -> int:
        both = self._bytes(f"{kind}_least") + self._bytes(f"{kind}_greatest")
        return _ring.crc32c(both) | 1 << 32

    def checksum(self) -> int:
        """Compute `check`: the checksum of the fields that only recovery changes."""
        kept = bytes(self._page[: HEADER.fields["check"].offset])
        return _ring.crc32c(kept + self._bytes("lineage")) or 1


class QueueFile:
    """An open, mapped queue. After `close`, memory still in use stays mapped."""

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
        self.header = Header(self.mapping)
        _check_progress(self)
        self.compression = COMPRESSIONS[self.header["compression"]]

    @classmethod
    def open(cls, path: str, *, writable: bool) -> QueueFile:
        """Map an existing queue.

        :raises NotFound: there is no queue at this path.
        :raises DamagedQueue: the file is no queue, or its header is damaged.
        """
        file = file_of(path)
        try:
            descriptor = os.open(file, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            hint = f"create it with: penstock create fmq:{path}"
            if os.path.isdir(path):  # noqa: PTH112 - as `os.open`
                hint = f"it is a folder: a log is opened as log:{path}"
            raise NotFound(f"there is no queue at {path}", hint=hint) from None
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
        """Map a queue for reading; writable if permitted, for its reader table.

        :raises NotFound: there is no queue at this path.
        :raises DamagedQueue: the file is no queue, or its header is damaged.
        """
        try:
            queue = cls.open(path, writable=True)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
                raise
            queue = cls.open(path, writable=False)
        try:
            # In this order: the check is never above a head that is loaded later.
            check_head(path, queue.field("head_check"), queue.field("head"), queue.slot)
        except BaseException:
            queue.close()
            raise
        return queue

    def field(self, name: str) -> int:
        """Return the current value of a header field."""
        return self.header.state if name == "state" else self.header[name]

    def slot(self, seq: int) -> Slot:
        """Copy the slot of a message. The caller checks whether it was overwritten meanwhile."""
        return unpack_slot(self.mapping, self.geometry.slot_offset(seq))

    @property
    def flags(self) -> HeaderFlag:
        return HeaderFlag(self.field("flags"))

    @property
    def is_memory(self) -> bool:
        """Whether it is in memory only: in /dev/shm, or a memfd."""
        return self.path.startswith(IN_MEMORY)

    @property
    def mode(self) -> int:
        """Permissions of the file, as of `chmod`."""
        return os.fstat(self.descriptor).st_mode & 0o777

    def restore_head(self) -> None:
        """Restore a `head` that damage has lowered. The caller is the only writer."""
        try:
            check_head(self.path, self.field("head_check"), self.field("head"), self.slot)
        except DamagedQueue as error:
            log.warning("%s; it is restored", error)
            self.header["head"] = self.field("head_check")

    def needs_recovery(self) -> bool:
        """Tell whether the machine crashed while the queue was written."""
        written, boot = self.header.boot_id, boot_id()
        return bool(boot) and any(written) and written != boot

    def begin_boot(self) -> None:
        """Store and sync the boot id, before the first message.

        Otherwise the queue could look clean after a power failure.

        :raises StorageError: the sync fails.
        """
        self.header.boot_id = boot_id()
        if not self.is_memory:
            with storage_errors("syncing", self.path):
                os.fdatasync(self.descriptor)

    def is_named(self) -> bool:
        """Tell whether the path still names this queue."""
        if _DESCRIPTOR.fullmatch(self.path):
            return True  # it has no other name
        try:
            # Called every second by each idle reader: a Path costs five times as much.
            status = os.stat(self.path)  # noqa: PTH116
        except FileNotFoundError:
            return False
        except OSError:
            return True  # unknown: assume so
        return (status.st_dev, status.st_ino) == self.identity

    @property
    def writer_locks(self) -> tuple[int, int]:
        """The first lock byte of its writers, and their number."""
        return LIVE_WRITER, _ALL_WRITERS if HeaderFlag.MANY_WRITERS in self.flags else 1

    def has_writer(self) -> bool:
        """Tell whether a process has it open for writing; False without permission to see."""
        if not self.writable:
            return False
        with contextlib.suppress(PenstockError):
            locks = LockFile(self.descriptor)
            try:
                return locks.is_locked(*self.writer_locks)
            finally:
                locks.close()
        return False

    def is_current(self) -> bool:
        """Tell whether the path names this queue or none, but no other."""
        return self.is_named() or not os.path.lexists(self.path)

    def prefault(self) -> None:
        """Fault in all pages for writing, so that no write waits for a page fault."""
        if self.geometry.file_size > _MOST_PREFAULTED or HeaderFlag.SPARSE in self.flags:
            return
        with contextlib.suppress(OSError):  # an older kernel: pages are faulted in later
            self.mapping.madvise(_POPULATE_WRITE)

    def write_again(self) -> None:
        """Have the next sync write all messages, though none has changed since the last one.

        To the kernel every page looks written to; what is in it stays, and others may write.

        :raises OSError: the operating system refuses, or is older than Linux 5.14.
        """
        for start, end in data_ranges(self.descriptor, self.geometry.slots_offset):
            self.mapping.madvise(_POPULATE_WRITE, start, end - start)

    def cut_off(self) -> DamagedQueue:
        """Return the error for a file that was truncated while mapped."""
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
        # Not `mapping.close()`: a lent message or Arrow batch may still use it.
        if not hasattr(self, "mapping"):
            return  # closed before, on an error
        del self.header
        del self.memory
        del self.mapping
        self._close()


def _checked(path: str, descriptor: int, size: int) -> Geometry:
    """Check the header; retry while it changes: a recovery may be under way."""
    page = os.pread(descriptor, PAGE, 0)
    while True:
        try:
            return check_header(path, page, size)
        except DamagedQueue:
            before, page = page, os.pread(descriptor, PAGE, 0)
            if page[:_CONSTANT] == before[:_CONSTANT]:
                raise


def state_word(state: int) -> int:
    """Return the `state_check` of a state: its complement in the high half."""
    return state | (~state & 0xFFFF_FFFF) << 32


def check_header(path: str, header: bytes, file_size: int) -> Geometry:
    """Check that a header is valid, and that the file has its full size.

    :raises DamagedQueue: names the first invalid field.
    :raises Unsupported: the queue has a newer version.
    """
    if len(header) < PAGE:
        raise DamagedQueue(
            path, "the header", 0, f"{PAGE} bytes", len(header), hint="the file was cut off"
        )
    fields = Header(header)
    found = {name: fields[name] for name in _NUMBERS}

    def need(field: str, expected: object, *, holds: bool) -> None:
        if not holds:
            offset = HEADER.fields[field].offset
            raise DamagedQueue(path, field, offset, expected, found[field])

    need("magic", MAGIC, holds=found["magic"] == MAGIC)
    if found["version"] > VERSION:
        raise Unsupported(
            f"queue {path} has version {found['version']} of the wide layout; "
            f"this Penstock knows version {VERSION}",
            hint="use a newer Penstock",
        )
    need("version", VERSION, holds=found["version"] == VERSION)
    slots = found["slots"]
    need(
        "slots",
        "a power of two",
        holds=MIN_SLOTS <= slots <= MAX_SLOTS and slots & (slots - 1) == 0,
    )
    size = found["buffer_size"]
    need("buffer_size", f"a multiple of {PAGE}", holds=0 < size <= MAX_BUFFER and size % PAGE == 0)
    need("readers", f"up to {MAX_READERS}", holds=found["readers"] <= MAX_READERS)
    last = len(COMPRESSIONS) - 1
    need("compression", f"up to {last}", holds=found["compression"] <= last)
    if both := found["state_check"]:
        word = state_word(both & 0xFFFF_FFFF)
        need("state_check", "the state and its bitwise complement", holds=both == word)
    need("state", f"up to {max(State)}", holds=fields.state <= max(State))
    geometry = Geometry(slots, size, found["readers"])
    for field in ("slots_offset", "buffer_offset", "file_size"):
        expected = getattr(geometry, field)
        need(field, expected, holds=found[field] == expected)
    if found["check"]:
        need("check", fields.checksum(), holds=found["check"] == fields.checksum())
    if file_size < geometry.file_size:
        raise DamagedQueue(
            path, "the file", 0, f"{geometry.file_size} bytes", file_size, hint="it was cut off"
        )
    return geometry


def _check_progress(file: QueueFile) -> None:
    """Check that `first_seq`, `tail` and `head` are consistent.

    A lowered `head` passes: readers check for it, and a writer restores it.

    :raises DamagedQueue: they are not.
    """
    header, slots = file.header, file.geometry.slots
    for _ in range(_LOOKS):
        # In this order: the values only grow, so a later load is never below an earlier one.
        first, oldest = header["first_seq"], header["tail"]
        check, head = header["head_check"], header["head"]
        if check > head and file.slot(check - 1).seq == check - 1:
            head = check
        if first <= oldest <= head <= oldest + slots:
            return
    field, expected = "tail", f"from {first} to {head}"
    if first <= oldest <= head:
        field, expected = "head", f"up to {oldest + slots}"
    raise DamagedQueue(file.path, field, HEADER.fields[field].offset, expected, header[field])


def check_head(path: str, check: int, head: int, slot: Callable[[int], Slot]) -> None:
    """Check that damage has not lowered `head`, which hides the last messages.

    :param check: `head_check`, loaded before `head`
    :param slot: returns the slot of a message
    :raises DamagedQueue: the last message that was published is beyond `head`.
    """
    if check > head and slot(check - 1).seq == check - 1:
        raise DamagedQueue(
            path,
            "head",
            HEADER.fields["head"].offset,
            check,
            head,
            hint="open it for writing: a writer restores it",
        )


def store_state(file: QueueFile, state: State) -> None:
    """Set the state of a queue, without waking its readers."""
    # First the word with both halves in one store; then the field for older programs.
    file.header["state_check"] = state_word(state)
    file.header["state"] = state


def protect(file: QueueFile) -> None:
    """Add missing checksums to a queue of an earlier release. The caller is a writer."""
    if not file.field("state_check"):
        file.header["state_check"] = state_word(file.field("state"))
    if not file.field("check"):
        file.header["check"] = file.header.checksum()


def mark(file: QueueFile, state: State) -> None:
    """Set the state of a queue, and wake its readers."""
    store_state(file, state)
    _ring.wake(file.mapping, HEADER.fields["wakes"].offset)
