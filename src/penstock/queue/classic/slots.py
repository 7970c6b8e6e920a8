"""What is in the slot table, and does it add up? Spec lrose 1.4, 1.6, 1.7."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DamagedQueue
from penstock.queue.classic.layout import (
    FRAME_EXTRA,
    ID_COUNT,
    SLOT_SIZE,
    Slot,
    Slots,
    Status,
    decode_slots,
    id_distance,
    slot_offset,
    stat_size,
)
from penstock.queue.classic.status import REPAIR_HINT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from penstock.queue.classic.device import Device

__all__ = [
    "check_slots",
    "live_slots",
    "live_span",
    "live_table",
    "slot_fault",
    "slot_is_passed_on",
    "youngest_seq",
]

#: Who asks wants the first few, or all: read ahead more and more.
_FIRST_READ = 32
_LARGEST_READ = 4096


def live_slots(device: Device, status: Status) -> Iterator[tuple[int, Slot]]:
    """Yield number and content of the slots from the oldest to the youngest, whatever it is.

    :raises DamagedQueue: the table was cut off.
    """
    span = live_span(status)
    done, ahead = 0, _FIRST_READ
    while done < span:
        first = (status.oldest_slot + done) % status.nslots
        count = min(ahead, span - done)
        data = device.read_slots(first, count, status.nslots)
        if len(data) != count * SLOT_SIZE:
            size = device.sizes()[0]
            raise DamagedQueue(
                device.path, ".stat", size, f"{stat_size(status.nslots)} bytes", f"{size} bytes",
                hint=REPAIR_HINT,
            )  # fmt: skip
        for row, values in enumerate(decode_slots(data).tolist()):
            yield (first + row) % status.nslots, Slot._make(values)
        done += count
        ahead = min(ahead * 8, _LARGEST_READ)


def live_span(status: Status) -> int:
    """Return how many slots there are from the oldest to the youngest."""
    if status.oldest_slot < 0 or status.is_all_freed:
        return 0
    return (status.youngest_slot - status.oldest_slot) % status.nslots + 1


def youngest_seq(status: Status) -> int:
    """Return the number of the youngest message: its id, or that of the second round of ids."""
    if live_span(status) > status.youngest_id + 1 > 0:
        return status.youngest_id + ID_COUNT  # the oldest are from before the ids began again
    return status.youngest_id


def live_table(device: Device, status: Status) -> tuple[Slots, npt.NDArray[np.bool_]]:
    """Return the slots from the oldest to the youngest, and which of them still are theirs.

    A writer may free them, or give them to others, while they are read.
    """
    span = live_span(status)
    if span == 0:
        return decode_slots(b""), np.zeros(0, np.bool_)
    data = device.read_slots(status.oldest_slot, span, status.nslots)
    slots = decode_slots(data[: len(data) // SLOT_SIZE * SLOT_SIZE])
    ids = (status.youngest_id - span + 1 + np.arange(len(slots))) % ID_COUNT
    is_theirs: npt.NDArray[np.bool_] = (slots[:, 0] == 1) & (slots[:, 1] == ids)
    return slots, is_theirs


def slot_is_passed_on(slot: Slot, expected_id: int, nslots: int) -> bool:
    """Tell whether a writer has freed this slot of a message, or given it to a later one.

    It says so in the status only when it is done (spec lrose 1.8), or never if it died before.
    """
    if slot.active == 0:
        return True
    ahead = id_distance(slot.id, expected_id)
    return slot.active == 1 and ahead > 0 and ahead % nslots == 0


def slot_fault(
    path: str, status: Status, index: int, slot: Slot, expected_id: int
) -> DamagedQueue | None:
    """Return what is wrong with an active slot that should hold this id, or None."""

    def fault(field: str, expected: object, found: object) -> DamagedQueue:
        return _slot_fault(path, index, field, expected, found)

    if slot.active != 1:
        return fault("active", 1, slot.active)
    if slot.checksum not in (0, slot.computed_checksum()):
        return fault("checksum", slot.computed_checksum(), slot.checksum)
    if slot.id != expected_id:
        return fault("id", expected_id, slot.id)
    if slot.msg_len < 0:
        return fault("msg_len", "0 or more", slot.msg_len)
    smallest = FRAME_EXTRA if slot.compress else (slot.msg_len + 3) // 4 * 4 + FRAME_EXTRA
    largest = status.buf_size if slot.compress else smallest
    if slot.stored_len % 4 or not smallest <= slot.stored_len <= largest:
        return fault("stored_len", f"{smallest} to {largest}, a multiple of 4", slot.stored_len)
    if slot.offset % 4 or not 0 <= slot.offset <= status.buf_size - slot.stored_len:
        room = status.buf_size - slot.stored_len
        return fault("offset", f"0 to {room}, a multiple of 4", slot.offset)
    return None


def check_slots(device: Device, status: Status) -> None:
    """Make sure that every live slot follows on the one before. The caller holds the lock.

    :raises DamagedQueue: names the first slot and field that does not.
    """
    last = live_span(status) - 1
    begin = status.end_insert
    for age, (index, slot) in enumerate(live_slots(device, status)):
        expected_id = (status.youngest_id - (last - age)) % ID_COUNT
        fault = slot_fault(device.path, status, index, slot, expected_id)
        if fault is not None:
            raise fault
        if slot.offset != begin:
            raise _slot_fault(device.path, index, "offset", begin, slot.offset)
        begin = slot.offset + slot.stored_len
        if age == last:
            expected_end = status.begin_append if status.append_mode else status.begin_insert
            if begin != expected_end:
                expected = expected_end - slot.offset
                raise _slot_fault(device.path, index, "stored_len", expected, slot.stored_len)
        elif begin == status.begin_append:  # the end of the tail: go on at the front
            begin = 0


def _slot_fault(path: str, index: int, field: str, expected: object, found: object) -> DamagedQueue:
    offset = slot_offset(index) + 4 * Slot._fields.index(field)
    return DamagedQueue(path, f"slot {index} {field}", offset, expected, found, hint=REPAIR_HINT)
