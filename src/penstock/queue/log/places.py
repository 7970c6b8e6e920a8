"""Where in a log is a message, or a moment?"""

from __future__ import annotations

import bisect
import contextlib
import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.log.segments import look, numbers_of, open_segment, path_of
from penstock.queue.wide.layout import HEADER, PAGE, State, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Places"]


class Places:
    """Finds messages by the names of the segments, which are the numbers that they begin with.

    Retention may remove a segment at any moment: what is gone is looked for again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The newest segment: how far it is, is asked again and again.
        self._tip: int | None = None

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
        """Return the number of the next message that will be written.

        A newest segment that cannot be read counts as one message: whoever comes there is told.
        """
        if self._tip is not None:
            state, head = _progress(self._tip)
            if state == State.LIVE:
                return head
        self.close()
        while True:
            number = self.numbers()[-1]
            with contextlib.suppress(NotFound):
                try:
                    head = look(self.folder, number).head
                except DamagedQueue:
                    return number + 1
                with contextlib.suppress(FileNotFoundError):
                    path = path_of(self.folder, number)
                    self._tip = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                return head

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
        """Return the segment behind the one of these messages; None when there is none."""
        # Mostly it is this one, and there may be many.
        if head > first and path_of(self.folder, head).exists():
            return head
        behind = (number for number in numbers_of(self.folder) if number > first)
        return next((number for number in behind if number >= head), None)

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
        tip, self._tip = self._tip, None
        if tip is not None:
            os.close(tip)


def _progress(descriptor: int) -> tuple[int, int]:
    # The state first: a segment that is sealed gets no more.
    state = state_of(np.frombuffer(os.pread(descriptor, PAGE, 0), HEADER, 1))
    head = np.frombuffer(os.pread(descriptor, PAGE, 0), HEADER, 1)["head"][0]
    return int(state), int(head)
