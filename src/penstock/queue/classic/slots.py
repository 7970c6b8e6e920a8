"""What do the status and the slot table of a queue say, and do they add up?

(docs/specs/lrose.md 1.3 to 1.7.) Also how they are completed after a writer died during a write.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DamagedQueue
from penstock.queue.classic.layout import (
    FRAME_EXTRA,
    ID_COUNT,
    MAX_SLOTS,
    SLOT_SIZE,
    STATUS_MAGIC,
    STATUS_SIZE,
    Slot,
    Slots,
    Status,
    decode_slots,
    id_distance,
    slot_offset,
    stat_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from penstock.queue.classic.device import Device

__all__ = [
    "REPAIR_HINT",
    "NotYetMade",
    "check_sizes",
    "check_slots",
    "eviction_is_unfinished",
    "finish_eviction",
    "finished_status",
    "live_slots",
    "live_span",
    "live_table",
    "read_status",
    "slot_fault",
    "slot_is_passed_on",
    "status_fault",
    "youngest_seq",
]

# --- status -------------------------------------------------------------------------------------

#: A writer changes the status in microseconds, and recreates a queue in a few milliseconds. What
#: is still invalid after this long (seconds) is damage.
PATIENCE = 0.3

REPAIR_HINT = "penstock fmq repair keeps what can be read and makes the queue usable again"


class NotYetMade(DamagedQueue):
    """The parts of a queue exist without a status: creation is under way, or was interrupted."""


def read_status(device: Device) -> Status:
    """Read the status; retry while a writer is changing it.

    :raises NotYetMade: the queue has no status yet.
    :raises DamagedQueue: the status stays invalid; names the field, its offset and its value.
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
    """Return the first fault of an encoded status, or None."""
    if len(data) != STATUS_SIZE:
        return _fault(path, "status", 0, f"{STATUS_SIZE} bytes", f"{len(data)} bytes")
    status = Status.decode(data)
    if status.magic_cookie != STATUS_MAGIC:
        return _fault(path, "magic_cookie", 0, STATUS_MAGIC, status.magic_cookie)
    if not status.checksum_holds:
        return _fault(path, "checksum", 52, status.computed_checksum(), status.checksum)
    # Without a message, the slot fields are -1.
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
    """Check that both parts have the sizes of the status.

    :raises DamagedQueue: one of them was truncated.
    """
    found = device.sizes()
    for part, size, expected in zip(
        ("stat", "buf"), found, (stat_size(status.nslots), status.buf_size), strict=True
    ):
        if size < expected:
            raise _fault(device.path, f".{part}", size, f"{expected} bytes", f"{size} bytes")


def _fault(path: str, field: str, offset: int, expected: object, found: object) -> DamagedQueue:
    return DamagedQueue(path, field, offset, expected, found, hint=REPAIR_HINT)


# --- slots --------------------------------------------------------------------------------------

#: Callers need the first few slots, or all: read growing chunks.
_FIRST_READ = 32
_LARGEST_READ = 4096


def live_slots(device: Device, status: Status) -> Iterator[tuple[int, Slot]]:
    """Yield index and content of the slots from the oldest to the youngest, unchecked.

    :raises DamagedQueue: the table was truncated.
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
    """Return the number of slots from the oldest to the youngest."""
    if status.oldest_slot < 0 or status.is_all_freed:
        return 0
    return (status.youngest_slot - status.oldest_slot) % status.nslots + 1


def youngest_seq(status: Status) -> int:
    """Return the number of the youngest message: its id, plus `ID_COUNT` if the ids wrapped."""
    if live_span(status) > status.youngest_id + 1 > 0:
        return status.youngest_id + ID_COUNT  # the oldest are from before the wrap
    return status.youngest_id


def live_table(device: Device, status: Status) -> tuple[Slots, npt.NDArray[np.bool_]]:
    """Return the slots from the oldest to the youngest, and which still hold their message.

    A writer may free or reuse slots meanwhile.
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
    """Tell whether a writer has freed the slot of a message, or reused it for a later one.

    It updates the status only afterwards (docs/specs/lrose.md 1.8), or never if it died before.
    """
    if slot.active == 0:
        return True
    ahead = id_distance(slot.id, expected_id)
    return slot.active == 1 and ahead > 0 and ahead % nslots == 0


def slot_fault(
    path: str, status: Status, index: int, slot: Slot, expected_id: int
) -> DamagedQueue | None:
    """Return the first fault of an active slot that should hold this id, or None."""

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
    """Check that every live slot follows its predecessor. The caller holds the lock.

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
        elif begin == status.begin_append:  # the end of the tail: continue at the front
            begin = 0


def _slot_fault(path: str, index: int, field: str, expected: object, found: object) -> DamagedQueue:
    offset = slot_offset(index) + 4 * Slot._fields.index(field)
    return DamagedQueue(path, f"slot {index} {field}", offset, expected, found, hint=REPAIR_HINT)


# --- recovery after the death of a writer -------------------------------------------------------


def eviction_is_unfinished(device: Device, status: Status) -> bool:
    """Tell whether a writer, alive or dead, freed the oldest slot but did not update the status."""
    for _, slot in live_slots(device, status):
        oldest_id = (status.youngest_id - live_span(status) + 1) % ID_COUNT
        return slot_is_passed_on(slot, oldest_id, status.nslots)
    return False


def finish_eviction(device: Device, now: int) -> Status:
    """Complete the eviction of a writer that died during it, and check the slots.

    The writer has freed the oldest slots without updating the status
    (docs/specs/lrose.md 1.8, step F), and perhaps reused them for messages that were never
    published. The lengths of the old messages are lost, but the next one starts where they ended.
    The caller holds the lock.

    :raises DamagedQueue: the slots are still inconsistent; nothing was changed.
    """
    status = read_status(device)
    check_sizes(device, status)
    finished = finished_status(device, status)
    if finished != status:
        device.write_stat(0, finished._replace(time_written=now).sealed().encode())
    return finished


def finished_status(device: Device, status: Status) -> Status:
    """Return the status after the unfinished eviction is completed.

    :raises DamagedQueue: the slots are still inconsistent.
    """
    if live_span(status) == 0:
        return status
    oldest_id = status.youngest_id - live_span(status) + 1
    first_live = next(
        (
            (index, slot, (oldest_id + age) % ID_COUNT)
            for age, (index, slot) in enumerate(live_slots(device, status))
            if not slot_is_passed_on(slot, (oldest_id + age) % ID_COUNT, status.nslots)
        ),
        None,
    )
    if first_live is None:  # LROSE's state in between: the oldest is the next one written
        oldest = (status.youngest_slot + 1) % status.nslots
        return status._replace(
            oldest_slot=oldest, begin_insert=0, end_insert=0, begin_append=0, append_mode=1
        )
    index, slot, id = first_live
    fault = slot_fault(device.path, status, index, slot, id)
    if fault is not None:
        raise fault
    finished = status._replace(oldest_slot=index, end_insert=slot.offset)
    if slot.offset < status.end_insert:  # the gap had reached the tail
        finished = finished._replace(
            begin_append=status.begin_insert, begin_insert=0, append_mode=1
        )
    if finished.begin_append == 0:  # no room for the existing message
        needed = slot.offset + slot.stored_len
        raise DamagedQueue(device.path, "begin_append", 32, f"{needed} or more", 0)
    check_slots(device, finished)
    return finished
