"""How does a queue go on after a writer died in the middle of its work?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import DamagedQueue
from penstock.queue.classic.layout import ID_COUNT
from penstock.queue.classic.slots import (
    check_slots,
    live_slots,
    live_span,
    slot_fault,
    slot_is_passed_on,
)
from penstock.queue.classic.status import check_sizes, read_status

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status

__all__ = ["eviction_is_unfinished", "finish_eviction", "finished_status"]


def eviction_is_unfinished(device: Device, status: Status) -> bool:
    """Tell whether a writer has freed the oldest message and not said so: at work, or dead."""
    for _, slot in live_slots(device, status):
        oldest_id = (status.youngest_id - live_span(status) + 1) % ID_COUNT
        return slot_is_passed_on(slot, oldest_id, status.nslots)
    return False


def finish_eviction(device: Device, now: int) -> Status:
    """Complete what a writer that died in the middle of an eviction left, and check the rest.

    It has freed the oldest slots and not yet said so in the status (spec lrose 1.8, step F), and
    perhaps given them to new messages, which nobody was told of. How long the old messages were
    is gone, but the next message begins where they ended. The caller holds the lock.

    :raises DamagedQueue: the slots do not add up even so; nothing was changed.
    """
    status = read_status(device)
    check_sizes(device, status)
    finished = finished_status(device, status)
    if finished != status:
        device.write_stat(0, finished._replace(time_written=now).sealed().encode())
    return finished


def finished_status(device: Device, status: Status) -> Status:
    """Return what the status will be once the eviction in it is complete.

    :raises DamagedQueue: the slots do not add up even so.
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
    if first_live is None:  # as LROSE has it in between: the oldest is the next one written
        oldest = (status.youngest_slot + 1) % status.nslots
        return status._replace(
            oldest_slot=oldest, begin_insert=0, end_insert=0, begin_append=0, append_mode=1
        )
    index, slot, id = first_live
    fault = slot_fault(device.path, status, index, slot, id)
    if fault is not None:
        raise fault
    finished = status._replace(oldest_slot=index, end_insert=slot.offset)
    if slot.offset < status.end_insert:  # the gap had reached the tail on the way
        finished = finished._replace(
            begin_append=status.begin_insert, begin_insert=0, append_mode=1
        )
    if finished.begin_append == 0:  # no room for the message that is there
        needed = slot.offset + slot.stored_len
        raise DamagedQueue(device.path, "begin_append", 32, f"{needed} or more", 0)
    check_slots(device, finished)
    return finished
