"""How are messages read from a log, across its segments?"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.errors import DamagedQueue, NotFound, Unsupported
from penstock.core.interfaces import Bounds
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.queue.log.places import Places
from penstock.queue.log.segments import look, numbers_of, open_segment, path_of
from penstock.queue.log.settings import SETTINGS, load_settings
from penstock.queue.wide.compressed import CompressedReader
from penstock.queue.wide.layout import State
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics
    from penstock.queue.log.options import LogOptions
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["CompressedLogReader", "LogReader", "open_newest"]

log = logging.getLogger(__name__)

#: While the log is not there yet, look this often (seconds).
_LOOK_FOR_LOG: Final = 0.02
#: A log that is created, or created anew, has its first segment within this time (seconds).
_BEING_MADE: Final = 1.0


class LogReader(WideReader):
    """Reads a log while it is written: one segment at a time, as a queue, and then the next."""

    def __init__(
        self, url: str, folder: Path, start: Position, options: LogOptions, file: QueueFile
    ) -> None:
        self._places = Places(folder)
        self._epoch = file.field("epoch")
        self._skips_to_newest = False
        wide = WideOptions(
            type=options.type,
            resume=options.resume,
            damaged=options.damaged,
            trace=options.trace,
        )
        super().__init__(url, file.path, start, wide, file)

    # --- where it stands --------------------------------------------------------------------

    def _meet(self, start: Position) -> None:
        self._use(self._file, self._file.field("tail"))
        self.seek(start)

    def _use(self, file: QueueFile, next_seq: int) -> None:
        """Read this segment from now on."""
        if file.field("epoch") != self._epoch:
            self._take_up_anew(file)
        self._read_from(file)
        self._next = next_seq
        old, self._file, self._path = self._file, file, file.path
        if old is not file:
            old.close()

    def _take_up_anew(self, file: QueueFile) -> None:
        """Note that this is another log, in the place of the one up to now.

        :raises Unsupported: this kind of reader cannot read it.
        """
        if file.compression is not self._file.compression:
            file.close()
            raise Unsupported(
                f"{self.url} was created anew with other compression", hint="open it again"
            )
        log.warning("%s was created anew", self.url)
        self._restarts += 1
        self._epoch = file.field("epoch")

    def _go_to(self, seq: int) -> None:
        """Stand at this message, in the segment that has it or will have it."""
        first = self._file.field("first_seq")
        is_live = self._file.field("state") == State.LIVE
        if first <= seq and (is_live or seq < self._head):
            self._next = seq
            return
        try:
            file = self._places.open_at(seq)
        except DamagedQueue as error:
            number = self._places.number_at(seq)
            self._next = seq
            if not self._step_over(number, error):
                self._use(*self._in_this_log(self._places.open_at(number - 1), seq))
        else:
            self._use(*self._in_this_log(file, seq))

    def _in_this_log(self, file: QueueFile, seq: int) -> tuple[QueueFile, int]:
        """Return the segment of a message, and that; or the start of the log, if it is another.

        A number that was found in the log up to now says nothing of one that has just replaced it.
        """
        while file.field("epoch") != self._epoch:
            epoch = file.field("epoch")
            file.close()
            file = self._places.open_oldest()
            if file.field("epoch") == epoch:  # or it was replaced once more
                return file, file.field("tail")
        return file, seq

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        if self._file.field("state") == State.REPLACED or not self._file.is_named():
            self._meet_anew()
        place = Position.of(position)
        match place.anchor:
            case "start":
                target = self._places.oldest()
            case "end":
                target = self._places.end()
            case "last":
                target = self._places.last()
            case "time":
                self._go_to(self._places.at_time(place.value))
                target = self._first_at(place.value)
            case _:
                target = place.value
        self._go_to(target)
        self._skips_to_newest = False
        self._confirm()

    def newest_seq(self) -> int | None:
        self._check_open()
        end = self._end()
        return end - 1 if end > 0 else None

    def bounds(self) -> Bounds:
        self._check_open()
        if not self._file.is_named():
            self._meet_anew()
        while True:
            found = Bounds(self._epoch, self._places.oldest(), self._end())
            if self._file.is_named() or not self._meet_anew():  # or it is of two logs
                return found

    def _end(self) -> int:
        """Return the number of the next message that will be written."""
        if self._file.field("state") != State.LIVE:
            with suppress(NotFound):
                return self._places.end()
        return self._head

    # --- reading; from one segment to the next -------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._confirm()
        while not (messages := super()._take(limit)) and self._go_on():
            pass
        return messages

    def _wait_for_run(self, n: int, timeout: float | None) -> int:
        while not (count := super()._wait_for_run(n, timeout)) and n > 0 and self._go_on():
            pass
        return count

    def _idle(self) -> bool:
        """Look, while nothing comes, whether it comes elsewhere by now."""
        while self._go_on(is_left=self._is_left()) and self._next >= self._head:
            pass
        return True

    def _is_left(self) -> bool:
        """Tell whether a segment that still takes messages will never get one."""
        if not self._file.is_named():
            return True  # it was put aside, or removed with all of the log
        try:  # the writer goes on in the next one, and was kept from sealing this one
            return look(self._places.folder, self._head).count > 0
        except (NotFound, DamagedQueue):
            return False

    def _goes_on(self) -> bool:
        if self._file.field("state") == State.LIVE:
            return False
        return path_of(self._places.folder, self._head).exists()

    def _go_on(self, *, is_left: bool = False) -> bool:
        """Go on behind a segment that is read and gets no more; tell if there is more to read."""
        file = self._file
        if file.field("state") == State.LIVE and not is_left:
            return False
        if self._next < self._head:
            return True  # they came before it was sealed
        if self._skips_to_newest:
            return self._skip_to_newest()
        number = self._places.following(file.field("first_seq"), self._head)
        if number is None:
            return self._meet_anew()
        try:
            following = open_segment(self._places.folder, number)
        except NotFound:
            return True  # retention was there first: look again
        except DamagedQueue as error:
            return self._step_over(number, error)
        if following.field("epoch") != self._epoch:
            following.close()
            return self._meet_anew()
        if number > self._next:
            # It is not known what was in a gap. What lies before the whole log was removed, as
            # this segment may be by now.
            is_in_a_gap = any(older < number for older in numbers_of(self._places.folder))
            reason = DropReason.DAMAGED if is_in_a_gap else DropReason.RETENTION
            self._lose(self._next, number - 1, reason)
        self._use(following, max(self._next, number))
        return True

    def _skip_to_newest(self) -> bool:
        self._skips_to_newest = False
        newest = max(self._next, self._places.last())
        if newest > self._next:
            self._lose(self._next, newest - 1, DropReason.RETENTION)
        self._use(*self._in_this_log(self._places.open_at(newest), newest))
        return True

    def _step_over(self, number: int, error: DamagedQueue) -> bool:
        """Count a segment that cannot be read as lost, and go on behind it; or raise.

        Behind the newest one there is nothing yet: the next writer will put it aside.
        """
        if self._options.damaged != "skip":
            raise error
        following = self._places.following(number, number + 1)
        if following is None:
            return False
        if following > self._next:
            self._lose(self._next, following - 1, DropReason.DAMAGED)
            self._next = following
        self._go_to(self._next)
        return True

    def _meet_anew(self) -> bool:
        """Go on with the log that was made in the place of this one; tell if there is one."""
        try:
            file = self._places.open_oldest()
        except (NotFound, DamagedQueue):
            return False  # removed, or being made: wait
        if file.field("epoch") == self._epoch:
            file.close()
            return False
        end = self._end_of_previous()
        if end > self._next:
            self._lose(self._next, end - 1, DropReason.RECREATED)
        self._places.close()
        self._use(file, file.field("tail"))
        self._confirm()
        return True

    def _end_of_previous(self) -> int:
        """Return where the log ended that this reader is in, as far as is known."""
        with suppress(DamagedQueue, Unsupported):
            settings = load_settings(self._places.folder)
            previous = None if settings is None else settings.previous
            if previous is not None and previous.epoch == self._epoch:
                return previous.head
        return self._head

    # --- what does not go as usual ---------------------------------------------------------------

    def _lapped(self, first: int, oldest: int) -> int:
        self._skips_to_newest = self._options.resume == "newest"
        self._lose(first, oldest - 1, DropReason.OVERRUN)
        return oldest

    def _lose(self, first: int, last: int, reason: DropReason) -> None:
        if reason is DropReason.OVERRUN:  # nothing is overwritten here
            is_replaced = self._file.field("state") == State.REPLACED
            reason = DropReason.RECREATED if is_replaced else DropReason.RETENTION
        super()._lose(first, last, reason)

    # --- books and closing ----------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        books = super().statistics()
        if self._is_closed:
            return books
        return books._replace(backlog=max(0, self._end() - self._next))

    def _confirm(self) -> None:
        """Keep the place for who comes later; a reader without a name has none to keep."""

    def _close(self, *, finished: bool) -> None:
        super()._close(finished=finished)
        if self._is_closed:
            self._places.close()


class CompressedLogReader(LogReader, CompressedReader):
    """Reads a log whose payloads are compressed."""


def open_newest(folder: Path, patience: float) -> QueueFile:
    """Map the newest segment that can be mapped, to begin with; wait for the log for some time.

    :raises NotFound: there is no such log.
    :raises DamagedQueue: it is not readable.
    """
    began = time.monotonic()
    while True:
        damage = None
        for number in reversed(numbers_of(folder)):
            try:
                return open_segment(folder, number)
            except NotFound:
                continue
            except DamagedQueue as error:
                damage = damage or error
        if damage is None and (folder / SETTINGS).exists():
            patience = max(patience, _BEING_MADE)
        if time.monotonic() - began >= patience:
            raise damage or NotFound(
                f"there is no log at {folder}", hint=f"create it: penstock create log:{folder}"
            )
        time.sleep(_LOOK_FOR_LOG)
