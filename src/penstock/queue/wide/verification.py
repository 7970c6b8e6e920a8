"""Is every message of a wide queue as its writer made it?"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.errors import DamagedQueue
from penstock.queue.storage import storage_errors
from penstock.queue.wide import _ring
from penstock.queue.wide.layout import SLOT, slots_of
from penstock.queue.wide.queue_file import QueueFile

if TYPE_CHECKING:
    from penstock.queue.wide.layout import Rows

__all__ = ["WholeRun", "check_wide", "copy_aside", "first_bad", "whole_run"]

#: Messages that are looked at together.
_AT_ONCE: Final = 4096
#: `guard` of a queue that may be overwritten as a whole.
_NO_GUARD: Final = 2**64 - 1


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


class WholeRun(NamedTuple):
    """What can be kept of a queue: messages that follow each other, and are whole."""

    start: int
    #: Behind the last of them.
    end: int
    #: Whole messages elsewhere, which cannot be kept: a queue has no gaps.
    dropped: int


def whole_run(file: QueueFile) -> WholeRun:
    """Return the messages that are kept of a queue after a power failure.

    The oldest ones may have been overwritten on the disk, by newer ones that the header does not
    count yet; and the last that it counts may not have got there. Nothing from `guard_next` on was
    overwritten, and nothing that a sync returned for is missing: so what was synced and is still
    there is the run that has that message. Where nothing was synced, it is the longest.
    """
    oldest, head = file.field("tail"), file.field("head")
    runs = _runs(file)
    longest = max(runs, key=len, default=range(head, head))
    guard = max(file.field("guard"), file.field("guard_next"))
    kept = longest
    if 0 < guard < _NO_GUARD:
        synced = min(max(guard, oldest), head)
        kept = next((run for run in runs if synced in run), kept)
        if synced not in kept:
            kept = next((run for run in runs if run.stop == synced), longest)
    return WholeRun(kept.start, kept.stop, sum(map(len, runs)) - len(kept))


def _runs(file: QueueFile) -> list[range]:
    """Return all runs of whole messages, the oldest first."""
    oldest, head = file.field("tail"), file.field("head")
    reader = _reader_of(file)
    numbers = np.arange(oldest, head, dtype=np.uint64)
    table = slots_of(file.mapping, file.geometry)
    slots = table[(numbers & np.uint64(len(table) - 1)).astype(np.int64)]
    whole = slots["seq"] == numbers
    at = 0
    while at < len(whole):
        if not whole[at]:  # on to the next that may be
            at += int(whole[at:].argmax()) or len(whole)
            continue
        stop = at + (int((~whole[at:]).argmax()) or len(whole) - at)
        bad = reader._payloads(oldest + at, stop - at, bytearray())  # noqa: SLF001
        at = stop
        if bad is not None:
            whole[bad - oldest] = False
            at = bad - oldest + 1
    # One that is whole, and does not lie behind the one before it, begins another run.
    follows = np.zeros(len(whole) + 1, np.bool_)
    position, created = slots["position"], slots["created_ns"]
    follows[1:-1] = whole[1:] & whole[:-1]
    follows[1:-1] &= (position[1:] >= position[:-1]) & (created[1:] >= created[:-1])
    starts = np.flatnonzero(whole & ~follows[:-1]) + oldest
    stops = np.flatnonzero(whole & ~follows[1:]) + oldest + 1
    return [range(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]


def copy_aside(path: str) -> Path:
    """Copy a file to a free name beside it, for people to look at, and return that.

    :raises StorageError: there is no space.
    """
    with storage_errors("copying", path):
        for number in itertools.count(1):
            copy = Path(f"{path}.torn-{number}")
            try:
                descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            try:
                with os.fdopen(descriptor, "wb") as to, Path(path).open("rb") as source:
                    shutil.copyfileobj(source, to, 1 << 20)
            except BaseException:
                copy.unlink(missing_ok=True)
                raise
            break
    return copy


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
