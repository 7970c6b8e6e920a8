"""How is a wide queue created?"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    AlreadyExists,
    DamagedQueue,
    InvalidOption,
    LockTimeout,
    NotFound,
)
from penstock.core.interfaces import Closable
from penstock.core.url import URL
from penstock.core.whole_files import make_folder, open_new, sync_names
from penstock.queue.storage import LockFile, storage_errors
from penstock.queue.wide.file import (
    IN_MEMORY,
    Geometry,
    Header,
    QueueFile,
    file_of,
    mark,
    state_word,
)
from penstock.queue.wide.layout import (
    COMPRESSIONS,
    LIVE_WRITER,
    MAGIC,
    PAGE,
    VERSION,
    Compression,
    HeaderFlag,
    State,
)
from penstock.queue.wide.options import WideOptions

if TYPE_CHECKING:
    from penstock.core.stream_id import StreamId

__all__ = [
    "MemoryQueue",
    "busy_error",
    "create_from_options",
    "create_queue",
    "new_header",
    "write_new_file",
]

#: Default permissions of a new file: the owner's only.
_PRIVATE: Final = 0o600
_NO_FLAGS: Final = HeaderFlag(0)


def create_from_options(
    path: str,
    options: WideOptions,
    *,
    replace: bool,
    exclusive: bool = False,
    writers_follow: bool = False,
) -> None:
    """Create a queue by its options; an existing one stays, unless `replace`.

    :param writers_follow: all writers of a `writers=many` queue are the caller's, and switch to
        the new one
    :raises AlreadyExists: the queue exists, with `exclusive`.
    :raises StorageError: no space, or no permission.
    :raises LockTimeout: a process writes to the queue to be replaced.
    """
    if options.sparse and options.writers == "many":
        raise InvalidOption("sparse", "true", "is for queues with one writer")
    with contextlib.nullcontext() if exclusive else contextlib.suppress(AlreadyExists):
        create_queue(
            path,
            Geometry.fitting(options.slots, options.size, options.readers),
            flags=flags_of(options),
            compression=options.compress,
            stream=options.stream,
            replace=replace,
            mode=options.mode,
            writers_follow=writers_follow,
        )


def flags_of(options: WideOptions) -> HeaderFlag:
    flags = HeaderFlag(0)
    if options.crc:
        flags |= HeaderFlag.CRC
    if options.sparse:
        flags |= HeaderFlag.SPARSE
    if options.writers == "many":
        flags |= HeaderFlag.MANY_WRITERS
    return flags


class MemoryQueue(Closable):
    """An unnamed queue in memory (memfd), passed to child processes by descriptor.

    with MemoryQueue(slots=1024, size=1 << 20) as queue:
        subprocess.run([..., queue.url], pass_fds=[queue.fd])
    """

    def __init__(self, **options: object) -> None:
        """Create a queue; `options` are those of `fmq:`.

        :raises InvalidOption: an option is unknown, or its value is invalid.
        """
        chosen = WideOptions.of(URL.parse("fmq:/memory", options))
        geometry = Geometry.fitting(chosen.slots, chosen.size, chosen.readers)
        header = new_header(geometry, flags_of(chosen), chosen.compress, chosen.stream)
        self.fd = os.memfd_create("penstock")
        try:
            with storage_errors("creating", "a queue in memory"):
                write_new_file(self.fd, header, geometry, sparse=chosen.sparse)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def url(self) -> str:
        """The URL for this process, and for children that inherit the descriptor."""
        return f"fmq:/dev/fd/{self.fd}"

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


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
    writers_follow: bool = False,
) -> None:
    """Create a queue atomically, with its disk space allocated unless it is sparse.

    Permissions are `mode`, or those of the replaced queue, or the owner's only.

    :raises AlreadyExists: the queue exists, without `replace`.
    :raises LockTimeout: a process writes to the queue to be replaced.
    :raises StorageError: no space, or no permission.
    """
    with contextlib.ExitStack() as undo:
        old = None
        if replace:
            old = _to_be_replaced(path, undo, writers_follow=writers_follow)
            if mode is None and old is not None:
                mode = old.mode
        header = new_header(geometry, flags, compression, stream, first_seq)
        _make(path, geometry, header, mode, replace=replace)
        if old is not None:
            mark(old, State.REPLACED)


def _make(path: str, geometry: Geometry, header: bytes, mode: int | None, *, replace: bool) -> None:
    """Make the complete file, then give it its name."""
    file = file_of(path)
    folder = Path(file).parent
    is_sparse = HeaderFlag.SPARSE in HeaderFlag(Header(header)["flags"])
    with storage_errors("creating", file):
        if not replace and os.path.lexists(file):
            raise AlreadyExists(
                f"there is a queue at {path} already", hint="penstock create --replace empties it"
            )
        make_folder(folder)
        made = folder / f".{Path(file).name}.{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = open_new(made, _PRIVATE)
        try:
            os.fchmod(descriptor, _PRIVATE if mode is None else mode)
            write_new_file(descriptor, header, geometry, sparse=is_sparse)
            is_on_disk = not file.startswith(IN_MEMORY)
            if is_on_disk:  # a power failure leaves the complete queue, or none
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


def write_new_file(descriptor: int, header: bytes, geometry: Geometry, *, sparse: bool) -> None:
    """Set the size of a new file, allocate its space, and write its header."""
    if sparse:
        os.ftruncate(descriptor, geometry.file_size)
        os.posix_fallocate(descriptor, 0, geometry.slots_offset)
    else:
        os.posix_fallocate(descriptor, 0, geometry.file_size)
    os.pwrite(descriptor, header, 0)


def _link(made: Path, file: str, path: str) -> None:
    """Link the complete file to its name, unless that exists."""
    try:
        os.link(made, file)
    except FileExistsError:
        raise AlreadyExists(f"there is a queue at {path} already") from None


def _to_be_replaced(
    path: str, undo: contextlib.ExitStack, *, writers_follow: bool
) -> QueueFile | None:
    """Map the queue to be replaced; `undo` closes it. Writers are kept out until then.

    :raises LockTimeout: a process writes to it.
    """
    try:
        old = QueueFile.open(path, writable=True)
    except (NotFound, DamagedQueue):
        return None
    undo.callback(old.close)
    locks = LockFile(old.descriptor)
    undo.callback(locks.close)
    if not locks.try_lock(*((LIVE_WRITER, 1) if writers_follow else old.writer_locks)):
        raise busy_error(path, old, "end it first; what it writes would be lost")
    return old


def busy_error(path: str, file: QueueFile, hint: str) -> LockTimeout:
    """Return the error for a queue that a process has open for writing."""
    is_many = HeaderFlag.MANY_WRITERS in file.flags  # the pid is that of the last one to write
    who = "a process" if is_many else f"process {file.field('writer_pid')}"
    return LockTimeout(f"{who} writes to {path} now", hint=hint)


def new_header(
    geometry: Geometry,
    flags: HeaderFlag = _NO_FLAGS,
    compression: Compression = Compression.NONE,
    stream: StreamId | None = None,
    first_seq: int = 0,
    epoch: int | None = None,
) -> bytes:
    """Return the header page of an empty queue; `epoch=None`: a new random epoch."""
    page = bytearray(PAGE)
    header = Header(page)
    for name, value in {
        "magic": MAGIC,
        "version": VERSION,
        "flags": flags,
        "epoch": secrets.randbits(63) | 1 if epoch is None else epoch,
        "slots": geometry.slots,
        "buffer_size": geometry.buffer_size,
        "readers": geometry.readers,
        "compression": COMPRESSIONS.index(compression),
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
        header.stream = stream
    header["check"] = header.checksum()
    return bytes(page)
