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
from penstock.core.options import parse_options
from penstock.core.url import URL
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import LIVE_WRITER, Geometry, HeaderFlag, readers_of
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.queue_file import QueueFile, create_queue, new_header, write_new_file
from penstock.queue.wide.verification import whole_run

if TYPE_CHECKING:
    from penstock.queue.liveness import LockFile

__all__ = ["MemoryQueue", "boot_id", "create_from_options", "recover"]

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


def recover(path: str, file: QueueFile, locks: LockFile) -> None:
    """Cut off messages that the disk did not get before the machine went down.

    A process that dies leaves a whole queue. A machine that does may have brought the header to
    the disk, and not yet all that it counts. The caller is a writer of the queue.
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
        oldest, head = whole_run(file)
        lost = file.field("head") - file.field("tail") - (head - oldest)
        readers = readers_of(file.mapping, file.geometry)
        is_ahead = (readers["state"] != 0) & (readers["position"] > np.uint64(head))
        if lost or is_ahead.any():
            what = f"{lost:,} messages" if lost else "the last messages that were read"
            log.warning("%s: %s did not get to the disk", path, what)
            # Their numbers are given again. Whoever knows them by the old epoch is to notice.
            epoch = secrets.randbits(63) | 1
            readers["position"][is_ahead] = head
            readers["epoch"] = epoch
            file.header["epoch"] = epoch
        # In this order, so that a writer that is killed here leaves a queue that opens.
        file.header["tail"] = oldest
        file.header["head"] = head
        if oldest == head:  # there is no message to go on behind
            file.header["first_seq"] = head
    file.header["boot_id"] = np.void(boot)


def boot_id() -> bytes:
    """Return what this run of the machine is told by, or nothing where it has no such number."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return b""
