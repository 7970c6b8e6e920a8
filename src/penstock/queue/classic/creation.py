"""How is a classic queue made, and an existing one opened?"""

from __future__ import annotations

import os

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
from penstock.queue.storage import storage_errors

__all__ = ["create_queue", "exists", "initialise", "is_blank", "open_device"]

#: Written a page at a time: a larger write makes larger pages in the kernel's cache, and then
#: every slot written later costs more.
_FREE_SLOTS_AT_ONCE = 102


def exists(path: str) -> bool:
    """Tell whether there is a queue: both parts, and a status in them."""
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

    :raises NotFound: there is none.
    :raises StorageError: the operating system refuses.
    """
    key = shared_memory_key(path)
    with storage_errors("opening", path):
        if key is None:
            return FileDevice.open(path, writable=writable)
        return SharedMemoryDevice.open(path, key, writable=writable)


def create_queue(
    path: str, nslots: int, buf_size: int, now: int, *, replace: bool, lock_timeout: float
) -> Device:
    """Make a queue and return its device; with `replace`, also where there is one already.

    Under the lock, so that of two processes that create it at once, one does.

    :raises AlreadyExists: there is a queue and `replace` is not set.
    :raises StorageError: the operating system refuses.
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
            if replace or is_blank(device):  # else somebody was quicker
                initialise(device, status)
    except BaseException:
        device.close()
        raise
    return device


def _create_segments(
    path: str, key: int, status: Status, replace: bool, lock_timeout: float
) -> Device:
    # Under the lock from the start: making a segment may mean to remove a smaller one.
    lock = open_lock_file(path)
    try:
        with lock_held(lock, path, lock_timeout):
            needed = stat_size(status.nslots), status.buf_size
            device = SharedMemoryDevice.make(path, key, *needed, replace=replace)
            fits = all(have >= need for have, need in zip(device.sizes(), needed, strict=True))
            if fits and (replace or is_blank(device)):
                initialise(device, status)
            if fits or not is_blank(device):  # else somebody was quicker
                return device
            device.close()
            raise keys_are_taken(path, key)
    finally:
        os.close(lock)


def is_blank(device: Device) -> bool:
    """Tell whether somebody made the parts and has not written a status (yet, or ever)."""
    return not device.read_stat(0, STATUS_SIZE).strip(b"\0")


def initialise(device: Device, status: Status) -> None:
    """Write an empty queue, the status last (spec lrose 1.6). The caller holds the lock."""
    device.clear(stat_size(status.nslots), status.buf_size)
    device.write_buf(0, BUFFER_COOKIE)
    device.write_buf(status.buf_size - 1, b"\xff")
    for first in range(0, status.nslots, _FREE_SLOTS_AT_ONCE):
        count = min(_FREE_SLOTS_AT_ONCE, status.nslots - first)
        device.write_stat(slot_offset(first), FREE_SLOT * count)
    device.write_stat(0, status.encode())
