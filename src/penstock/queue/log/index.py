"""Which segment of a log holds a message, or a time?"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound, StorageError
from penstock.queue.log.segments import look, numbers_of, open_segment, path_of
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import Header
from penstock.queue.wide.layout import PAGE, State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.wide.file import QueueFile

__all__ = ["LOOK_AGAIN", "SegmentIndex", "Tip"]


#: How often (seconds) an idle reader checks whether messages arrive in another segment,
#: independent of its timeout.
LOOK_AGAIN: Final = 0.25


class Tip(NamedTuple):
    """Epoch and end of the newest segment of a log."""

    epoch: int
    #: Sequence number of the next message.
    end: int


class SegmentIndex:
    """Finds messages by segment names: the first sequence number of each.

    Retention may remove a segment at any moment: then the lookup is repeated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Descriptor of the newest segment, whose end is read often.
        self._newest: int | None = None
        self._look_at = 0.0
        #: Last known end by epoch, the latest epoch last: of segments that it held.
        self._ends: dict[int, int] = {}

    def numbers(self) -> list[int]:
        """Return the first sequence number of every segment, in order.

        :raises NotFound: the log has no segment.
        """
        numbers = numbers_of(self.folder)
        if not numbers:
            raise NotFound(f"there is no log at {self.folder} any more")
        return numbers

    def oldest(self) -> int:
        """Return the number of the oldest message, or of the next one if the log is empty."""
        while True:
            number = self.numbers()[0]
            with contextlib.suppress(NotFound):
                try:
                    return look(self.folder, number).tail
                except DamagedQueue:
                    return number

    def open_oldest(self) -> QueueFile:
        """Map the oldest segment.

        :raises NotFound: the log has no segment.
        :raises DamagedQueue: the oldest segment is not readable.
        """
        while True:
            first = self.numbers()[0]
            with contextlib.suppress(NotFound), contextlib.ExitStack() as undo:
                file = open_segment(self.folder, first)
                undo.callback(file.close)
                # Otherwise the log was replaced meanwhile, and this segment is not its oldest.
                if self.numbers()[0] == first:
                    undo.pop_all()
                    return file

    def end(self) -> int:
        """Return the number of the next message."""
        return self.tip().end

    def tip(self) -> Tip:
        """Return epoch and end of the newest segment.

        An unreadable segment counts as one message: a reader that gets there raises the error.

        :raises NotFound: the log has no segment.
        """
        if self._newest is not None and time.monotonic() < self._look_at:
            state, tip = _progress(self._newest)
            if state == State.LIVE and not path_of(self.folder, tip.end).exists():
                return tip
        while True:
            number = self.numbers()[-1]
            with contextlib.suppress(NotFound):
                try:
                    segment = look(self.folder, number)
                except DamagedQueue:
                    return self._behind_damage(number)
                self._hold(number)
                return Tip(segment.epoch, segment.head)

    def is_readable(self) -> bool:
        """Tell whether the newest segment is readable; otherwise its end is unknown."""
        with contextlib.suppress(NotFound):
            try:
                look(self.folder, self.numbers()[-1])
            except DamagedQueue:
                return False
        return True

    def _behind_damage(self, number: int) -> Tip:
        for earlier in reversed(numbers_of(self.folder)):
            with contextlib.suppress(NotFound, DamagedQueue):
                return Tip(look(self.folder, earlier).epoch, number + 1)
        return Tip(0, number + 1)

    def _hold(self, number: int) -> None:
        """Keep the newest segment open, so that its end is known even after its removal."""
        self.look_anew()
        with contextlib.suppress(OSError):
            path = path_of(self.folder, number)
            self._newest = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._look_at = time.monotonic() + LOOK_AGAIN

    def look_anew(self) -> None:
        """Release the newest segment, and remember its end: it may be of a removed log."""
        with contextlib.suppress(StorageError):
            self._note_end()
        self.close()

    def _note_end(self) -> None:
        if self._newest is not None:
            epoch, end = _progress(self._newest)[1]
            self._ends.pop(epoch, None)
            self._ends[epoch] = end

    def last_end(self, epochs: frozenset[int]) -> int:
        """Return the last known end of the log of these epochs, even if it was removed; or 0."""
        self._note_end()
        return next((end for epoch, end in reversed(self._ends.items()) if epoch in epochs), 0)

    def last(self) -> int:
        """Return the number of the newest message, or of the next one if the log is empty."""
        for number in reversed(self.numbers()):
            with contextlib.suppress(NotFound, DamagedQueue):
                segment = look(self.folder, number)
                if segment.count:
                    return segment.head - 1
        return self.end()

    def open_at(self, seq: int) -> QueueFile:
        """Map the segment whose range includes `seq`, or else the oldest.

        :raises DamagedQueue: the segment is not readable.
        """
        while True:
            number = self.number_at(seq)
            with contextlib.suppress(NotFound):
                return open_segment(self.folder, number)

    def number_at(self, seq: int) -> int:
        """Return the segment (its first number) whose range includes `seq`, or else the oldest."""
        numbers = self.numbers()
        return numbers[max(0, bisect.bisect_right(numbers, seq) - 1)]

    def following(self, first: int, head: int) -> int | None:
        """Return the segment after the one from `first` up to `head`, or None.

        A recreated empty segment has the same name as before.
        """
        # The common case, without listing a directory of many segments.
        if head > first and path_of(self.folder, head).exists():
            return head
        behind = (number for number in numbers_of(self.folder) if number > first)
        return next(behind, None)

    def at_time(self, created_ns: int) -> int:
        """Return the first number of the segment in which to search for this append time."""
        numbers = self.numbers()
        low, high = 0, len(numbers)
        while low < high:
            middle = (low + high) // 2
            try:
                segment = look(self.folder, numbers[middle])
            except (NotFound, DamagedQueue):
                del numbers[middle]
                high -= 1
                continue
            if segment.oldest_ns is None:
                # Empty: the oldest is being removed, or the newest is not written yet.
                is_before = segment.state != State.LIVE
            else:
                is_before = segment.oldest_ns < created_ns
            if is_before:
                low = middle + 1
            else:
                high = middle
        if not numbers:
            return self.oldest()
        return numbers[max(0, low - 1)]

    def close(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            os.close(newest)


def _progress(descriptor: int) -> tuple[int, Tip]:
    with storage_errors("looking at", f"/proc/self/fd/{descriptor}"):
        # The state first: after sealing, `head` is final.
        state = Header(os.pread(descriptor, PAGE, 0)).state
        header = Header(os.pread(descriptor, PAGE, 0))
    return state, Tip(header["epoch"], header["head"])
