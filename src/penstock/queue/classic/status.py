"""Is the status of a queue right, and what does it say? Spec lrose 1.3, 1.5."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.core.errors import DamagedQueue
from penstock.queue.classic.layout import (
    FRAME_EXTRA,
    ID_COUNT,
    MAX_SLOTS,
    STATUS_MAGIC,
    STATUS_SIZE,
    Status,
    stat_size,
)

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device

__all__ = ["REPAIR_HINT", "NotYetMade", "check_sizes", "read_status", "status_fault"]

#: A writer changes the status in the blink of an eye, and re-creates a queue in a few
#: milliseconds. What is still wrong after this long (seconds) is damage.
PATIENCE = 0.3

REPAIR_HINT = "penstock fmq repair keeps what can be read and makes the queue usable again"


class NotYetMade(DamagedQueue):
    """The parts of a queue are there without a status: it is being made, or its maker died."""


def read_status(device: Device) -> Status:
    """Return the status; look again while a writer is changing it.

    :raises NotYetMade: the queue is still being made.
    :raises DamagedQueue: it stays wrong; names the field, its offset and its value.
    """
    deadline: float | None = None
    while True:
        data = device.read_stat(0, STATUS_SIZE)
        fault = status_fault(device.path, data)
        if fault is None:
            return Status.decode(data)
        if deadline is None:
            deadline = time.monotonic() + PATIENCE
        elif time.monotonic() > deadline:
            if not data.strip(b"\0"):
                raise NotYetMade(
                    device.path,
                    "status",
                    0,
                    f"{STATUS_SIZE} bytes",
                    f"{len(data)} bytes of zeros",
                    hint="whoever makes it may not be done: wait=30s waits for that",
                )
            raise fault
        time.sleep(0.001)


def status_fault(path: str, data: bytes) -> DamagedQueue | None:
    """Return what is wrong with the bytes of a status, or None."""
    if len(data) != STATUS_SIZE:
        return _fault(path, "status", 0, f"{STATUS_SIZE} bytes", f"{len(data)} bytes")
    status = Status.decode(data)
    if status.magic_cookie != STATUS_MAGIC:
        return _fault(path, "magic_cookie", 0, STATUS_MAGIC, status.magic_cookie)
    if not status.checksum_holds:
        return _fault(path, "checksum", 52, status.computed_checksum(), status.checksum)
    # Without a message there are no slots.
    lowest_slot, highest_slot = (-1, -1) if status.youngest_id == -1 else (0, status.nslots - 1)
    least_append = 0 if status.oldest_slot < 0 or status.is_all_freed else FRAME_EXTRA
    ranges = {
        "nslots": (1, MAX_SLOTS),
        "buf_size": (1, 2**31 - 1),
        "youngest_id": (-1, ID_COUNT - 1),
        "youngest_slot": (lowest_slot, highest_slot),
        "oldest_slot": (-1, highest_slot),
        "begin_append": (least_append, status.buf_size),
        "end_insert": (0, status.begin_append),
        "begin_insert": (0, status.end_insert),
    }
    for field, (lowest, highest) in ranges.items():
        value = getattr(status, field)
        if not lowest <= value <= highest:
            offset = 4 * Status._fields.index(field)
            return _fault(path, field, offset, f"{lowest} to {highest}", value)
    return None


def check_sizes(device: Device, status: Status) -> None:
    """Make sure that both parts are as large as the status says.

    :raises DamagedQueue: one of them was cut off.
    """
    found = device.sizes()
    for part, size, expected in zip(
        ("stat", "buf"), found, (stat_size(status.nslots), status.buf_size), strict=True
    ):
        if size < expected:
            raise _fault(device.path, f".{part}", size, f"{expected} bytes", f"{size} bytes")


def _fault(path: str, field: str, offset: int, expected: object, found: object) -> DamagedQueue:
    return DamagedQueue(path, field, offset, expected, found, hint=REPAIR_HINT)
