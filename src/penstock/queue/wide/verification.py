"""Is every message of a wide queue as its writer made it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import DamagedQueue
from penstock.queue.wide import _ring
from penstock.queue.wide.layout import SLOT, slots_of
from penstock.queue.wide.queue_file import QueueFile

if TYPE_CHECKING:
    from penstock.queue.wide.layout import Rows

__all__ = ["check_wide", "first_bad", "whole_run"]

#: Messages that are looked at together.
_AT_ONCE: Final = 4096


def check_wide(path: str) -> int:
    """Check every message of a queue, and return how many it holds.

    :raises DamagedQueue: names the first one that is not right.
    """
    file = QueueFile.open(path, writable=False)
    try:
        bad = first_bad(file)
        if bad is not None and bad >= file.field("tail"):
            geometry = file.geometry
            offset = geometry.slots_offset + bad % geometry.slots * SLOT.itemsize
            raise DamagedQueue(
                path,
                f"message {bad}",
                offset,
                "a slot that follows the one before, and the bytes of its checksum",
                "something else",
            )
        return file.field("head") - file.field("tail")
    finally:
        file.close()


def whole_run(file: QueueFile) -> tuple[int, int]:
    """Return where the first run of whole messages begins, and where it ends.

    After a power failure the oldest ones may have been overwritten on the disk, by newer ones that
    the header does not count yet; and the last that it counts may not have got there.
    """
    oldest, head = file.field("tail"), file.field("head")
    reader = _reader_of(file)
    while oldest < head and reader._payloads(oldest, 1, bytearray()) is not None:  # noqa: SLF001
        oldest += 1
    bad = first_bad(file, oldest)
    return oldest, head if bad is None else bad


def first_bad(file: QueueFile, start: int | None = None) -> int | None:
    """Return the number of the first message whose slot or checksum is not right, or None.

    From `start` on, or from the oldest. For a queue that nobody writes to meanwhile.
    """
    reader = _reader_of(file)
    table = slots_of(file.mapping, file.geometry)
    end = file.field("head")
    at, position = file.field("tail") if start is None else start, 0
    while at < end:
        numbers = np.arange(at, min(end, at + _AT_ONCE), dtype=np.uint64)
        slots = table[(numbers & np.uint64(len(table) - 1)).astype(np.int64)]
        bad = reader._payloads(at, len(numbers), bytearray())  # noqa: SLF001
        good = min(len(numbers) if bad is None else bad - at, _in_order(slots, position))
        if good < len(numbers):
            return at + good
        at += good
        position = int(slots[-1]["position"])
    return None


def _reader_of(file: QueueFile) -> _ring.RingReader:
    reader = _ring.RingReader()
    view = memoryview(file.mapping).toreadonly()
    reader._attach(file.mapping, -1, False, None, None, view)  # noqa: SLF001
    return reader


def _in_order(slots: Rows, position: int) -> int:
    """Return how many of these slots lie behind one another, and not before `position`."""
    behind = np.concatenate([[np.uint64(position)], slots["position"][:-1]])
    created = slots["created_ns"]
    fine = (slots["position"] >= behind) & (created >= np.concatenate([created[:1], created[:-1]]))
    return len(slots) if fine.all() else int(fine.argmin())
