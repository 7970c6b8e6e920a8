"""How are messages read from a log, across its segments?"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.core.errors import (
    DamagedQueue,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.core.interfaces import Bounds
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.queue.log.places import LOOK_AGAIN, Places, Tip
from penstock.queue.log.segments import look, numbers_of, open_segment, path_of
from penstock.queue.log.settings import SETTINGS, load_settings
from penstock.queue.wide.compressed import CompressedReader
from penstock.queue.wide.layout import State
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Ancestor
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
_FOREIGN: Final = "it is of another log, or was damaged; damaged=skip counts it as lost and goes on"


class LogReader(WideReader):
    """Reads a log while it is written: one segment at a time, as a queue, and then the next."""

    def __init__(
        self, url: str, folder: Path, start: Position, options: LogOptions, file: QueueFile
    ) -> None:
        self._places = Places(folder)
        #: The epoch of the segment that is read, and all that are known to be of this log.
        self._epoch = file.field("epoch")
        self._epochs = frozenset({self._epoch})
        #: When to look whether there is something behind a segment that seems to be the newest.
        self._look_at, self._has_left, self._looked_through = 0.0, False, 0
        self._skips_to_newest = False
        self._is_collecting = False
        self._known_lineage: tuple[int, tuple[Ancestor, ...]] | None = None
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
        epoch = file.field("epoch")
        if epoch != self._epoch and self._is_of_this_log(epoch):
            self._epoch = epoch
        elif epoch != self._epoch:
            self._take_up_anew(file)
        self._read_from(file)
        self._next = next_seq
        old, self._file, self._path = self._file, file, file.path
        if old is not file:
            old.close()
        self._look_at, self._has_left, self._looked_through = 0.0, False, 0
        if file.field("state") != State.LIVE:
            with suppress(NotFound, StorageError):  # how far this log was, should it be removed
                self._places.tip()

    def _is_of_this_log(self, epoch: int) -> bool:
        """Tell whether segments of an epoch belong to this log: power failures begin new ones."""
        if epoch not in self._epochs:
            with suppress(DamagedQueue, Unsupported):
                settings = load_settings(self._places.folder)
                if settings is not None and {epoch, self._epoch} <= settings.epochs:
                    self._epochs = settings.epochs
        return epoch in self._epochs

    def _lineage_of(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the epochs that this one continues."""
        with suppress(DamagedQueue, Unsupported):
            settings = load_settings(self._places.folder)
            if settings is not None and epoch in settings.epochs:
                return settings.lineage_of(epoch)
        return ()

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
        self._epochs = frozenset({self._epoch})

    def _go_to(self, seq: int) -> None:
        """Stand at this message, in the segment that has it or will have it."""
        first = self._file.field("first_seq")
        if first <= seq and (seq < self._head or self._is_newest()):
            self._next = seq
            return
        try:
            file = self._places.open_at(seq)
            if not self._is_of_this_log(file.field("epoch")):
                number = file.field("first_seq")
                file.close()
                # A number of the log up to now says nothing of one that has just replaced it.
                other = self._other_log()
                if other is None:
                    raise self._foreign(number)
                file, seq = other, other.field("tail")
        except DamagedQueue as error:
            number = self._places.number_at(seq)
            self._next = seq
            if not self._step_over(number, error):
                self._use(self._readable_before(number, error), seq)
        else:
            self._use(file, seq)

    def _readable_before(self, number: int, error: DamagedQueue) -> QueueFile:
        """Map the last segment before this one that can be read; raise if there is none."""
        for earlier in reversed(self._places.numbers()):
            if earlier < number:
                with suppress(NotFound, DamagedQueue):
                    file = open_segment(self._places.folder, earlier)
                    if self._is_of_this_log(file.field("epoch")):
                        return file
                    file.close()
        raise error

    def _is_newest(self) -> bool:
        return self._file.field("state") == State.LIVE and not self._is_left()

    def _other_log(self) -> QueueFile | None:
        """Map the oldest segment, if it is of another log: one was made in the place of this."""
        try:
            file = self._places.open_oldest()
        except (NotFound, DamagedQueue):
            return None  # removed, or being made: wait
        if self._is_of_this_log(file.field("epoch")):
            file.close()
            return None
        return file

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
                target = self._numbered(place.value)
        self._go_to(target)
        self._skips_to_newest = False
        self._confirm()

    def _numbered(self, seq: int) -> int:
        """Return the number of a message that is there, was there, or is the next to come.

        :raises PositionError: it is none of these.
        """
        if seq > self._head and seq > (end := self._places.end()) and self._places.is_readable():
            check_seek(self.url, seq, self._places.oldest(), end)
        return seq

    def newest_seq(self) -> int | None:
        self._check_open()
        end = self._end()
        return end - 1 if end > 0 else None

    def bounds(self) -> Bounds:
        self._check_open()
        if not self._file.is_named():
            self._meet_anew()
        while True:
            oldest, (epoch, end) = self._places.oldest(), self._tip()
            found = Bounds(epoch, oldest, end, self._lineage(epoch))
            if self._file.is_named() or not self._meet_anew():  # or it is of two logs
                return found

    def _lineage(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the epochs that one continues; they are the same for ever."""
        if self._known_lineage is None or self._known_lineage[0] != epoch:
            self._known_lineage = epoch, self._lineage_of(epoch)
        return self._known_lineage[1]

    def _end(self) -> int:
        """Return the number of the next message that will be written."""
        with suppress(NotFound):
            return self._tip().end
        return self._head

    def _tip(self) -> Tip:
        if self._is_newest():
            return Tip(self._epoch, self._head)
        return self._places.tip()

    # --- reading; from one segment to the next -------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._confirm()
        messages: list[Message] = []
        try:
            while len(messages) < limit:
                messages += super()._take(limit - len(messages))
                if len(messages) < limit and not self._go_on():
                    break
        except PenstockError:
            if not messages:  # otherwise the next call comes to it
                raise
        return messages

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        batches = [super().read_batch(n, timeout)]
        left = n - batches[0].num_rows
        self._is_collecting = True  # nothing of this is confirmed before it is returned
        try:
            while 0 < left < n and self._go_on():
                batches.append(super().read_batch(left, 0))
                left -= batches[-1].num_rows
                if not batches[-1].num_rows:
                    break
        except PenstockError:
            pass  # the next call comes to it
        finally:
            self._is_collecting = False
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _wait_for_run(self, n: int, timeout: float | None) -> int:
        while not (count := super()._wait_for_run(n, timeout)) and n > 0 and self._go_on():
            pass
        return count

    def _idle(self) -> bool:
        """Look, while nothing comes, whether it comes elsewhere by now."""
        while self._go_on() and self._next >= self._head:
            pass
        return True

    def _is_left(self) -> bool:
        """Tell whether a segment that says that it takes messages will never get one.

        Its log was removed. Or there are messages in a later one: the writer was kept from sealing
        this one, a bit of it changed, or it is an old copy. It is looked for now and then.
        """
        now = time.monotonic()
        if not self._has_left and now >= self._look_at:
            self._look_at = now + LOOK_AGAIN
            self._has_left = not self._file.is_named() or self._has_messages_behind()
        return self._has_left

    def _has_messages_behind(self) -> bool:
        folder, first = self._places.folder, self._file.field("first_seq")
        with suppress(OSError):  # there may be many names, and mostly no new one
            changed = folder.stat().st_mtime_ns
            if changed == self._looked_through:
                return False
            self._looked_through = changed
        for number in reversed(numbers_of(folder)):
            if number <= first:
                break
            with suppress(NotFound, DamagedQueue):
                segment = look(folder, number)
                if segment.count or segment.state != State.LIVE:
                    return True
                self._looked_through = 0  # it may have some the next time
        return False

    def _goes_on(self) -> bool:
        if self._file.field("state") == State.LIVE:
            return False
        return path_of(self._places.folder, self._head).exists()

    def _go_on(self) -> bool:
        """Go on behind a segment that is read and gets no more; tell if there is more to read."""
        file = self._file
        if self._is_newest():
            return False
        if self._next < self._head:
            return True  # they came before it was sealed
        if self._skips_to_newest:
            return self._skip_to_newest()
        first = file.field("first_seq")
        if self._head == first and self._is_replaced_by_another(first):
            number: int | None = first
        else:
            number = self._places.following(first, self._head)
        if number is None:
            return self._meet_anew()
        try:
            following = open_segment(self._places.folder, number)
            if not self._is_of_this_log(following.field("epoch")):
                following.close()
                return self._meet_anew() or self._step_over(number, self._foreign(number))
        except NotFound:
            return True  # retention was there first: look again
        except DamagedQueue as error:
            return self._step_over(number, error)
        self._next = self._next_in(following.field("epoch"))
        if number > self._next:
            # It is not known what was in a gap. What lies before the whole log was removed, as
            # this segment may be by now.
            is_in_a_gap = any(older < number for older in numbers_of(self._places.folder))
            reason = DropReason.DAMAGED if is_in_a_gap else DropReason.RETENTION
            self._lose(self._next, number - 1, reason)
        self._use(following, max(self._next, number))
        return True

    def _next_in(self, epoch: int) -> int:
        """Return where this reader goes on in another epoch, which gives numbers again."""
        bounds = Bounds(epoch, 0, 0, () if epoch == self._epoch else self._lineage_of(epoch))
        place = bounds.successor(self._epoch, self._next)
        return self._next if place is None else place

    def _is_replaced_by_another(self, number: int) -> bool:
        """Tell whether a segment without messages was made anew, in another epoch of this log."""
        if self._file.is_named():
            return False
        with suppress(NotFound, DamagedQueue):
            return self._is_of_this_log(look(self._places.folder, number).epoch)
        return False

    def _foreign(self, number: int) -> DamagedQueue:
        path = path_of(self._places.folder, number)
        return DamagedQueue(str(path), "epoch", 16, self._epoch, "another", hint=_FOREIGN)

    def _skip_to_newest(self) -> bool:
        self._skips_to_newest = False
        newest = max(self._next, self._places.last())
        if newest > self._next:
            self._lose(self._next, newest - 1, DropReason.RETENTION)
        self._go_to(newest)
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
        return self._file.field("first_seq") >= following  # or none behind it can be read

    def _meet_anew(self) -> bool:
        """Go on with the log that was made in the place of this one; tell if there is one."""
        file = self._other_log()
        if file is None:
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
            if previous is not None and previous.had(self._epoch):
                return previous.head
        tip = self._places.last_tip()
        return self._head if tip is None else max(self._head, tip.end)

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
        damage, foreign = None, None
        epochs = _known_epochs(folder)
        for number in reversed(numbers_of(folder)):
            try:
                file = open_segment(folder, number)
            except NotFound:
                continue
            except DamagedQueue as error:
                damage = damage or error
                continue
            if epochs is None or file.field("epoch") in epochs:
                return file
            foreign = number if foreign is None else foreign
            file.close()
        if foreign is not None:  # the log is created anew this moment, or its own file was
            with suppress(NotFound, DamagedQueue):
                return open_segment(folder, foreign)
        if damage is None and (folder / SETTINGS).exists():
            patience = max(patience, _BEING_MADE)
        if time.monotonic() - began >= patience:
            raise damage or NotFound(
                f"there is no log at {folder}", hint=f"create it: penstock create log:{folder}"
            )
        time.sleep(_LOOK_FOR_LOG)


def _known_epochs(folder: Path) -> frozenset[int] | None:
    with suppress(DamagedQueue, Unsupported):
        settings = load_settings(folder)
        return None if settings is None else settings.epochs
    return None
