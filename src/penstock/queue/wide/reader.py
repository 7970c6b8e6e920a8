"""How are messages read from a wide queue, in order and without a silent gap?"""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import (
    Held,
    InPlaceReader,
    OriginTimed,
    Replayable,
    SourceTimed,
)
from penstock.core.errors import (
    Closed,
    DamagedQueue,
    InvalidOption,
    NotFound,
    Overrun,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Bounds, Concluding, Reader
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.core.statistics import LoggedLosses, Loss, ReaderStatistics
from penstock.queue.cursors import POSITION_AT
from penstock.queue.waiting import RingWaitGroup
from penstock.queue.wide import _ring
from penstock.queue.wide.file import QueueFile
from penstock.queue.wide.layout import PAGE, READER_SIZE, Compression
from penstock.queue.wide.readers import claim_row, tell_writers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.queue.cursors import Cursor, CursorTable
    from penstock.queue.wide.arrow import Run
    from penstock.queue.wide.options import WideOptions

__all__ = ["WideReader", "open_wide_reader"]

log = logging.getLogger(__name__)

#: Poll interval (seconds) while waiting for a queue to appear.
_LOOK_FOR_QUEUE: Final = 0.02
#: How often (seconds) an idle reader checks whether the path names another queue.
_BETWEEN_LOOKS: Final = 0.25
#: A writer whose queue was removed switches to the new one within this time (seconds).
_WRITER_NOTICES: Final = 2.0


def open_wide_reader(url: str, path: str, start: Position, options: WideOptions) -> WideReader:
    """Open a reader, plain or decompressing.

    :raises NotFound: there is no queue at this path.
    :raises DamagedQueue: it is not readable.
    """
    if len(options.hold) > 1:
        raise InvalidOption("hold", ",".join(options.hold), "a reader has one name")
    path = os.path.abspath(path)  # noqa: PTH100 - the process may change its directory
    file = _open_when_there(path, options.wait)
    if file.compression is Compression.NONE:
        return WideReader(url, path, start, options, file)
    from penstock.queue.wide.compression import CompressedReader  # noqa: PLC0415 - a subclass: import cycle

    return CompressedReader(url, path, start, options, file)


def _open_when_there(path: str, patience: float) -> QueueFile:
    deadline = time.monotonic() + patience
    while True:
        try:
            return QueueFile.open_to_read(path)
        except NotFound:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_FOR_QUEUE)


