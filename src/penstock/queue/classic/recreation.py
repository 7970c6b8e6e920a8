"""Is a classic queue still the one that was read before, or was it created anew?"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.queue.classic.layout import (
    ID_COUNT,
    SLOT_SIZE,
    Status,
    decode_slots,
    id_distance,
    slot_checksums_hold,
)
from penstock.queue.classic.slots import live_span

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device

__all__ = ["LastSlot", "is_another_queue"]

#: A message that was read, and how its slot looked.
LastSlot: TypeAlias = tuple[int, bytes]


def is_another_queue(
    device: Device, status: Status, known: Status, youngest: int, last_slot: LastSlot | None
) -> bool:
    """Tell whether a status is that of another queue than the one known.

    `youngest` is the youngest message of the known one. Where neither the sizes nor the ids tell,
    the message read last may have become another one with the same id.
    """
    if (status.nslots, status.buf_size) != (known.nslots, known.buf_size):
        return True
    if youngest >= 0 and (status.youngest_id < 0 or id_distance(status.youngest_id, youngest) < 0):
        return True
    if last_slot is None:
        return False
    seq, seen = last_slot
    age = id_distance(status.youngest_id, seq % ID_COUNT)
    if not 0 <= age < live_span(status):
        return False
    now = device.read_slots((status.youngest_slot - age) % status.nslots, 1, status.nslots)
    if len(now) != SLOT_SIZE or now[:8] != seen[:8] or now == seen:
        return False
    # A writer may be at work on the slot this moment. Half of its work is no other message.
    return bool(slot_checksums_hold(decode_slots(now)))
