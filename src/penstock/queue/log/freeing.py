"""How does a segment end, and how is its disk space given back?"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Final

from penstock.core.errors import DamagedQueue, NotFound, Unsupported
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import ALIGN, SLOT, State, slots_of
from penstock.queue.wide.queue_file import QueueFile, mark, store_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["evict", "remove_segment", "seal"]

log = logging.getLogger(__name__)

#: `fallocate`: the file keeps its size, and the range has no space of its own any more.
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def seal(file: QueueFile) -> None:
    """Let no more messages come, and give back what none of them took. Again: the same.

    The next segment is there already: a reader that finds this one sealed goes on to it.
    """
    if file.field("state") == State.LIVE:
        mark(file, State.SEALED)
    for start, end in _unused(file):
        _punch(file, start, end)


def _unused(file: QueueFile) -> Iterator[tuple[int, int]]:
    """Yield the parts of a segment that no message is in."""
    geometry = file.geometry
    first, head = file.field("first_seq"), file.field("head")
    position = 0
    if head > first:
        last = slots_of(file.mapping, geometry)[(head - 1) % geometry.slots]
        position = int(last["position"]) + int(last["block"]) + int(last["length"])
        position = -(-position // ALIGN) * ALIGN
    if position < geometry.buffer_size:
        yield geometry.buffer_offset + position, geometry.file_size
    # Slots are used in a circle, from that of the first message on.
    begin = head % geometry.slots
    end = begin + geometry.slots - (head - first)
    for start, stop in ((begin, min(end, geometry.slots)), (0, end - geometry.slots)):
        if start < stop:
            at = geometry.slots_offset
            yield at + start * SLOT.itemsize, at + stop * SLOT.itemsize


def evict(file: QueueFile, state: State) -> None:
    """Take all messages out of a segment, and give its space back, whoever still maps it.

    A reader that is at one of them finds out after its copy, as if it had been overwritten.
    """
    store_state(file, state)  # first, so that the reader knows why
    file.header["tail"] = file.field("head")
    mark(file, state)
    _punch(file, file.geometry.slots_offset, file.geometry.file_size)


def remove_segment(path: Path, state: State = State.SEALED) -> None:
    """Remove a segment that gets no more messages. If it is gone: nothing.

    :raises StorageError: the operating system refuses.
    """
    try:
        file = QueueFile.open(str(path), writable=True)
    except NotFound:
        return
    except (DamagedQueue, Unsupported) as error:
        log.warning("%s is removed as it is: %s", path, error)
    else:
        try:
            evict(file, state)
        finally:
            file.close()
    with storage_errors("removing", str(path)):
        path.unlink(missing_ok=True)


def _punch(file: QueueFile, start: int, end: int) -> None:
    if end <= start:
        return
    # A file system that cannot: the space comes back when the file is gone and nobody maps it.
    _libc.fallocate(file.descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)
