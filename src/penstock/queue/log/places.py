"""Where in a log is a message, or a moment?"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.log.segments import look, numbers_of, open_segment, path_of
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import HEADER, PAGE, State, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["LOOK_AGAIN", "Places", "Tip"]


#: While nothing new is seen, look this often (seconds) whether it came elsewhere. It is a matter of
#: the clock, and not of how long somebody waits.
LOOK_AGAIN: Final = 0.25


class Tip(NamedTuple):
    """How far the newest segment of a log is."""

    epoch: int
    #: Number of the next message that will be written.
    end: int


class Places:
    """Finds messages by the names of the segments, which are the numbers that they begin with.

    Retention may remove a segment at any moment: what is gone is looked for again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The newest segment: how far it is, is asked again and again.
        self._newest: int | None = None
        self._look_at = 0.0

    def numbers(self) -> list[int]:
        """Return the first message of every segment.

        :raises NotFound: there is none.
        """
        numbers = numbers_of(self.folder)
        if not numbers:
            raise NotFound(f"there is no log at {self.folder} any more")
        return numbers

    def oldest(self) -> int:
        """Return the number of the oldest message, or of the next to come."""
        while True:
            number = self.numbers()[0]
            with contextlib.suppress(NotFound):
                try:
                    return look(self.folder, number).tail
                except DamagedQueue:
                    return number

    def open_oldest(self) -> QueueFile:
        """Map the oldest segment.

        :raises NotFound: there is none.
        :raises DamagedQueue: it cannot be read.
        """
        while True:
            first = self.numbers()[0]
            with contextlib.suppress(NotFound), contextlib.ExitStack() as undo:
                file = open_segment(self.folder, first)
                undo.callback(file.close)
                # Otherwise another log may have come meanwhile, in which it is one of the middle.
                if self.numbers()[0] == first:
                    undo.pop_all()
                    return file

    def end(self) -> int:
        """Return the number of the next message that will be written."""
        return self.tip().end

    def tip(self) -> Tip:
        """Return how far the newest segment is.

        One that cannot be read counts as one message: whoever comes there is told.

        :raises NotFound: there is none.
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
        """Tell whether the newest segment is: otherwise nobody knows how far it is."""
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
        """Keep the newest segment open, which tells how far it was also when it is removed."""
        self.close()
        with contextlib.suppress(OSError):
            path = path_of(self.folder, number)
            self._newest = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._look_at = time.monotonic() + LOOK_AGAIN

    def last_tip(self) -> Tip | None:
        """Return how far the newest segment was that is known of, wherever it is now."""
        return None if self._newest is None else _progress(self._newest)[1]

    def last(self) -> int:
        """Return the number of the newest message there is, or of the next to come."""
        for number in reversed(self.numbers()):
            with contextlib.suppress(NotFound, DamagedQueue):
                segment = look(self.folder, number)
                if segment.count:
                    return segment.head - 1
        return self.end()

    def open_at(self, seq: int) -> QueueFile:
        """Map the segment that has this message or would have it, or else the oldest.

        :raises DamagedQueue: it cannot be read.
        """
        while True:
            number = self.number_at(seq)
            with contextlib.suppress(NotFound):
                return open_segment(self.folder, number)

    def number_at(self, seq: int) -> int:
        """Return the segment that has this message or would have it, or else the oldest."""
        numbers = self.numbers()
        return numbers[max(0, bisect.bisect_right(numbers, seq) - 1)]

    def following(self, first: int, head: int) -> int | None:
        """Return the segment behind the one of these messages; None when there is none.

        One that was made anew in the place of an empty one has its name.
        """
        # Mostly it is this one, and there may be many.
        if head > first and path_of(self.folder, head).exists():
            return head
        behind = (number for number in numbers_of(self.folder) if number > first)
        return next(behind, None)

    def at_time(self, created_ns: int) -> int:
        """Return a segment's first message: the moment is in it, or at its end, if in any."""
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
                # It has none: removed just now, at the start, or not written yet, at the end.
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
        # The state first: a segment that is sealed gets no more.
        state = state_of(np.frombuffer(os.pread(descriptor, PAGE, 0), HEADER, 1))
        header = np.frombuffer(os.pread(descriptor, PAGE, 0), HEADER, 1)[0]
    return state, Tip(int(header["epoch"]), int(header["head"]))
