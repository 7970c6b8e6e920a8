"""How is a classic queue created, opened, or waited for?"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import AlreadyExists, NotFound
from penstock.queue.classic.device import (
    Device,
    FileDevice,
    SharedMemoryDevice,
    keys_are_taken,
    lock_held,
    open_lock_file,
    shared_memory_key,
)
from penstock.queue.classic.layout import (
    BUFFER_COOKIE,
    FREE_SLOT,
    STATUS_SIZE,
    Status,
    slot_offset,
    stat_size,
)
from penstock.queue.classic.slots import NotYetMade, read_status
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.classic.options import ClassicOptions

__all__ = [
    "create_queue",
    "exists",
    "initialise",
    "is_blank",
    "open_device",
    "open_to_read",
    "open_to_write",
]

#: Written a page at a time: a larger write makes larger pages in the kernel's cache, and then
#: every slot written later costs more.
_FREE_SLOTS_AT_ONCE = 102


def exists(path: str) -> bool:
    """Tell whether a queue exists: both parts, with a status."""
    try:
        device = open_device(path, writable=False)
    except NotFound:
        return False
    try:
        with storage_errors("reading", path):
            return not is_blank(device)
    finally:
        device.close()


def open_device(path: str, *, writable: bool) -> Device:
    """Open the files or segments of an existing queue.

    :raises NotFound: there is no queue at this path.
    :raises StorageError: the operating system reports an error.
    """
    key = shared_memory_key(path)
    with storage_errors("opening", path):
        if key is None:
            return FileDevice.open(path, writable=writable)
        return SharedMemoryDevice.open(path, key, writable=writable)


def create_queue(
    path: str, nslots: int, buf_size: int, now: int, *, replace: bool, lock_timeout: float
) -> Device:
    """Create a queue and return its device; `replace` empties an existing one.

    Under the writers' lock, so that only one of two concurrent processes creates it.

    :raises AlreadyExists: the queue exists, without `replace`.
    :raises StorageError: the operating system reports an error.
    """
    if not replace and exists(path):
        raise AlreadyExists(
            f"there is a queue at {path} already", hint="penstock create --replace empties it"
        )
    status = Status.of_empty_queue(nslots, buf_size, now)
    key = shared_memory_key(path)
    with storage_errors("creating", path):
        if key is None:
            return _create_files(path, status, replace, lock_timeout)
        return _create_segments(path, key, status, replace, lock_timeout)


def _create_files(path: str, status: Status, replace: bool, lock_timeout: float) -> Device:
    device = FileDevice.open_or_make(path)
    try:
        with device.locked(lock_timeout):
            if replace or is_blank(device):  # otherwise another process created it
                initialise(device, status)
    except BaseException:
        device.close()
        raise
    return device


def _create_segments(
    path: str, key: int, status: Status, replace: bool, lock_timeout: float
) -> Device:
    # Under the lock from the start: creating a segment may remove a smaller one.
    lock = open_lock_file(path)
    try:
        with lock_held(lock, path, lock_timeout):
            needed = stat_size(status.nslots), status.buf_size
            device = SharedMemoryDevice.make(path, key, *needed, replace=replace)
            fits = all(have >= need for have, need in zip(device.sizes(), needed, strict=True))
            if fits and (replace or is_blank(device)):
                initialise(device, status)
            if fits or not is_blank(device):  # otherwise another process created it
                return device
            device.close()
            raise keys_are_taken(path, key)
    finally:
        os.close(lock)


def is_blank(device: Device) -> bool:
    """Tell whether the parts exist without a status: creation is under way, or was interrupted."""
    return not device.read_stat(0, STATUS_SIZE).strip(b"\0")


def initialise(device: Device, status: Status) -> None:
    """Write an empty queue, status last (docs/specs/lrose.md 1.6). The caller holds the lock."""
    device.clear(stat_size(status.nslots), status.buf_size)
    device.write_buf(0, BUFFER_COOKIE)
    device.write_buf(status.buf_size - 1, b"\xff")
    for first in range(0, status.nslots, _FREE_SLOTS_AT_ONCE):
        count = min(_FREE_SLOTS_AT_ONCE, status.nslots - first)
        device.write_stat(slot_offset(first), FREE_SLOT * count)
    device.write_stat(0, status.encode())


# --- waiting for a queue ------------------------------------------------------------------------

#: Poll interval (seconds) while waiting for a queue to appear.
_LOOK_FOR_QUEUE: Final = 0.05


def open_to_read(path: str, patience: float) -> tuple[Device, Status]:
    """Open a queue; wait until it exists and is complete.

    :raises NotFound: no queue appeared in time.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            device = open_device(path, writable=False)
            try:
                with storage_errors("reading", path):
                    return device, read_status(device)
            except BaseException:
                device.close()
                raise
        except (NotFound, NotYetMade):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_FOR_QUEUE)


def open_to_write(
    path: str, options: ClassicOptions, creation: Creation, now: Callable[[], int]
) -> Device:
    """Open a queue for writing; wait for it, or create it, as the options say.

    :raises NotFound: there is no queue, and it is not to be created.
    """
    deadline = time.monotonic() + options.wait
    while creation is not Creation.ALWAYS:
        try:
            device = open_device(path, writable=True)
        except NotFound:
            if creation is Creation.MISSING:
                break
            if time.monotonic() >= deadline:
                raise
        else:
            if creation is Creation.NEVER or not _is_blank(device):
                return device
            device.close()  # its creator may have died
            break
        time.sleep(_LOOK_FOR_QUEUE)
    try:
        return create_queue(
            path,
            options.slots,
            options.size,
            now(),
            replace=creation is Creation.ALWAYS,
            lock_timeout=options.lock_timeout,
        )
    except AlreadyExists as taken:
        try:
            device = open_device(path, writable=True)  # another process created it
        except NotFound:
            raise taken from None
        if _is_blank(device):
            device.close()
            raise taken from None
        return device


def _is_blank(device: Device) -> bool:
    try:
        return is_blank(device)
    except BaseException:
        device.close()
        raise
