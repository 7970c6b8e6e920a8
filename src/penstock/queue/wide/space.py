"""How does a sparse queue get its disk space, before a write would need it?"""

from __future__ import annotations

import errno
import os
import weakref
from typing import TYPE_CHECKING, Final

from penstock.core.errors import StorageError
from penstock.queue.wide.layout import ALIGN, PAGE, SLOT, HeaderFlag

if TYPE_CHECKING:
    from penstock.queue.wide._ring import RingWriter
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Space"]

#: Bytes got ahead of the messages: as many as there are, but not less or more than these.
_LEAST_AHEAD: Final = 64 << 10
_AHEAD: Final = 4 << 20
_EVERYTHING: Final = 2**64 - 1


class Space:
    """What of a sparse queue has its space. A write beyond it would be a signal, not an error."""

    def __init__(self, writer: RingWriter, file: QueueFile) -> None:
        self._writer: RingWriter = weakref.proxy(writer)  # which has this one
        self._file = file

    def begin(self) -> None:
        """Find out what can be written to as it is."""
        if HeaderFlag.SPARSE not in self._file.flags:
            return
        writer, geometry = self._writer, self._file.geometry
        written = writer._head - self._file.field("first_seq")  # noqa: SLF001 - a part of it
        around = writer._position >= geometry.buffer_size  # noqa: SLF001
        writer._ready_position = _EVERYTHING if around else writer._position  # noqa: SLF001
        writer._ready_seq = (  # noqa: SLF001
            _EVERYTHING if written >= geometry.slots else writer._head  # noqa: SLF001
        )

    def make_room(self, size: int) -> None:
        """Get space for the next message, and for more behind it.

        :raises StorageError: there is none.
        """
        writer, geometry = self._writer, self._file.geometry
        position = writer._position  # noqa: SLF001 - the writer's own part
        end = position + -(-size // ALIGN) * ALIGN
        if end > writer._ready_position:  # noqa: SLF001
            # A message that does not fit before the end goes to the start; a later, smaller one
            # will use what it left there.
            goal = min(end, geometry.buffer_size)
            got = self._get(geometry.buffer_offset, position, goal, geometry.buffer_size)
            writer._ready_position = (  # noqa: SLF001
                _EVERYTHING if got >= geometry.buffer_size else got
            )
        next_seq = writer._head  # noqa: SLF001
        if next_seq >= writer._ready_seq:  # noqa: SLF001
            # Messages began with number `first_seq`, so in the middle of the table maybe.
            start = next_seq % geometry.slots * SLOT.itemsize
            table = geometry.slots * SLOT.itemsize
            got = self._get(geometry.slots_offset, start, start + SLOT.itemsize, table)
            ready = next_seq + (got - start) // SLOT.itemsize
            around = ready - self._file.field("first_seq") >= geometry.slots
            writer._ready_seq = _EVERYTHING if around else ready  # noqa: SLF001

    def _get(self, base: int, start: int, goal: int, limit: int) -> int:
        """Get space from `start` to `goal` at least; return up to where there is space now."""
        start = start // PAGE * PAGE
        ahead = min(max(start, _LEAST_AHEAD), _AHEAD)
        for end in (min(limit, max(goal, start + ahead)), goal):
            try:
                os.posix_fallocate(self._file.descriptor, base + start, end - start)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT} or end == goal:
                    raise StorageError(
                        "getting space for",
                        self._file.path,
                        error,
                        hint="free some space; the message was not written",
                    ) from error
            else:
                return end
        raise AssertionError("the goal was tried last")