class WideReader(
    _ring.RingReader,
    Concluding,
    Replayable,
    SourceTimed,
    OriginTimed,
    Held,
    InPlaceReader,
    Reader,
):
    """Reads a wide queue while others write to it, without locks and without slowing them.

    With `hold=NAME` the writer waits for it: the next call confirms the messages of a call, so a
    message in work when the process dies is redelivered.
    """

    def __init__(
        self, url: str, path: str, start: Position, options: WideOptions, file: QueueFile
    ) -> None:
        Reader.__init__(self, url)
        self._path = path
        self._options = options
        self._restarts = 0
        self._removed_at: float | None = None
        #: The removed queue, while it may still be written, and the end up to which it is counted.
        self._left: tuple[QueueFile, int] | None = None
        self._losses = LoggedLosses(url, log)
        self._table: CursorTable | None = None
        self._cursor: Cursor | None = None
        self._is_closed = False
        #: Whether a call may have messages that its caller has not got: `close` confirms nothing.
        self._is_in_call = False
        self._file = file
        try:
            self._meet(start)
        except BaseException:
            self.close()
            raise
        _readers.add(self)

    # --- position ---------------------------------------------------------------------------

    def _meet(self, start: Position) -> None:
        """Start with a queue: claim a row in its reader table, and resume there or at `start`."""
        file = self._file
        if self._options.trace or self._options.hold:
            self._table, self._cursor = claim_row(self.url, file, self._options.hold)
        self._read_from(file)
        cursor = self._cursor
        if cursor is None or cursor.is_new or not self._options.hold:
            self._stand_at(start)
        elif (known := self._known_place(cursor)) is not None:
            self._next = known  # what is gone of it counts as lost
        else:
            log.warning("%s was created anew since %s read it", self.url, cursor.name)
            self._restarts += 1
            self._stand_at(Position.START)
        if self._options.hold:
            tell_writers(self._file)

    def _known_place(self, cursor: Cursor) -> int | None:
        """Return the position to resume at; None: it belongs to an earlier queue at this path.

        :raises DamagedQueue: the position is beyond the end of the queue.
        """
        bounds = self._bounds()
        place = bounds.successor(cursor.epoch, cursor.seq)
        if place is None or place <= bounds.end:
            return place
        if self._file.needs_recovery():  # the disk has the position, but not the messages
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
        """Adopt the new epoch after a writer recovered the queue under this reader."""
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
            epoch, lineage = self._file.field("epoch"), self._file.header.lineage
            bounds = Bounds(epoch, self._oldest, self._head, lineage)
            if epoch == self._file.field("epoch"):  # otherwise a recovery is under way
                return bounds

    def _read_from(self, file: QueueFile) -> None:
        """Attach the C core to a queue."""
        # A read-only reader cannot ask the writer to wake it: it polls.
        leaves_marks = file.writable and (self._options.trace or bool(self._options.hold))
        self.wait_group = RingWaitGroup if leaves_marks else None
        plain = memoryview(file.mapping).toreadonly()
        self._attach(
            file.mapping if leaves_marks else plain,
            -1 if self._cursor is None else self._cursor.index,
            bool(self._options.hold),
            self._wanted_type(),
            file.header.stream,
            plain,
        )

    def _wanted_type(self) -> int | None:
        """Return the type that the C core filters by."""
        return self._options.type

    def _goes_on(self) -> bool:
        """Tell whether a read would switch to another file; for `Waiter`."""
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

    def skip_to(self, seq: int) -> None:
        """Seek to a number; to one that is at hand as if those before it had been read."""
        if self._next <= seq < self._head:
            self._next = seq
        else:
            self.seek(seq)

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
        """Check that `seq` is at most the end of the queue, and return it.

        :raises PositionError: it is beyond the end.
        """
        return check_seek(self.url, seq, self._oldest, self._head)

    def _first_at(self, created_ns: int) -> int:
        """Find the first message appended at `created_ns` or later, by binary search."""
        slot = self._file.slot
        low, high = self._oldest, self._head
        while low < high:
            middle = (low + high) // 2
            if slot(middle).created_ns < created_ns and middle >= self._oldest:
                low = middle + 1
            else:
                high = middle
            low = max(low, min(self._oldest, high))
        return low

    def next_happened(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        from penstock.queue.wide import arrow  # noqa: PLC0415 - loads numpy

        self._check_open()
        messages = max(seq, self._oldest), self._head
        return arrow.first_in_time(arrow.source_times, self._file, messages, start_ns, end_ns)

    def next_originated(self, seq: int, start_ns: int, end_ns: int) -> int | None:
        from penstock.queue.wide import arrow  # noqa: PLC0415 - as above

        self._check_open()
        messages = max(seq, self._oldest), self._head
        return arrow.first_in_time(arrow.origin_times, self._file, messages, start_ns, end_ns)

    def newest_seq(self) -> int | None:
        self._check_open()
        self._look_if_due(_BETWEEN_LOOKS)
        head = self._head
        return head - 1 if head > self._file.field("first_seq") else None

    def is_named(self) -> bool:
        """Tell whether its path still names the file that it reads."""
        return self._file.is_named()

    def first_here(self) -> int:
        """Return the first number of the stream that it reads, which may be removed by now."""
        return self._file.field("first_seq")

    def end_here(self) -> int:
        """Return the next number of the stream that it reads, even if another has replaced it."""
        return self._head

    @property
    def epoch(self) -> int:
        return self._numbers_of

    @property
    def hold(self) -> str | None:
        return next(iter(self._options.hold), None)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def backlog(self) -> int:
        """Number of unread messages; 0 after `close`."""
        return 0 if self._is_closed else max(0, self._head - self._next)

    @property
    def passed(self) -> int:
        """Number of messages that it delivered, filtered out or lost."""
        return self._messages + self._filtered + self._losses.total

    @property
    def writer_pid(self) -> int:
        """The pid of the current or last writer; 0 before the first."""
        self._check_open()
        return self._file.field("writer_pid")

    def append_times(self, n: int) -> NDArray[np.int64]:
        """Return `created_ns` of up to `n` next messages, without reading them."""
        from penstock.queue.wide.arrow import append_times  # noqa: PLC0415 - loads numpy

        self._check_open()
        first = max(self._next, self._oldest)
        return append_times(self._file, first, min(first + n, self._head))

    def skip(self, n: int, reason: DropReason) -> None:
        """Skip up to `n` existing messages, and count them as lost."""
        self._check_open()
        if self._oldest > self._next:
            self._lapped(self._oldest)
        n = min(n, self._head - self._next)
        if n > 0:
            self._lose(self._next + n, reason)

    def bounds(self) -> Bounds:
        self._check_open()
        if self._head <= self._next:  # otherwise this queue has unread messages
            self._idle()
        return self._bounds()

    # --- reading; `read` and `_take` are in C -------------------------------------------------

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        if n < 1:
            return []
        self._has_taken = False
        self._is_in_call = True
        try:
            try:
                return self._take(n) or self._wait_and_take(n, timeout)
            finally:  # no signal comes between it and the caller
                self._is_in_call = False
        except BaseException:  # a signal: the next call reads them again
            self._put_back()
            raise

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while timeout != 0:
            if not self._wait(None if deadline is None else deadline - time.monotonic()):
                break
            if messages := self._take(limit):
                return messages
        return []

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        return self._read_columns(n, timeout, origins=False)

    def read_batch_with_origins(self, n: int, timeout: float | None = 0) -> Batch:
        return self._read_columns(n, timeout, origins=True)

    def _read_columns(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        self._has_taken = False
        self._is_in_call = True
        try:
            try:
                return self._collect_columns(n, timeout, origins=origins)
            finally:
                self._is_in_call = False
        except BaseException:  # a signal, also right behind `_pass`
            self._put_back()
            raise

    def _collect_columns(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        from penstock.core import batch as batches  # noqa: PLC0415 - loads Arrow
        from penstock.queue.wide.arrow import EMPTY_BATCH, copied_run  # noqa: PLC0415 - as above

        if self._options.type is not None:
            return self._read_converted(n, timeout, origins=origins)
        schema = batches.ORIGIN_SCHEMA if origins else batches.BATCH_SCHEMA
        deadline = None if timeout is None else time.monotonic() + timeout
        while limit := self._wait_for_run(n, deadline):
            first = self._next
            run = copied_run(self, self._file, first, limit, schema)
            if isinstance(run, int):
                n = self._meet_bad(run) or n
            elif self._is_renumbered():
                self._renumbered()
            elif self._oldest > first:
                self._lapped(self._oldest)
            else:
                self._pass(first, run.count, len(run.batch), run.size)
                return run.batch
        return batches.with_origins(EMPTY_BATCH) if origins else EMPTY_BATCH

    def _read_converted(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        """Read messages, and convert them into a batch."""
        from penstock.core.batch import batch_from_messages  # noqa: PLC0415 - loads Arrow

        # Not `read_many`: the call lasts until the batch is returned.
        messages = (self._take(n) or self._wait_and_take(n, timeout)) if n > 0 else []
        return batch_from_messages(messages, origins=origins)

    def _is_renumbered(self) -> bool:
        return self._file.field("epoch") != self._numbers_of

    def _wait_for_run(self, n: int, deadline: float | None) -> int:
        """Wait for a message until `deadline`; return how many are there, up to `n`."""
        self._check_open()
        self.acknowledge()
        while n > 0:
            if self._is_renumbered():
                self._renumbered()
            if self._oldest > self._next:
                self._lapped(self._oldest)
            if self._head > self._next:
                return min(n, self._head - self._next, self._file.geometry.slots)
            if not self._wait(None if deadline is None else deadline - time.monotonic()):
                break
        return 0

    def _meet_bad(self, seq: int) -> int:
        """Handle a bad message; return how many good ones precede it, to be delivered first.

        It may be overwritten by the writer, or renumbered by a recovery.
        """
        if self._is_renumbered():
            self._renumbered()
        elif self._oldest > self._next:
            self._lapped(self._oldest)
        elif seq > self._next:
            return seq - self._next
        else:
            self._damaged(seq, "crc32c or slot")
        return 0

    # --- reading in place ---------------------------------------------------------------------

    def view(self, timeout: float | None = None) -> AbstractContextManager[Message | None]:
        return _View(self, timeout)

    def view_batch(self, n: int, timeout: float | None = 0) -> AbstractContextManager[Batch]:
        return _BatchView(self, n, timeout)

    def _take_back(self, first: int, last: int, count: int, size: int) -> None:
        """Count lent messages as lost instead of delivered or filtered out, and raise."""
        losses = self._with_loss(first, last, DropReason.OVERRUN)
        self._losses, self._messages, self._bytes, self._filtered = (
            losses,
            self._messages - count,
            self._bytes - size,
            self._filtered - (last + 1 - first - count),
        )
        self._losses.tell()
        raise Overrun(first, last, hint="copy with read(), or let the writer wait: hold=NAME")

    # --- irregular cases; called by the C core ---------------------------------------------------

    def _lapped(self, oldest: int) -> None:
        """Count the unread messages before `oldest` as overwritten, and go on behind them.

        :raises DamagedQueue: `tail` is beyond `head`.
        """
        if oldest > self._head:
            raise DamagedQueue(self._path, "tail", 192, f"up to {self._head}", oldest)
        resume = oldest
        if self._options.resume == "newest":
            resume = max(oldest, self._head - 1)
        self._lose(resume, DropReason.OVERRUN)

    def _damaged(self, seq: int, what: str) -> None:
        """Skip a damaged message and count it as lost, or raise."""
        geometry = self._file.geometry
        is_header = self._head - self._oldest > geometry.slots
        if self._options.damaged == "skip" and not is_header:
            self._lose(seq + 1, DropReason.DAMAGED)
            return
        raise DamagedQueue(
            self._path,
            f"{what} of message {seq}",
            geometry.slot_offset(seq),
            "as its writer made it",
            "something else",
            hint="damaged=skip counts it as lost and goes on",
        )

    def _idle(self) -> bool:
        """While idle, check whether the path names another queue."""
        if self._is_renumbered():
            self._renumbered()
        self._look_behind()
        if self._file.is_current():
            self._removed_at = None
        elif self._head <= self._next and self._is_over():
            self._switch_queue()
        return True

    def _is_over(self) -> bool:
        """Tell whether a removed queue will get no more messages.

        An active writer notices the removal within a second.
        """
        now = time.monotonic()
        self._removed_at = now if self._removed_at is None else self._removed_at
        if now - self._removed_at > _WRITER_NOTICES:
            return True
        # Without permission to see a writer, it waits for one that may be there.
        return self._file.writable and not self._file.has_writer()

    def _switch_queue(self) -> None:
        """Switch to the queue that the path names now, at its first message."""
        try:
            new = QueueFile.open_to_read(self._path)
        except PenstockError:
            return  # removed, or under creation: wait
        if self._head > self._next:  # a last message of the leaving writer
            new.close()
            return
        if new.compression is not self._file.compression:
            new.close()
            raise Unsupported(
                f"{self.url} was created anew with other compression", hint="open it again"
            )
        is_same = new.field("epoch") == self._numbers_of  # resized, with the same messages
        if not is_same:
            log.warning("%s was created anew; reading it from its start", self.url)
            self._restarts += 1
        self._removed_at = None
        left, self._file = (self._file, self._next), new
        place = max(self._next, new.field("tail")) if is_same else new.field("first_seq")
        try:
            self._let_go_of_row(left[0])
            self._meet(Position.sequence(place))
            if is_same:  # a named row there has an older position
                self._stand_at(Position.sequence(place))
        except BaseException:
            left[0].close()
            self.close()  # there is no queue to read
            raise
        self._look_behind()
        self._left = left
        self._look_behind()

    def _look_behind(self) -> None:
        """Count messages that are still written to the removed queue as lost."""
        if self._left is None:
            return
        file, end = self._left
        has_writer, head = file.has_writer(), file.field("head")
        losses, left = self._losses, (file, max(head, end)) if has_writer else None
        if head > end:
            losses = losses.with_losses([Loss(end, head - 1, DropReason.RECREATED)])
        self._losses, self._left = losses, left  # both, or neither after an interrupt
        losses.tell()
        if not has_writer:
            file.close()

    def _lose(self, next_seq: int, reason: DropReason) -> None:
        """Count messages as lost, and go on at `next_seq`: both, or neither after an interrupt."""
        self._losses, self._next = self._with_loss(self._next, next_seq - 1, reason), next_seq
        self._losses.tell()

    def _with_loss(self, first: int, last: int, reason: DropReason) -> LoggedLosses:
        """Return the ledger with one more loss."""
        return self._losses.with_losses([Loss(first, last, reason)])

    # --- counters and closing -----------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        # Overwritten unread messages count as backlog until a read finds them lost.
        self._look_behind()
        self._losses.tell()
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._losses.total,
            filtered=self._filtered,
            restarts=self._restarts,
            next_seq=self._next,
            backlog=self.backlog,
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
        confirms = finished and not self._is_in_call
        if confirms and not self._is_closed and self._cursor is not None:
            # Another thread is reading, or the file was truncated.
            with suppress(RuntimeError, Closed, DamagedQueue):
                self.acknowledge()
        if not self._detach():
            return
        self._is_closed = True
        self._look_behind()
        self._losses.tell(at_once=True)
        if self._left is not None:
            self._left[0].close()
            self._left = None
        if hasattr(self, "_file"):
            self._let_go_of_row(self._file)
            self._file.close()
            del self._file

    def leave_to_parent(self) -> None:
        """Leave the row in the reader table to the parent, in a forked process.

        A held reader is closed in the child: the writer waits for one reader of a name.
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


# --- messages in place; parts of the reader -------------------------------------------------------
# ruff: noqa: SLF001


class _View:
    """A message on loan. Not a generator-based context manager, which would cost too much."""

    __slots__ = ("_message", "_reader", "_timeout")

    def __init__(self, reader: WideReader, timeout: float | None) -> None:
        self._reader = reader
        self._timeout = timeout
        self._message: Message | None = None

    def __enter__(self) -> Message | None:
        self._message = message = self._reader._peek(self._timeout)
        return message

    def __exit__(self, kind: object, *_: object) -> None:
        message, reader = self._message, self._reader
        if message is not None and reader._oldest > message.seq and kind is None:
            reader._take_back(message.seq, message.seq, 1, len(message.payload))


class _BatchView:
    """A batch on loan. No generator, as a signal could come between it and the caller."""

    def __init__(self, reader: WideReader, n: int, timeout: float | None) -> None:
        self._reader = reader
        self._n = n
        self._timeout = timeout
        #: The number of the first message, and the run that begins there.
        self._lent: tuple[int, Run] | None = None

    def __enter__(self) -> Batch:
        reader = self._reader
        reader._has_taken = False
        reader._is_in_call = True
        try:
            try:
                return self._borrow()
            finally:
                reader._is_in_call = False
        except BaseException:  # a signal, also right behind `_pass`
            reader._put_back()
            raise

    def _borrow(self) -> Batch:
        from penstock.queue.wide.arrow import EMPTY_BATCH, lent_run  # noqa: PLC0415 - as above

        reader, n = self._reader, self._n
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while limit := reader._wait_for_run(n, deadline):
            first = reader._next
            run = lent_run(reader, reader._file, first, limit, reader._options.type)
            if isinstance(run, int):
                n = reader._meet_bad(run) or n
                continue
            batch = run.batch
            self._lent = first, run
            reader._pass(first, run.count, len(batch), run.size)
            if len(batch):
                return batch
            reader._has_taken = False  # all were filtered out: continue
            self._lent = None
        return EMPTY_BATCH

    def __exit__(self, kind: object, *_: object) -> None:
        if self._lent is None or kind is not None:
            return
        reader, (first, run) = self._reader, self._lent
        if reader._oldest > first:
            # All of them: it is unknown which ones the caller had used before.
            reader._take_back(first, first + run.count - 1, len(run.batch), run.size)
