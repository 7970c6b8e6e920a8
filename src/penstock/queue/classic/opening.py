"""How is a classic queue opened that may not be there yet: waited for, or made?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import AlreadyExists, NotFound
from penstock.queue.classic.creation import create_queue, is_blank, open_device
from penstock.queue.classic.status import NotYetMade, read_status
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status
    from penstock.queue.classic.options import ClassicOptions

__all__ = ["open_to_read", "open_to_write"]

#: While the queue is not there yet, look this often (seconds).
_LOOK_FOR_QUEUE: Final = 0.05


def open_to_read(path: str, patience: float) -> tuple[Device, Status]:
    """Open a queue, once it is there and was made to its end.

    :raises NotFound: there is none after so many seconds.
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
    """Open a queue, once it is there; make it if that is asked for, as of the second it is then.

    :raises NotFound: there is none, and none is to be made.
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
            device.close()  # who began to make it may have died over it
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
            device = open_device(path, writable=True)  # somebody else was quicker
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
