"""How are messages read from a wide queue, in order and without a silent gap?"""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import Held, InPlaceReader, Replayable
from penstock.core.closing import Concluding
from penstock.core.errors import (
    Closed,
    DamagedQueue,
    Overrun,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Bounds, Reader
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.core.statistics import Loss, ReaderStatistics
from penstock.core.stream_id import StreamId
from penstock.queue.cursor_entries import POSITION_AT
from penstock.queue.losses import LoggedLosses
from penstock.queue.waiting import RingWaitGroup
from penstock.queue.wide import _ring
from penstock.queue.wide.columns import EMPTY_BATCH, Run, copied_run
from penstock.queue.wide.creation import needs_recovery
from penstock.queue.wide.layout import PAGE, READER_SIZE, Rows, slots_of
from penstock.queue.wide.lending import View, lent_batch
from penstock.queue.wide.queue_file import QueueFile
from penstock.queue.wide.reader_rows import claim_row, tell_writers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.queue.cursors import Cursor, CursorTable
    from penstock.queue.wide.options import WideOptions

__all__ = ["WideReader"]

log = logging.getLogger(__name__)

#: While nothing comes, look this often (seconds) whether the path names another queue.
_BETWEEN_LOOKS: Final = 0.25
#: A writer whose queue was removed goes over to the new one within this time (seconds).
_WRITER_NOTICES: Final = 2.0


class WideReader(_ring.RingReader, Concluding, Replayable, Held, InPlaceReader, Reader):
    """Reads a wide queue while others write to it. It takes no lock and slows nobody.

    With `hold=NAME` the writer waits for it: what a call returned is given back by the next call,
    so a message that was being worked on when the process died comes again.
    """

    def __init__(
        self, url: str, path: str, start: Position, options: WideOptions, file: QueueFile
    ) -> None:
        Reader.__init__(self, url)
        self._path = path
        self._options = options
        self._restarts = 0
        self._removed_at: float | None = None
        #: The queue that was removed, while somebody may write to it, and how far that is known.
        self._left: tuple[QueueFile, int] | None = None
        self._losses = LoggedLosses(url, log)
        self._table: CursorTable | None = None
        self._cursor: Cursor | None = None
        self._is_closed = False
        self._file = file
        try:
            self._meet(start)
        except BaseException:
            self.close()
            raise
        _readers.add(self)

    # --- where it stands --------------------------------------------------------------------

    def _meet(self, start: Position) -> None:
        """Begin with a queue: take a row in its reader table, and stand where it says."""
        file = self._file
        if self._options.trace or self._options.hold:
            self._table, self._cursor = claim_row(self.url, file, self._options.hold)
        self._read_from(file)
        cursor = self._cursor
        if cursor is None or cursor.is_new or not self._options.hold:
            self._stand_at(start)
        elif (known := self._known_place(cursor)) is not None:
            self._next = max(known, file.field("first_seq"))
        else:
            log.warning("%s was created anew since %s read it", self.url, cursor.name)
            self._restarts += 1
            self._stand_at(Position.START)
        if self._options.hold:
            tell_writers(self._file)

    def _known_place(self, cursor: Cursor) -> int | None:
        """Return where a reader goes on that left its place here; None: in an earlier queue.

        :raises DamagedQueue: there was never such a message.
        """
        bounds = self._bounds()
        place = bounds.successor(cursor.epoch, cursor.seq)
        if place is None or place <= bounds.end:
            return place
        if needs_recovery(self._file):  # the disk got its place, and not the messages
            return bounds.end
        raise DamagedQueue(
            self._path,
            f"row {cursor.index} of the reader table: the position of {cursor.name}",
            PAGE + cursor.index * READER_SIZE + POSITION_AT,
            f"up to {bounds.end}, the number of the next message",
            place,
            hint="choose another name, and where it starts",
        )

    def _renumbered(self) -> None:
        """Find the place again after another writer recovered the queue under this reader."""
        bounds = self._bounds()
        place = bounds.successor(self._numbers_of, self._next)
        self._numbers_of = bounds.epoch
        if place is None:
            log.warning("%s: its numbers are others by now; reading it from its start", self.url)
            self._restarts += 1
            place = self._oldest
        self._next = place
        if self._cursor is not None:
            self._cursor.move(self._next, bounds.epoch)

    def _bounds(self) -> Bounds:
        while True:
            epoch, lineage = self._file.field("epoch"), self._file.lineage
            bounds = Bounds(epoch, self._oldest, self._head, lineage)
            if epoch == self._file.field("epoch"):  # else it is recovered this moment
                return bounds

    def _read_from(self, file: QueueFile) -> None:
        """Lay the reader over a queue."""
        # Where nothing may be written, no mark can be left for the writer to wake us: it is polled.
        leaves_marks = file.writable and (self._options.trace or bool(self._options.hold))
        self.wait_group = RingWaitGroup if leaves_marks else None
        plain = memoryview(file.mapping).toreadonly()
        self._slots: Rows = slots_of(file.mapping, file.geometry)
        own = bytes(file.header["stream"][0])
        self._attach(
            file.mapping if leaves_marks else plain,
            -1 if self._cursor is None else self._cursor.index,
            bool(self._options.hold),
            self._wanted_type(),
            StreamId(own) if any(own) else None,
            plain,
        )

    def _wanted_type(self) -> int | None:
        """Return the type that the core is to filter by."""
        return self._options.type

    def _goes_on(self) -> bool:
        """Tell whether a read would go on elsewhere; for those who wait for many readers."""
        return False

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        if self._is_renumbered():
            self._renumbered()
        before = self._next
        self._stand_at(Position.of(position))
        self.acknowledge()
        if self._options.hold and self._next < before:
            tell_writers(self._file)

    def _stand_at(self, place: Position) -> None:
        match place.anchor:
            case "start":
                self._next = self._oldest
            case "end":
                self._next = self._head
            case "last":
                self._next = max(self._oldest, self._head - 1)
            case "time":
                self._next = self._first_at(place.value)
            case _:
                self._next = self._numbered(place.value)
        if self._cursor is not None:
            self._cursor.move(self._next, self._file.field("epoch"))

    def _numbered(self, seq: int) -> int:
        """Return the number of a message that is there, was there, or is the next to come.

        :raises PositionError: it is none of these.
        """
        return check_seek(self.url, seq, self._oldest, self._head)

    def _first_at(self, created_ns: int) -> int:
        """Find the first message that was appended at this time or later: halve, and halve."""
        created = self._slots["created_ns"]
        mask = self._file.geometry.slots - 1
        low, high = self._oldest, self._head
        while low < high:
            middle = (low + high) // 2
            if created[middle & mask] < created_ns and middle >= self._oldest:
                low = middle + 1
            else:
                high = middle
            low = max(low, min(self._oldest, high))
        return low

    def newest_seq(self) -> int | None:
        self._check_open()
        self._look_if_due(_BETWEEN_LOOKS)
        head = self._head
        return head - 1 if head > self._file.field("first_seq") else None

    @property
    def epoch(self) -> int:
        return self._numbers_of

    @property
    def hold(self) -> str | None:
        return next(iter(self._options.hold), None)

    def bounds(self) -> Bounds:
        self._check_open()
        if self._head <= self._next:  # else there is something left in this one
            self._idle()
        return self._bounds()

    # --- reading; `read` and `_take` are in C -------------------------------------------------

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        if n < 1:
            return []
        messages = self._take(n)
        if messages or timeout == 0:
            return messages
        deadline = None if timeout is None else time.monotonic() + timeout
        while not messages:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._wait(left):
                return []
            messages = self._take(n)
        return messages

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        if self._options.type is not None:
            return batch_from_messages(self.read_many(n, timeout))
        deadline = None if timeout is None else time.monotonic() + timeout
        while limit := self._wait_for_run(n, deadline):
            first = self._next
            run = copied_run(self, self._file, first, limit)
            if isinstance(run, int):
                n = self._meet_bad(run) or n
            elif self._is_renumbered():
                self._renumbered()
            elif self._oldest > first:
                self._next = self._lapped(first, self._oldest)
            else:
                self._pass(first, run)
                return run.batch
        return EMPTY_BATCH

    def _is_renumbered(self) -> bool:
        return self._file.field("epoch") != self._numbers_of

    def _pass(self, first: int, run: Run) -> None:
        """Count the messages of a run as delivered, or filtered."""
        self._next = first + run.count
        self._messages += len(run.batch)
        self._bytes += run.size
        self._filtered += run.count - len(run.batch)

    def _wait_for_run(self, n: int, deadline: float | None) -> int:
        """Return how many of up to `n` messages are there; wait for the first."""
        self._check_open()
        self.acknowledge()
        while n > 0:
            if self._is_renumbered():
                self._renumbered()
            if self._oldest > self._next:
                self._next = self._lapped(self._next, self._oldest)
            if self._head > self._next:
                return min(n, self._head - self._next, self._file.geometry.slots)
            if not self._wait(None if deadline is None else deadline - time.monotonic()):
                break
        return 0

    def _meet_bad(self, seq: int) -> int:
        """Deal with a message that is not right; return how many come before it.

        Those are delivered first. It may be that the writer just overtook us.
        """
        if self._oldest > self._next:
            self._next = self._lapped(self._next, self._oldest)
        elif seq > self._next:
            return seq - self._next
        else:
            self._damaged(seq, "crc32c or slot")
        return 0

    # --- reading in place ---------------------------------------------------------------------

    def view(self, timeout: float | None = None) -> AbstractContextManager[Message | None]:
        return View(self, timeout)

    def view_batch(self, n: int, timeout: float | None = 0) -> AbstractContextManager[Batch]:
        return lent_batch(self, n, timeout)

    def _take_back(self, first: int, last: int, count: int, size: int) -> None:
        """Count as lost what was lent out, and raise."""
        self._messages -= count
        self._bytes -= size
        self._lose(first, last, DropReason.OVERRUN)
        raise Overrun(first, last, hint="copy with read(), or let the writer wait: hold=NAME")

    # --- what does not go as usual; called by the C core -----------------------------------------

    def _lapped(self, first: int, oldest: int) -> int:
        """Count the messages from `first` on as overwritten, and say where to go on.

        :raises DamagedQueue: the header says so, and cannot be right.
        """
        if oldest > self._head:
            raise DamagedQueue(self._path, "tail", 192, f"up to {self._head}", oldest)
        resume = oldest
        if self._options.resume == "newest":
            resume = max(oldest, self._head - 1)
        self._lose(first, resume - 1, DropReason.OVERRUN)
        return resume

    def _damaged(self, seq: int, what: str) -> None:
        """Step over a damaged message, or raise."""
        geometry = self._file.geometry
        is_header = self._head - self._oldest > geometry.slots
        if self._options.damaged == "skip" and not is_header:
            self._lose(seq, seq, DropReason.DAMAGED)
            self._next = seq + 1
            return
        offset = geometry.slots_offset + (seq & (geometry.slots - 1)) * self._slots.itemsize
        raise DamagedQueue(
            self._path,
            f"{what} of message {seq}",
            offset,
            "as its writer made it",
            "something else",
            hint="damaged=skip counts it as lost and goes on",
        )

    def _idle(self) -> bool:
        """Look, while nothing comes, whether the path means another queue by now."""
        if self._is_renumbered():
            self._renumbered()
        self._look_behind()
        if self._file.is_current():
            self._removed_at = None
        elif self._head <= self._next and self._is_over():
            self._go_over()
        return True

    def _is_over(self) -> bool:
        """Tell whether nothing more is to be expected in a queue that was removed.

        Its writer notices within a second, if it writes at all.
        """
        now = time.monotonic()
        self._removed_at = now if self._removed_at is None else self._removed_at
        return now - self._removed_at > _WRITER_NOTICES or not self._file.has_writer()

    def _go_over(self) -> None:
        """Read the queue that the path names now, from the first message that was ever in it."""
        try:
            new = QueueFile.open_to_read(self._path)
        except PenstockError:
            return  # removed, or being made: wait
        if self._head > self._next:  # a last one, before its writer left
            new.close()
            return
        if new.compression is not self._file.compression:
            new.close()
            raise Unsupported(
                f"{self.url} was created anew with other compression", hint="open it again"
            )
        log.warning("%s was created anew; reading it from its start", self.url)
        self._restarts += 1
        self._removed_at = None
        left, self._file = (self._file, self._next), new
        try:
            self._let_go_of_row(left[0])
            self._meet(Position.sequence(new.field("first_seq")))
        except BaseException:
            left[0].close()
            self.close()  # there is nothing that could be read
            raise
        self._look_behind()
        self._left = left
        self._look_behind()

    def _look_behind(self) -> None:
        """Count what somebody still writes to the queue that was removed, which nobody reads."""
        if self._left is None:
            return
        file, end = self._left
        has_writer, head = file.has_writer(), file.field("head")
        if head > end:
            self._lose(end, head - 1, DropReason.RECREATED)
        self._left = (file, max(head, end)) if has_writer else None
        if not has_writer:
            file.close()

    def _lose(self, first: int, last: int, reason: DropReason) -> None:
        self._losses.add(Loss(first, last, reason))

    # --- books and closing --------------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        # With what is overwritten by now: that is not known to be lost before it is looked for.
        self._look_behind()
        backlog = 0 if self._is_closed else max(0, self._head - self._next)
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._losses.total,
            filtered=self._filtered,
            restarts=self._restarts,
            next_seq=self._next,
            backlog=backlog,
            losses=self._losses.ranges(),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            self._raise_closed()

    def _raise_closed(self) -> None:
        raise Closed(f"{self.url} was closed")

    def _raise_cut(self) -> None:
        raise self._file.cut_off()

    def _close(self, *, finished: bool) -> None:
        if not self._is_closed and finished and self._cursor is not None:
            # Another thread is reading, and leaves now; or the file was cut off.
            with suppress(RuntimeError, Closed, DamagedQueue):
                self.acknowledge()
        if not self._detach():
            return
        self._is_closed = True
        self._look_behind()
        if self._left is not None:
            self._left[0].close()
            self._left = None
        if hasattr(self, "_slots"):
            del self._slots
        if hasattr(self, "_file"):
            self._let_go_of_row(self._file)
            self._file.close()
            del self._file

    def leave_to_parent(self) -> None:
        """Let the row in the reader table be the parent's alone, in a forked process.

        A held reader is closed there: the writer waits for one of them, not for two.
        """
        self._entry = -1
        self._cursor = self._table = None
        if self._options.hold:
            self._close(finished=False)

    def _let_go_of_row(self, file: QueueFile) -> None:
        if self._cursor is not None:
            self._cursor.release()
            self._cursor = None
            if self._options.hold:
                tell_writers(file)
        if self._table is not None:
            self._table.close()
            self._table = None


_readers: weakref.WeakSet[WideReader] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for reader in list(_readers):
        reader.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
