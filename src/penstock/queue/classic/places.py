"""Where in a classic queue is a message: the oldest, the first of a time, the one with an id?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.queue.classic.layout import ID_COUNT, Slot, Status
from penstock.queue.classic.slots import live_slots, live_span, live_table, slot_is_passed_on

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device

__all__ = ["first_seq_at", "oldest_seq", "seq_of_id"]

#: Columns of a table of slots.
_ID: Final = Slot._fields.index("id")
_TIME: Final = Slot._fields.index("time")


def oldest_seq(device: Device, status: Status, youngest: int) -> int:
    """Return the oldest message there; the one to come if there is none.

    A writer, alive or dead, may be about to free the oldest slots, or have used them again
    already: those are skipped. A damaged one is not: the caller has to hear of it.
    """
    oldest = youngest - live_span(status) + 1
    for age, (_, slot) in enumerate(live_slots(device, status)):
        if not slot_is_passed_on(slot, (oldest + age) % ID_COUNT, status.nslots):
            return oldest + age
    return youngest + 1


def first_seq_at(device: Device, status: Status, youngest: int, second: int) -> int:
    """Return the first message of this second or later; the one to come if there is none."""
    # The slots say the second only. All messages of that second may be meant. They need not
    # be in order of time: a writer may have given its own.
    slots, is_theirs = live_table(device, status)
    late_enough = is_theirs & (slots[:, _TIME] >= second)
    if not late_enough.any():
        return youngest + 1
    return youngest - live_span(status) + 1 + int(late_enough.argmax())


def seq_of_id(device: Device, status: Status, youngest: int, id: int) -> int | None:
    """Return the message with this LROSE id; None if it is not there."""
    slots, is_theirs = live_table(device, status)
    matches = is_theirs & (slots[:, _ID] == id)
    if not matches.any():
        return None
    return youngest - live_span(status) + 1 + int(matches.argmax())
