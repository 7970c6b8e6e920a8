"""What becomes of a queue when it is made, and when its machine went down while it was written?"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.closing import Closable
from penstock.core.errors import AlreadyExists, InvalidOption
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.options import parse_options
from penstock.core.url import URL
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import LINEAGE, LIVE_WRITER, Geometry, HeaderFlag, check_of
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.queue_file import (
    QueueFile,
    create_queue,
    new_header,
    reader_table,
    write_new_file,
)
from penstock.queue.wide.verification import copy_aside, whole_run

if TYPE_CHECKING:
    from penstock.queue.liveness import LockFile

__all__ = ["MemoryQueue", "boot_id", "create_from_options", "needs_recovery", "recover"]

log = logging.getLogger(__name__)

#: While another writer looks through the queue, ask this often (seconds).
_LOOK_FOR_RECOVERY = 0.01


def create_from_options(
    path: str, options: WideOptions, *, replace: bool, exclusive: bool = False
) -> None:
    """Make the queue that the options ask for.

    :raises AlreadyExists: with `exclusive`: there is one. Otherwise that is fine.
    :raises StorageError: there is no space, or no permission.
    :raises LockTimeout: it is to be replaced, and somebody writes to it.
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
    """A queue in memory that has no name: it is handed to child processes, and ends with them.

    with MemoryQueue(slots=1024, size=1 << 20) as queue:
        subprocess.run([..., queue.url], pass_fds=[queue.fd])
    """

    def __init__(self, **options: object) -> None:
        """Make one, with the options that `fmq:` has for queues that it creates.

        :raises InvalidOption: there is no such option, or its value does not fit.
        """
        chosen = parse_options(URL.parse("fmq:/memory", options), WideOptions)
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
        """What this process and children that got the descriptor open it by."""
        return f"fmq:/dev/fd/{self.fd}"

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def needs_recovery(file: QueueFile) -> bool:
    """Tell whether the machine went down while somebody wrote to a queue."""
    written, boot = bytes(file.header["boot_id"][0]), boot_id()
    return bool(boot) and any(written) and written != boot


def recover(path: str, file: QueueFile, locks: LockFile) -> None:
    """Cut off messages that the disk did not get before the machine went down.

    A process that dies leaves a whole queue. A machine that does may have brought the header to
    the disk, and not yet all that it counts. The caller is a writer of the queue.

    :raises StorageError: whole messages cannot stay, and there is no space for a copy of them.
    """
    boot = boot_id()
    if not boot or bytes(file.header["boot_id"][0]) == boot:
        return
    if HeaderFlag.MANY_WRITERS not in file.flags:
        _recover(path, file, boot)
        return
    while not locks.try_lock(LIVE_WRITER):  # another of the writers is at it
        time.sleep(_LOOK_FOR_RECOVERY)
    try:
        if bytes(file.header["boot_id"][0]) != boot:
            _recover(path, file, boot)
    finally:
        locks.unlock(LIVE_WRITER)


def _recover(path: str, file: QueueFile, boot: bytes) -> None:
    if any(bytes(file.header["boot_id"][0])):
        run = whole_run(file)
        lost = file.field("head") - file.field("tail") - (run.end - run.start)
        if lost:
            log.warning("%s: %s messages did not get to the disk", path, f"{lost:,}")
        if run.dropped:
            # Those stand apart from the others. They cannot stay, but somebody may want them.
            copy = copy_aside(file.path)
            what = f"{run.dropped:,} of them are whole"
            log.warning("%s: %s; the queue as it was: %s", path, what, copy)
        _begin_epoch(file, run.end)
        # In this order, so that a writer that is killed here leaves a queue that opens.
        file.header["tail"] = run.start
        file.header["head"] = run.end
        if run.start == run.end:  # there is no message to go on behind
            file.header["first_seq"] = run.end
        file.header["guard"] = file.header["guard_next"] = 0
        file.header["check"] = check_of(file.header)
    file.header["boot_id"] = np.void(boot)
    if not file.is_memory:
        # Before a message comes. Else a power failure might forget the epoch that it is known by,
        # or leave a queue that looks as clean as it is now.
        with storage_errors("syncing", file.path):
            os.fdatasync(file.descriptor)


def _begin_epoch(file: QueueFile, end: int) -> None:
    """Give what comes from here on other numbers than what was there before, and may be known.

    Also if nothing seems to be missing: readers may have seen more than the disk. Whoever is
    killed in here leaves a queue whose next writer does it again.
    """
    old, header = file.field("epoch"), file.header
    header["check"] = 0  # until all of it is as it shall be
    before = [ancestor for ancestor in file.lineage if ancestor.epoch != old]
    lineage = (*before, Ancestor(old, end))[-LINEAGE:]
    header["lineage"][0] = 0
    header["lineage"][0][: len(lineage)] = lineage
    header["epoch"] = epoch = secrets.randbits(63) | 1
    bounds = Bounds(epoch, 0, end, lineage)
    with reader_table(file) if file.geometry.readers else contextlib.nullcontext() as table:
        if table is not None:
            table.renumber(epoch, bounds.successor)


def boot_id() -> bytes:
    """Return what this run of the machine is told by, or nothing where it has no such number."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return b""
