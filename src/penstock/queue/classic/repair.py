"""Is a classic queue intact, and how is a damaged one repaired?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import DamagedQueue
from penstock.queue.classic.creation import initialise
from penstock.queue.classic.layout import (
    FRAME_EXTRA,
    FRAME_HEAD,
    ID_COUNT,
    MAX_BUFFER,
    MESSAGE_MAGIC,
    SLOT_SIZE,
    STATUS_SIZE,
    Slot,
    Status,
    id_distance,
    slot_offset,
    stat_size,
)
from penstock.queue.classic.runs import explain_fault
from penstock.queue.classic.slots import (
    check_sizes,
    finished_status,
    live_slots,
    read_status,
    status_fault,
)

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device

__all__ = ["Repair", "check_queue", "repair_queue"]


def check_queue(device: Device) -> int:
    """Check status, slots and messages of a queue, and return the count of messages.

    The caller holds the lock.

    :raises DamagedQueue: names the first fault.
    """
    status = read_status(device)
    check_sizes(device, status)
    status = finished_status(device, status)  # as the next writer will complete it
    count = 0
    for index, slot in live_slots(device, status):
        fault = explain_fault(device, status, index, slot.id)
        if fault is not None:
            raise fault
        count += 1
    return count


class Repair(NamedTuple):
    """Result of a repair."""

    #: Readable messages, which were kept.
    kept: int
    #: Unreadable messages of the slot table, which were dropped.
    dropped: int
    #: The two backup files of the damaged queue.
    backup: tuple[Path, Path]


class _Kept(NamedTuple):
    slot: Slot
    #: The stored payload, compressed or not, with its padding.
    body: bytes


def repair_queue(device: Device, now: int) -> Repair:
    """Rewrite a queue with its readable messages, in order.

    The youngest keeps its id; where messages between are lost, older ones get higher ids, so that a
    reader sees some twice rather than misses any. The damaged queue is copied to two files beside
    it. The caller holds the lock.

    :raises DamagedQueue: even its sizes are unknown; nothing was changed.
    """
    status = _surviving_status(device)
    kept: list[_Kept] = []
    dropped = 0
    for index in range(status.nslots):
        slot = Slot.decode(device.read_stat(slot_offset(index), SLOT_SIZE))
        if not any(slot[:-1]):  # free
            continue
        if 0 <= slot.id < ID_COUNT and explain_fault(device, status, index, slot.id) is None:
            body = device.read_buf(slot.offset + FRAME_HEAD, slot.stored_len - FRAME_EXTRA)
            kept.append(_Kept(slot, body))
        elif slot.active:
            dropped += 1
    if kept:
        youngest = status.youngest_id if status.youngest_id >= 0 else _youngest_id(kept)
        # A slot after the youngest was never published: its writer died before the status.
        kept = [k for k in kept if id_distance(k.slot.id, youngest) <= 0]
        kept.sort(key=lambda k: id_distance(k.slot.id, youngest))
    backup = _back_up(device)
    _rewrite(device, status, kept, now)
    return Repair(len(kept), dropped, backup)


def _surviving_status(device: Device) -> Status:
    """Return the status if it is valid, else an empty one by the sizes of the parts."""
    data = device.read_stat(0, STATUS_SIZE)
    fault = status_fault(device.path, data)
    table, buffer = device.sizes()
    if fault is None:
        status = Status.decode(data)
        if table >= stat_size(status.nslots) and buffer >= status.buf_size:
            return status
    nslots = (table - STATUS_SIZE) // SLOT_SIZE
    if nslots < 1 or not FRAME_EXTRA <= buffer <= MAX_BUFFER:
        raise fault or DamagedQueue(
            device.path, ".stat", table, "at least one slot", f"{table} bytes",
            hint="nothing can be told of it; penstock create --replace makes it anew",
        )  # fmt: skip
    return Status.of_empty_queue(nslots, buffer, 0)


def _youngest_id(kept: list[_Kept]) -> int:
    """Return the latest of the ids, which wrap around."""
    newest = kept[0].slot.id
    for k in kept:
        if id_distance(k.slot.id, newest) > 0:
            newest = k.slot.id
    return newest


def _back_up(device: Device) -> tuple[Path, Path]:
    table, buffer = device.sizes()
    for number in itertools.count(1):  # never overwrite a backup
        stat = Path(f"{device.path}.stat.damaged-{number}")
        buf = Path(f"{device.path}.buf.damaged-{number}")
        if not stat.exists() and not buf.exists():
            break
    stat.write_bytes(device.read_stat(0, table))
    buf.write_bytes(device.read_buf(0, buffer))
    return stat, buf


def _rewrite(device: Device, status: Status, kept: list[_Kept], now: int) -> None:
    """Write the messages to an empty queue from its start, the status last."""
    whole = Status.of_empty_queue(status.nslots, status.buf_size, now)
    initialise(device, whole)
    if not kept:
        return
    offset = 0
    youngest_id = kept[-1].slot.id
    for index, (slot, body) in enumerate(kept):
        id = (youngest_id - (len(kept) - 1 - index)) % ID_COUNT
        head = MESSAGE_MAGIC.to_bytes(4) + index.to_bytes(4)
        device.write_buf(offset, head + body + id.to_bytes(4))
        moved = slot._replace(id=id, offset=offset)
        moved = moved._replace(checksum=moved.computed_checksum())
        device.write_stat(slot_offset(index), moved.encode())
        offset += slot.stored_len
    whole = whole._replace(
        youngest_id=youngest_id,
        youngest_slot=len(kept) - 1,
        oldest_slot=0,
        begin_append=offset,
        blocking_write=status.blocking_write,
        last_id_read=status.last_id_read,
    )
    device.write_stat(0, whole.sealed().encode())
