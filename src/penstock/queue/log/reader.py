"""How are messages read from a log, across its segments?"""

from __future__ import annotations

import bisect
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

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
from penstock.queue.log.index import LOOK_AGAIN, SegmentIndex, Tip
from penstock.queue.log.segments import look, no_log, numbers_of, open_segment, path_of
from penstock.queue.log.settings import SETTINGS, load_settings
from penstock.queue.wide.compression import CompressedReader
from penstock.queue.wide.layout import Compression, State
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Ancestor
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import LoggedLosses, ReaderStatistics
    from penstock.queue.log.options import LogOptions
    from penstock.queue.log.segments import Segment
    from penstock.queue.wide.file import QueueFile

__all__ = ["CompressedLogReader", "LogReader", "open_newest"]

log = logging.getLogger(__name__)

#: Poll interval (seconds) while waiting for a log to appear.
_LOOK_FOR_LOG: Final = 0.02
#: A log under creation has its first segment within this time (seconds).
_BEING_MADE: Final = 1.0
_FOREIGN: Final = "it is of another log, or was damaged; damaged=skip counts it as lost and goes on"


class _ForNextCall(PenstockError):
    """Raised inside a read that already has messages, when a loss or another log follows.

    The read returns what it has, and the next one counts the loss.
    """


class LogReader(WideReader):
    """Reads a log while it is written: segment after segment, each as a wide queue."""

    def __init__(
        self, url: str, folder: Path, start: Position, options: LogOptions, file: QueueFile
    ) -> None:
        self._index = SegmentIndex(folder)
        #: The epoch of the current segment, and all known epochs of this log.
        self._epoch = file.field("epoch")
        self._epochs = frozenset({self._epoch})
        #: When to check next for messages after a segment that seems to be the newest.
        self._look_at, self._has_left, self._looked_through = 0.0, False, 0
        self._skips_to_newest = False
        #: Whether the present call has messages, and looks for more behind them.
        self._is_collecting = False
        self._known_lineage: tuple[int, tuple[Ancestor, ...]] | None = None
        wide = WideOptions(
            type=options.type,
            resume=options.resume,
            damaged=options.damaged,
            trace=options.trace,
        )
        super().__init__(url, file.path, start, wide, file)

    # --- position ---------------------------------------------------------------------------

    def _meet(self, start: Position) -> None:
        self._use(self._file, self._file.field("tail"))
        self.seek(start)

    def _use(self, file: QueueFile, next_seq: int, losses: LoggedLosses | None = None) -> None:
        """Switch to this segment, at `next_seq`.

        :param losses: the ledger with what was lost on the way
        """
        epoch, path, old = file.field("epoch"), file.path, self._file
        before = self._next, self._epoch, self._epochs, self._restarts
        self._look_at, self._has_left, self._looked_through = 0.0, False, 0
        try:
            if epoch != self._epoch and self._is_of_this_log(epoch):
                self._epoch = epoch
            elif epoch != self._epoch:
                self._take_up_anew(file)
            self._read_from(file)
            losses = self._losses if losses is None else losses
            self._next, self._file, self._path, self._losses = next_seq, file, path, losses
        except BaseException:  # also a signal: it goes on in the one that it has
            if not self._is_closed:
                self._read_from(old)
            self._next, self._epoch, self._epochs, self._restarts = before
            raise
        losses.tell()
        if old is not file:
            old.close()
        if file.field("state") != State.LIVE:
            with suppress(NotFound, StorageError):  # remember its end, should it be removed
                self._index.tip()

    def _is_of_this_log(self, epoch: int) -> bool:
        """Tell whether an epoch belongs to this log, which starts one after every power failure."""
        if epoch not in self._epochs:
            with suppress(DamagedQueue, Unsupported):
                settings = load_settings(self._index.folder)
                if settings is not None and {epoch, self._epoch} <= settings.epochs:
                    self._epochs = settings.epochs
        return epoch in self._epochs

    def _lineage_of(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the earlier epochs of the log that `epoch` continues."""
        with suppress(DamagedQueue, Unsupported):
            settings = load_settings(self._index.folder)
            if settings is not None and epoch in settings.epochs:
                return settings.lineage_of(epoch)
        return ()

    def _take_up_anew(self, file: QueueFile) -> None:
        """Count a restart: the log was recreated.

        :raises Unsupported: the new log has another compression.
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

    def _seek_segment(self, seq: int) -> None:
        """Move to `seq`, in the segment whose range includes it."""
        first = self._file.field("first_seq")
        if first <= seq and (seq < self._head or self._is_newest()):
            self._next = seq
            return
        try:
            file = self._index.open_at(seq)
            if not self._is_of_this_log(file.field("epoch")):
                number = file.field("first_seq")
                file.close()
                # A number of the old log has no meaning in the log that has just replaced it.
                other = self._other_log()
                if other is None:
                    raise self._foreign(number)
                file, seq = other, other.field("tail")
        except DamagedQueue as error:
            number = self._index.number_at(seq)
            self._next = seq
            if not self._step_over(number, error):
                self._use(self._readable_before(number, error), self._next)
        else:
            self._use(file, seq)

    def _readable_before(self, number: int, error: DamagedQueue) -> QueueFile:
        """Map the last readable segment before `number`; raise `error` if there is none."""
        for earlier in reversed(self._index.numbers()):
            if earlier < number:
                with suppress(NotFound, DamagedQueue):
                    file = open_segment(self._index.folder, earlier)
                    if self._is_of_this_log(file.field("epoch")):
                        return file
                    file.close()
        raise error

    def _is_newest(self) -> bool:
        return self._file.field("state") == State.LIVE and not self._is_left()

    def _other_log(self) -> QueueFile | None:
        """Map the oldest segment if the log was replaced by another, or return None.

        :raises _ForNextCall: it was, and the present call has messages of this one.
        """
        try:
            file = self._index.open_oldest()
        except (NotFound, DamagedQueue):
            return None  # removed, or under creation: wait
        if self._is_of_this_log(file.field("epoch")):
            file.close()
            return None
        if self._is_collecting:
            file.close()
            raise _ForNextCall(f"{self.url} was created anew")
        return file

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        if self._file.field("state") == State.REPLACED or not self._file.is_named():
            self._switch_to_new_log()
        place = Position.of(position)
        match place.anchor:
            case "start":
                target = self._index.oldest()
            case "end":
                target = self._index.end()
            case "last":
                target = self._index.last()
            case "time":
                self._seek_segment(self._index.at_time(place.value))
                target = self._first_at(place.value)
            case _:
                target = self._numbered(place.value)
        self._seek_segment(target)
        self._skips_to_newest = False
        self._confirm()

    def _numbered(self, seq: int) -> int:
        """Check that `seq` is at most the end of the log, and return it.

        :raises PositionError: it is beyond the end.
        """
        if seq > self._head and seq > (end := self._index.end()) and self._index.is_readable():
            check_seek(self.url, seq, self._index.oldest(), end)
        return seq

    def next_happened(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        from penstock.queue.wide.arrow import source_times  # noqa: PLC0415 - loads numpy

        return self._next_in_time(source_times, lambda each: each.source, seq, (start_ns, end_ns))

    def next_originated(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        from penstock.queue.wide.arrow import origin_times  # noqa: PLC0415 - as above

        return self._next_in_time(origin_times, lambda each: each.origin, seq, (start_ns, end_ns))

    def _next_in_time(
        self,
        times: Callable[[QueueFile, int, int], NDArray[np.int64]],
        noted_of: Callable[[Segment], tuple[int, int] | None],
        seq: int,
        during: tuple[int, int],
    ) -> int | None:
        """Return the first message from `seq` on within `during`; skip segments by their ranges."""
        from penstock.queue.wide.arrow import first_in_time  # noqa: PLC0415 - as above

        self._check_open()
        folder, numbers = self._index.folder, self._index.numbers()
        for number in numbers[max(0, bisect.bisect_right(numbers, seq) - 1) :]:
            try:
                segment = look(folder, number)
                noted = noted_of(segment)
                if noted is not None and (noted[1] < during[0] or noted[0] >= during[1]):
                    continue
                file = open_segment(folder, number)
            except NotFound:
                continue  # removed by retention meanwhile
            except DamagedQueue:
                return max(seq, number)  # a read from there raises the error
            messages = max(seq, segment.tail), segment.head
            found = first_in_time(times, file, messages, *during)
            file.close()
            if found is not None:
                return found
        return None

    def newest_seq(self) -> int | None:
        self._check_open()
        end = self._end()
        return end - 1 if end > 0 else None

    def first_here(self) -> int:
        return 0

    def end_here(self) -> int:
        if self._is_at_its_path():
            end = self._end()
            if self._is_at_its_path():  # otherwise it may be the end of another log
                return end
        return self._end_of_previous()

    def _is_at_its_path(self) -> bool:
        """Tell whether its path still names this log; retention may have removed the segment."""
        if self._file.is_named():
            return True
        with suppress(NotFound, DamagedQueue):
            return self._is_of_this_log(look(self._index.folder, self._index.oldest()).epoch)
        return False

    def bounds(self) -> Bounds:
        self._check_open()
        if not self._file.is_named():
            self._switch_to_new_log()
        while True:
            oldest, (epoch, end) = self._index.oldest(), self._tip()
            found = Bounds(epoch, oldest, end, self._lineage(epoch))
            # Otherwise the bounds mix two logs.
            if self._file.is_named() or not self._switch_to_new_log():
                return found

    def _lineage(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the epochs that `epoch` continues; cached, as they never change."""
        if self._known_lineage is None or self._known_lineage[0] != epoch:
            self._known_lineage = epoch, self._lineage_of(epoch)
        return self._known_lineage[1]

    def _end(self) -> int:
        """Return the number of the next message."""
        with suppress(NotFound):
            return self._tip().end
        return self._head

    def _tip(self) -> Tip:
        if self._is_newest():
            return Tip(self._epoch, self._head)
        return self._index.tip()

    # --- reading; from one segment to the next -------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._confirm()
        self._has_taken = False
        outer, self._is_in_call = self._is_in_call, True
        try:
            try:
                return self._collect_segments(limit)
            finally:
                self._is_in_call = outer
        except BaseException:
            self._put_back()
            raise

    def _collect_segments(self, limit: int) -> list[Message]:
        """Return up to `limit` available messages, with no loss between them."""
        messages: list[Message] = []
        take = super()._take
        try:
            while len(messages) < limit:
                messages += take(limit - len(messages))
                if messages:
                    if self._next < self._head:
                        break  # the limit, or a bad message, which is for the next call
                    self._is_collecting, take = True, super()._take_more
                if not self._next_segment():
                    break
        except PenstockError:
            if not messages:  # otherwise the next call raises it
                raise
        finally:
            self._is_collecting = False
        return messages

    def _put_back(self) -> None:
        """Return to the start of what the last call took, and did not return."""
        if not self._has_taken:
            return
        end = self._next
        super()._put_back()
        if self._is_closed or self._next >= self._file.field("first_seq"):
            return
        if self._file.is_named():
            with suppress(PenstockError):  # what interrupted the call is raised
                self._seek_segment(self._next)
        else:  # the earlier segments are gone
            self._lose(end, DropReason.RECREATED)

    def _collect_columns(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        batches = [super()._collect_columns(n, timeout, origins=origins)]
        if self._options.type is None and self._file.compression is Compression.NONE:
            self._add_segments(batches, n, origins=origins)
        if len(batches) == 1:
            return batches[0]
        import pyarrow as pa  # noqa: PLC0415 - only for batches

        return pa.concat_batches(batches)

    def _add_segments(self, batches: list[Batch], n: int, *, origins: bool) -> None:
        """Add batches of the next segments to the first one, up to `n` messages in all."""
        left = n - batches[0].num_rows
        self._is_collecting = True  # confirm nothing before it is returned
        try:
            while 0 < left < n and self._next_segment():
                batches.append(super()._collect_columns(left, 0, origins=origins))
                left -= batches[-1].num_rows
                if not batches[-1].num_rows:
                    break
        except PenstockError:
            pass  # the next call raises it
        finally:
            self._is_collecting = False

    def _wait_for_run(self, n: int, deadline: float | None) -> int:
        while not (count := super()._wait_for_run(n, deadline)) and n > 0 and self._next_segment():
            pass
        return count

    def _idle(self) -> bool:
        """While idle, check whether messages arrive in another segment."""
        while self._next_segment() and self._next >= self._head:
            pass
        return True

    def _is_left(self) -> bool:
        """Tell whether a live segment is abandoned: it will never get more messages.

        Either the log was removed, or a later segment has messages: this one was not sealed, is
        corrupt, or is an old copy. Checked every `LOOK_AGAIN` seconds.
        """
        now = time.monotonic()
        if not self._has_left and now >= self._look_at:
            self._look_at = now + LOOK_AGAIN
            self._has_left = not self._file.is_named() or self._has_messages_behind()
        return self._has_left

    def _has_messages_behind(self) -> bool:
        folder, first = self._index.folder, self._file.field("first_seq")
        with suppress(OSError):  # avoids listing a large directory that did not change
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
                self._looked_through = 0  # it may have messages at the next check
        return False

    def _goes_on(self) -> bool:
        if self._file.field("state") == State.LIVE:
            return False
        return path_of(self._index.folder, self._head).exists()

    def _next_segment(self) -> bool:
        """Switch to the next segment if this one is complete; tell whether there may be more."""
        file = self._file
        if self._is_newest():
            return False
        if self._next < self._head:
            return True  # appended before it was sealed
        if self._skips_to_newest:
            return self._skip_to_newest()
        first = file.field("first_seq")
        if self._is_replaced(first):
            number: int | None = first
        else:
            number = self._index.following(first, self._head)
        if number is None:
            return self._switch_to_new_log()
        try:
            following = open_segment(self._index.folder, number)
            if not self._is_of_this_log(following.field("epoch")):
                following.close()
                return self._switch_to_new_log() or self._step_over(number, self._foreign(number))
        except NotFound:
            return True  # removed by retention meanwhile: retry
        except DamagedQueue as error:
            return self._step_over(number, error)
        next_seq, losses = self._next_in(following.field("epoch")), None
        if number > next_seq:
            # A gap between segments is damage; messages before the oldest segment were removed
            # by retention.
            is_in_a_gap = any(older < number for older in numbers_of(self._index.folder))
            reason = DropReason.DAMAGED if is_in_a_gap else DropReason.RETENTION
            losses = self._with_loss(next_seq, number - 1, reason)
        self._use(following, max(next_seq, number), losses)
        return True

    def _next_in(self, epoch: int) -> int:
        """Return the position to continue at in `epoch`, which may reuse numbers."""
        bounds = Bounds(epoch, 0, 0, () if epoch == self._epoch else self._lineage_of(epoch))
        place = bounds.successor(self._epoch, self._next)
        return self._next if place is None else place

    def _is_replaced(self, number: int) -> bool:
        """Tell whether another segment of this log has this one's name.

        It was recreated, maybe in another epoch, or restored from a copy.
        """
        if self._file.is_named():
            return False
        with suppress(NotFound, DamagedQueue):
            return self._is_of_this_log(look(self._index.folder, number).epoch)
        return False

    def _foreign(self, number: int) -> DamagedQueue:
        path = path_of(self._index.folder, number)
        return DamagedQueue(str(path), "epoch", 16, self._epoch, "another", hint=_FOREIGN)

    def _skip_to_newest(self) -> bool:
        newest = max(self._next, self._index.last())
        if newest > self._next:
            self._lose(newest, DropReason.RETENTION)
        self._skips_to_newest = False
        self._seek_segment(newest)
        return True

    def _step_over(self, number: int, error: DamagedQueue) -> bool:
        """Count an unreadable segment as lost, and continue after it; or raise `error`.

        False for the newest segment, which the next writer will set aside. Until then nobody knows
        how many messages it has: it counts as one, so that the loss is told.
        """
        if self._options.damaged != "skip":
            raise error
        following = self._index.following(number, number + 1)
        if following is None:
            if self._next <= number:
                self._lose(number + 1, DropReason.DAMAGED)
            return False
        if following > self._next:
            self._lose(following, DropReason.DAMAGED)
        self._seek_segment(self._next)
        return self._file.field("first_seq") >= following  # otherwise no later segment is readable

    def _switch_to_new_log(self) -> bool:
        """Switch to the log that replaced this one; False: there is none."""
        file = self._other_log()
        if file is None:
            return False
        end, losses = self._end_of_previous(), None
        if end > self._next:
            losses = self._with_loss(self._next, end - 1, DropReason.RECREATED)
        self._index.look_anew()
        self._use(file, 0, losses)  # what retention has removed of it already counts as lost
        self._confirm()
        return True

    def _end_of_previous(self) -> int:
        """Return the last known end of the log that was replaced."""
        with suppress(DamagedQueue, Unsupported):
            settings = load_settings(self._index.folder)
            previous = None if settings is None else settings.previous
            if previous is not None and previous.had(self._epoch):
                return previous.head
        return max(self._head, self._index.last_end(self._epochs))

    # --- irregular cases -------------------------------------------------------------------------

    def _lapped(self, oldest: int) -> None:
        self._skips_to_newest = self._options.resume == "newest"
        self._lose(oldest, DropReason.OVERRUN)

    def _with_loss(self, first: int, last: int, reason: DropReason) -> LoggedLosses:
        if self._is_collecting:
            raise _ForNextCall(f"{self.url}: lost {first} to {last}")
        if reason is DropReason.OVERRUN:  # a log overwrites nothing
            is_replaced = self._file.field("state") == State.REPLACED
            reason = DropReason.RECREATED if is_replaced else DropReason.RETENTION
        return super()._with_loss(first, last, reason)

    # --- counters and closing -------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        books = super().statistics()
        if self._is_closed:
            return books
        return books._replace(backlog=max(0, self._end() - self._next))

    def _confirm(self) -> None:
        """Save the position; a reader without a name saves none."""

    def _close(self, *, finished: bool) -> None:
        super()._close(finished=finished)
        if self._is_closed:
            self._index.close()


class CompressedLogReader(LogReader, CompressedReader):
    """Reads a log whose payloads are compressed."""


def open_newest(folder: Path, patience: float) -> QueueFile:
    """Map the newest readable segment; wait up to `patience` seconds for the log.

    :raises NotFound: there is no log at this path.
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
        if foreign is not None:  # the log, or its settings file, is being recreated
            with suppress(NotFound, DamagedQueue):
                return open_segment(folder, foreign)
        if damage is None and (folder / SETTINGS).exists():
            patience = max(patience, _BEING_MADE)
        if time.monotonic() - began >= patience:
            raise damage or no_log(folder)
        time.sleep(_LOOK_FOR_LOG)


def _known_epochs(folder: Path) -> frozenset[int] | None:
    with suppress(DamagedQueue, Unsupported):
        settings = load_settings(folder)
        return None if settings is None else settings.epochs
    return None
