"""How does a queue go on after a writer died in the middle of its work?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.queue.classic.slots import check_slots, live_slots
from penstock.queue.classic.status import check_sizes, read_status

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status

__all__ = ["finish_eviction"]


def finish_eviction(device: Device, now: int) -> Status:
    """Complete what a writer that died in the middle of an eviction left, and check the rest.

    It has freed the oldest slots and not yet said so in the status (spec lrose 1.8, step F).
    How long their messages were is gone, but the next message begins where they ended. The
    caller holds the lock.

    :raises DamagedQueue: the slots do not add up even so; nothing was changed.
    """
    status = read_status(device)
    check_sizes(device, status)
    if status.oldest_slot < 0:
        return status
    first_live = next(
        ((index, slot) for index, slot in live_slots(device, status) if slot.active), None
    )
    if first_live is None:
        finished = status._replace(
            oldest_slot=-1, begin_insert=0, end_insert=0, begin_append=0, append_mode=1
        )
    else:
        index, slot = first_live
        finished = status._replace(oldest_slot=index, end_insert=slot.offset)
        if slot.offset < status.end_insert:  # the gap had reached the tail on the way
            finished = finished._replace(
                begin_append=status.begin_insert, begin_insert=0, append_mode=1
            )
        check_slots(device, finished)
    if finished != status:
        device.write_stat(0, finished._replace(time_written=now).sealed().encode())
    return finished
