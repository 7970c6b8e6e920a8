"""Which messages of a wide queue are whole, and what is kept after its machine went down?"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.errors import DamagedQueue
from penstock.core.interfaces import Ancestor, Bounds
from penstock.queue.storage import storage_errors
from penstock.queue.wide import _ring
from penstock.queue.wide.arrow import slots_of
from penstock.queue.wide.file import QueueFile
from penstock.queue.wide.layout import LINEAGE, LIVE_WRITER, HeaderFlag
from penstock.queue.wide.readers import reader_table

if TYPE_CHECKING:
    from penstock.queue.storage import LockFile
    from penstock.queue.wide.arrow import Rows

__all__ = ["check_wide", "first_bad", "recover", "whole_runs"]

log = logging.getLogger(__name__)

#: Poll interval (seconds) while another writer recovers the queue.
_LOOK_FOR_RECOVERY: Final = 0.01
#: Messages checked at once.
_AT_ONCE: Final = 4096
#: As `guard`: no limit to overwriting. As `seq` of a slot: no message.
_NONE: Final = 2**64 - 1


# --- recovery after a crash of the machine --------------------------------------------------------


def recover(path: str, file: QueueFile, locks: LockFile | None) -> None:
    """Cut off messages that did not reach the disk before the machine crashed.

    A process crash leaves a consistent queue. After a machine crash the disk may have a header
    without all messages that it counts. The caller is a writer of the queue.

    :param locks: where it has its lock; None: it keeps all other writers out
    :raises StorageError: intact messages must be dropped, and there is no space for a copy.
    """
    if locks is None or HeaderFlag.MANY_WRITERS not in file.flags:
        _recover(path, file)
        return
    while not locks.try_lock(LIVE_WRITER):  # another writer recovers it
        time.sleep(_LOOK_FOR_RECOVERY)
    try:
        if file.needs_recovery():
            _recover(path, file)
    finally:
        locks.unlock(LIVE_WRITER)


def _recover(path: str, file: QueueFile) -> None:
    run = whole_run(file)
    lost = file.field("head") - file.field("tail") - (run.end - run.start)
    if lost:
        log.warning("%s: %s messages did not get to the disk", path, f"{lost:,}")
    if run.dropped:
        # Intact messages outside of the run. They cannot stay: keep a copy of the queue.
        copy = copy_aside(file.path)
        what = f"{run.dropped:,} of them are whole"
        log.warning("%s: %s; the queue as it was: %s", path, what, copy)
    _begin_epoch(file, run.end)
    # In this order, so that a kill at any point leaves a queue that can be opened.
    file.header["head_check"] = 0
    file.header["tail"] = run.start
    file.header["head"] = run.end
    if run.start == run.end:  # empty
        file.header["first_seq"] = run.end
    file.header["guard"] = file.header["guard_next"] = 0
    _forget(file, run.end)
    file.header["check"] = file.header.checksum()
    # Syncs the new epoch, too: a power failure must not revert it.
    file.begin_boot()


def _forget(file: QueueFile, end: int) -> None:
    """Clear slots whose numbers will be reused.

    After a power failure that kept the new header but not the new slot, the old slot would be taken
    for the new message.
    """
    slots = slots_of(file)
    # An unused slot may have no disk space: do not write to it.
    slots["seq"][(slots["seq"] >= end) & (slots["created_ns"] != 0)] = _NONE


def _begin_epoch(file: QueueFile, end: int) -> None:
    """Start a new epoch at `end`, and move the reader table's cursors to it.

    Even if nothing seems lost: readers may have seen messages that never reached the disk. If this
    is interrupted, the next writer repeats it.
    """
    old, header = file.field("epoch"), file.header
    header["check"] = 0  # invalid until all fields are stored
    before = [ancestor for ancestor in header.lineage if ancestor.epoch != old]
    header.lineage = lineage = (*before, Ancestor(old, end))[-LINEAGE:]
    header["epoch"] = epoch = secrets.randbits(63) | 1
    bounds = Bounds(epoch, 0, end, lineage)
    with reader_table(file) if file.geometry.readers else contextlib.nullcontext() as table:
        if table is not None:
            table.renumber(epoch, bounds.successor)


# --- every message --------------------------------------------------------------------------------


def check_wide(path: str) -> int:
    """Check every message of a queue, and return their count.

    :raises DamagedQueue: names the first bad message.
    """
    file = QueueFile.open_to_read(path)
    try:
        bad = first_bad(file)
        if bad is not None and bad >= file.field("tail"):
            raise DamagedQueue(
                path,
                f"message {bad}",
                file.geometry.slot_offset(bad),
                "the next slot in order, and a payload of its checksum",
                "another slot or checksum",
            )
        return file.field("head") - file.field("tail")
    finally:
        file.close()


class WholeRun(NamedTuple):
    """The run of consecutive, intact messages to keep of a queue."""

    start: int
    #: Number of the last one + 1.
    end: int
    #: Intact messages outside of the run, which cannot be kept: a queue has no gaps.
    dropped: int


def whole_run(file: QueueFile) -> WholeRun:
    """Return the messages to keep of a queue after a power failure.

    On disk, the oldest may be overwritten by newer ones that the header does not count yet, and the
    last that it counts may be missing. A sync stores a mark, `guard_next`: the synced messages are
    the run that contains this number, or ends at it. Without a sync, keep the longest run.
    """
    oldest, head = file.field("tail"), file.field("head")
    runs = whole_runs(file)
    longest = max(runs, key=len, default=range(head, head))
    marks = file.field("guard"), file.field("guard_next")
    mark = max(mark for mark in (0, *marks) if mark != _NONE)
    kept = longest
    if mark:
        synced = min(max(mark, oldest), head)
        kept = next((run for run in runs if synced in run), kept)
        if synced not in kept:
            kept = next((run for run in runs if run.stop == synced), longest)
    return WholeRun(kept.start, kept.stop, sum(map(len, runs)) - len(kept))


def whole_runs(file: QueueFile) -> list[range]:
    """Return all runs of intact messages, the oldest first."""
    oldest, head = file.field("tail"), file.field("head")
    reader = _reader_of(file)
    numbers = np.arange(oldest, head, dtype=np.uint64)
    table = slots_of(file)
    slots = table[(numbers & np.uint64(len(table) - 1)).astype(np.int64)]
    whole = slots["seq"] == numbers
    at = 0
    while at < len(whole):
        if not whole[at]:  # skip to the next candidate
            at += int(whole[at:].argmax()) or len(whole)
            continue
        stop = at + (int((~whole[at:]).argmax()) or len(whole) - at)
        bad = reader._payloads(oldest + at, stop - at, bytearray())  # noqa: SLF001
        at = stop
        if bad is not None:
            whole[bad - oldest] = False
            at = bad - oldest + 1
    # An intact message that does not follow its predecessor starts another run.
    follows = np.zeros(len(whole) + 1, np.bool_)
    position, created = slots["position"], slots["created_ns"]
    follows[1:-1] = whole[1:] & whole[:-1]
    follows[1:-1] &= (position[1:] >= position[:-1]) & (created[1:] >= created[:-1])
    starts = np.flatnonzero(whole & ~follows[:-1]) + oldest
    stops = np.flatnonzero(whole & ~follows[1:]) + oldest + 1
    return [range(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]


def copy_aside(path: str) -> Path:
    """Copy a file to a free name beside it, for inspection, and return its path.

    :raises StorageError: no space.
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
    """Return the first message with a bad slot or checksum, or None.

    From `start` on, or from the oldest. Only for a queue without an active writer.
    """
    reader = _reader_of(file)
    table = slots_of(file)
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
    """Return how many leading slots have increasing positions, from `position` on, and times."""
    behind = np.concatenate([[np.uint64(position)], slots["position"][:-1]])
    created = slots["created_ns"]
    fine = (slots["position"] >= behind) & (created >= np.concatenate([created[:1], created[:-1]]))
    return len(slots) if fine.all() else int(fine.argmin())
