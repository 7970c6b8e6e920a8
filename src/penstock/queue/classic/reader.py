"""How are messages read from a classic queue, in order and without a silent gap?"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.core.batch import Batch, batch_from_messages
from penstock.core.capabilities import Replayable
from penstock.core.errors import Closed, DamagedQueue, NotFound, PositionError
from penstock.core.interfaces import Bounds, Reader
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.statistics import LoggedLosses, Loss, ReaderStatistics
from penstock.queue.classic.creation import open_to_read
from penstock.queue.classic.layout import (
    ID_COUNT,
    SLOT_SIZE,
    STATUS_SIZE,
    Slot,
    Status,
    decode_slots,
    id_distance,
    slot_checksums_hold,
    unwrap,
)
from penstock.queue.classic.options import CANNOT_CARRY
from penstock.queue.classic.runs import Run, copy_run, explain_fault
from penstock.queue.classic.slots import (
    PATIENCE,
    NotYetMade,
    check_sizes,
    live_slots,
    live_span,
    live_table,
    read_status,
    slot_is_passed_on,
    youngest_seq,
)
from penstock.queue.classic.watch import Sleeper
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.options import ClassicOptions

__all__ = ["ClassicReader"]

log = logging.getLogger(__name__)

# --- the reader ---------------------------------------------------------------------------------

#: Messages copied ahead for a caller that reads one at a time.
_READ_AHEAD = 256
#: Most messages copied at a time.
_LARGEST_RUN = 4096
#: How often (seconds) an idle reader checks whether the path names another queue.
_LOOK_AT_PATH = 0.25

#: Messages copied ahead, the next number, and the counters of a reader.
_Place: TypeAlias = "tuple[list[Message], int, int, int, int, int]"


class ClassicReader(Replayable, Reader):
    """Reads an LROSE queue while other programs, also LROSE's, write to it."""

    cannot_carry = CANNOT_CARRY

    def __init__(self, url: str, path: str, start: Position, options: ClassicOptions) -> None:
        super().__init__(url)
        self._path = path
        self._options = options
        self._device, status = open_to_read(path, options.wait)
        self._closed = False
        self._messages = 0
        self._bytes = 0
        self._filtered = 0
        self._restarts = 0
        self._losses = LoggedLosses(url, log)
        #: Messages copied ahead, the next one last.
        self._ready: list[Message] = []
        #: With a filter: the number up to which messages are counted, and the copied run's end.
        self._booked_to = self._copied_to = 0
        #: What `_put_back` returns to; None: the present call has taken nothing.
        self._before: _Place | None = None
        self._progress = _Progress(url)
        self._sleeper = Sleeper()
        self._looked_at_path = time.monotonic()
        try:
            with storage_errors("reading", path):
                self._meet(status)
                check_sizes(self._device, self._status)
            self.seek(start)
        except BaseException:
            self.close()
            raise

    # --- position ---------------------------------------------------------------------------

    def _meet(self, status: Status) -> None:
        """Start with a queue: derive sequence numbers from its ids."""
        self._status = status
        self._youngest = youngest_seq(status)
        self._next = 0
        self._last_slot: _LastSlot | None = None
        self._idle_status = b""
        self._progress.forget()

    def _refresh(self) -> Status:
        """Read the status; restart if the queue was recreated."""
        status = read_status(self._device)
        if _is_another_queue(self._device, status, self._status, self._youngest, self._last_slot):
            self._restart(status)
        else:
            self._status = status
            if status.youngest_id >= 0:
                self._youngest = unwrap(status.youngest_id, self._youngest)
        return status

    def _restart(self, status: Status) -> None:
        log.warning("%s was created anew; reading it from its start", self.url)
        if self._next <= self._youngest:
            self._lose(self._youngest + 1, DropReason.RECREATED)
        self._restarts += 1
        self._meet(status)

    def _lose(self, next_seq: int, reason: DropReason) -> None:
        """Count messages as lost, and go on at `next_seq`: both, or neither after an interrupt."""
        loss = Loss(self._next, next_seq - 1, reason)
        self._losses, self._next = self._losses.with_losses([loss]), next_seq
        self._losses.tell()

    def _slot_of(self, seq: int) -> int:
        """Return a message's slot: ids and slots advance together (docs/specs/lrose.md 1.7)."""
        return (self._status.youngest_slot - (self._youngest - seq)) % self._status.nslots

    def _oldest(self, status: Status) -> int:
        """Return the number of the oldest message, or of the next one if the queue is empty."""
        return _oldest_seq(self._device, status, self._youngest)

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        place = Position.of(position)
        with storage_errors("reading", self._path):
            if not self._device.is_current():
                here, self._next = self._next, self._youngest + 1  # a seek skips unread messages
                if not self._go_over():
                    self._next = here
            status = self._refresh()
            match place.anchor:
                case "start":
                    target = self._oldest(status)
                case "end":
                    target = self._youngest + 1
                case "last":
                    target = max(self._youngest, 0)
                case "time":
                    target = _first_seq_at(
                        self._device, status, self._youngest, place.value // 1_000_000_000
                    )
                case _:
                    target = self._renumbered(place.value)
            self._stand_at(target)
            if place.anchor == "end" and status.blocking_write and self._youngest >= 0:
                self._report(self._youngest)

    def _stand_at(self, seq: int) -> None:
        self._next = seq
        self._ready.clear()
        self._idle_status = b""
        self._last_slot = None

    def _renumbered(self, seq: int) -> int:
        """Adopt a number of an earlier reader, which may have counted more wraps of the ids.

        :raises PositionError: it is beyond the end.
        """
        if seq <= self._youngest + 1:
            return seq
        rounds = -(-(seq - 1 - self._youngest) // ID_COUNT)
        youngest = self._youngest + rounds * ID_COUNT
        if youngest - seq > ID_COUNT // 2:  # more likely a number beyond the end
            raise PositionError(
                f"{self.url} has no message {seq} yet: the youngest is {self._youngest}",
                hint="use end to wait for the next message",
            )
        self._youngest = youngest
        return seq

    def seek_back(self, messages: int = 1) -> None:
        """Move back by `messages`, to read them again; not past the oldest."""
        self._check_open()
        oldest = self._oldest(self._refresh())
        self._stand_at(max(self._position() - messages, min(oldest, self._position())))

    def seek_after_id(self, id: int) -> None:
        """Move to the message after the one with this LROSE id.

        :raises PositionError: the queue has no message with this id.
        """
        self._check_open()
        status = self._refresh()
        seq = _seq_of_id(self._device, status, self._youngest, id)
        if seq is None:
            raise PositionError(f"{self.url} holds no message with id {id}")
        self._stand_at(seq + 1)

    def _position(self) -> int:
        return self._ready[-1].seq if self._ready else self._next

    def newest_seq(self) -> int | None:
        self._check_open()
        self._refresh()
        return self._youngest if self._youngest >= 0 else None

    def bounds(self) -> Bounds:
        self._check_open()
        with storage_errors("reading", self._path):
            if not self._ready:
                self._follow_path()
            oldest = self._oldest(self._refresh())
        # The format has no epoch; its numbers reveal a recreated queue.
        return Bounds(0, oldest, self._youngest + 1)

    # --- reading ----------------------------------------------------------------------------

    # A signal can be raised at every call. So a read changes this reader in single statements, and
    # what it took is put back if it does not get to its caller.

    def _take(self, limit: int) -> list[Message]:
        self._check_open()
        self._before = None
        try:
            if not self._ready:
                self._fetch(max(limit, _READ_AHEAD))
            messages = self._ready[: -limit - 1 : -1]
            if messages:
                self._before = self._place()
                self._ready = self._ready[: -len(messages)]
                self._delivered(len(messages), sum([len(m.payload) for m in messages]))
            elif self._status.blocking_write:
                self._report()  # also past filtered or lost messages
            return messages  # noqa: TRY300 - a signal may come before it
        except BaseException:
            self._put_back()
            raise

    def _place(self) -> _Place:
        counters = self._messages, self._bytes, self._filtered, self._booked_to
        return self._ready, self._next, *counters

    def _put_back(self) -> None:
        """Return to the start of what the present call took, and does not return."""
        before, self._before = self._before, None
        if before is not None:
            self._ready, self._next, self._messages, self._bytes, *rest = before
            self._filtered, self._booked_to = rest

    def read(self, timeout: float | None = None) -> Message | None:
        ready = self._ready
        if ready and self._options.type is None and not self._status.blocking_write:
            message = ready[-1]
            size = len(message.payload)
            # Not `pop`: a signal could be raised behind it.
            self._messages, self._bytes, ready[-1:] = self._messages + 1, self._bytes + size, ()
            return message
        self._before = None
        try:
            return super().read(timeout)
        except BaseException:
            self._put_back()
            raise

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        self._before = None
        try:
            return super().read_many(n, timeout)
        except BaseException:
            self._put_back()
            raise

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        self._check_open()
        self._before = None
        try:
            if not self._ready and self._options.type is None and n > 0:
                run = self._fetch_run(n)
                if run and not run.is_compressed:
                    batch, count, size = run.batch(self._next), len(run.starts), run.payload_bytes
                    self._before = self._place()
                    self._next += count
                    self._delivered(count, size)
                    return batch
            return batch_from_messages(self.read_many(n, timeout))
        except BaseException:
            self._put_back()
            raise

    def _delivered(self, count: int, size: int) -> None:
        self._messages += count
        self._bytes += size
        if self._options.type is not None:
            # Messages of other types up to the next wanted one.
            reached = self._ready[-1].seq if self._ready else self._copied_to
            self._filtered += reached - self._booked_to - count
            self._booked_to = reached
        if self._status.blocking_write:
            self._report()

    def _report(self, seq: int | None = None) -> None:
        """Report to a blocking writer that messages up to `seq`, or all delivered, are read."""
        if self._options.trace:
            reached = self._position() - 1 if seq is None else seq
            self._progress.report(self._device, self._status, reached)

    def _fetch(self, limit: int) -> None:
        """Copy up to `limit` available messages that pass the filter to `_ready`."""
        wanted = self._options.type
        stop_after: int | None = None
        while True:
            run = self._fetch_run(limit)
            if not run:
                return
            messages = run.messages(self._next)
            if not messages:
                self._skip_or_raise()
                continue
            first, count = self._next, len(messages)
            chosen = messages[::-1]
            if wanted is not None:
                chosen = [message for message in chosen if message.type == wanted]
            if chosen:
                end = first + count
                self._ready, self._next, self._booked_to, self._copied_to = chosen, end, first, end
                return
            self._next, self._filtered = first + count, self._filtered + count
            if stop_after is None:
                stop_after = self._youngest
            if self._next > stop_after:
                return

    def _fetch_run(self, limit: int) -> Run | None:
        """Copy the next run of messages; count overwritten ones as lost. None: no new message."""
        with storage_errors("reading", self._path):
            if self._is_idle():
                return None
            deadline: float | None = None
            while True:
                try:
                    status = self._refresh()
                except NotYetMade:  # it is being recreated
                    return None
                if self._next > self._youngest:
                    self._rest()
                    return None
                count = min(limit, _LARGEST_RUN, self._youngest - self._next + 1, status.nslots)
                slot = self._slot_of(self._next)
                run = copy_run(self._device, status, slot, self._next % ID_COUNT, count)
                if run:
                    self._remember_last(run)
                    return run
                oldest = self._oldest(self._refresh())
                if oldest > self._next:
                    newest = self._options.resume == "newest"
                    self._lose(
                        max(self._youngest, oldest) if newest else oldest, DropReason.OVERRUN
                    )
                    deadline = None
                elif deadline is None:
                    deadline = time.monotonic() + PATIENCE
                elif time.monotonic() > deadline:
                    self._skip_or_raise()
                    deadline = None
                else:
                    time.sleep(0.001)

    def _remember_last(self, run: Run) -> None:
        self._last_slot = (self._next + len(run.starts) - 1, run.slots[-1].astype(">i4").tobytes())

    def _skip_or_raise(self) -> None:
        """Skip a message that stays unreadable, or raise."""
        status = self._refresh()
        if self._next > self._youngest:
            return
        slot = self._slot_of(self._next)
        restarts = self._restarts
        fault = explain_fault(self._device, status, slot, self._next % ID_COUNT)
        if fault is None:
            return
        if self._oldest(self._refresh()) > self._next or self._restarts != restarts:
            return  # a writer was changing it
        if not self._device.is_current() and self._go_over():
            return  # the queue, or only its buffer, was removed
        if self._options.damaged == "fail":
            raise fault
        log.warning("%s: %s", self.url, fault)
        self._lose(self._next + 1, DropReason.DAMAGED)

    # --- waiting ----------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        self._sleeper.sleep(self._device.watchable(), seconds, self._is_idle)

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        self._longest_pause = self._sleeper.longest_pause
        try:
            return super()._wait_and_take(limit, timeout)
        finally:
            self._sleeper.stop_watching()

    def _is_idle(self) -> bool:
        """Tell whether the status is unchanged since the last read; cheap."""
        if not self._idle_status:
            return False
        if self._device.read_stat(0, STATUS_SIZE) != self._idle_status:
            return False
        now = time.monotonic()
        if now - self._looked_at_path > _LOOK_AT_PATH:
            self._looked_at_path = now
            self._follow_path()
        return bool(self._idle_status)

    def _rest(self) -> None:
        """Remember the status, now that everything is read."""
        status = self._status
        if status.blocking_write and self._options.trace:
            self._progress.insist(self._device, status)
        self._idle_status = status.encode()

    def _idle(self) -> bool:
        self._follow_path()
        return True

    def _follow_path(self) -> None:
        """Switch to the queue that the path names, if it is another one.

        Unread messages of the removed queue are read first.
        """
        if not self._device.is_current() and not self._has_more():
            self._go_over()

    def _go_over(self) -> bool:
        """Switch to the queue that the path names; unread messages of the old one are lost."""
        try:
            fresh, status = open_to_read(self._path, 0)
        except NotFound:
            return False
        self._sleeper.stop_watching()
        self._device.close()
        self._device = fresh
        self._restart(status)
        return True

    def _has_more(self) -> bool:
        """Tell whether the open queue has unread messages."""
        try:
            self._refresh()
        except (DamagedQueue, OSError):
            return False
        if self._next > self._youngest:
            return False
        self._idle_status = b""
        return True

    # --- counters and closing ---------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        # With a filter, messages between those of `_ready` are not counted yet, either.
        filtering = self._options.type is not None
        held = 0
        if self._ready:
            held = self._copied_to - self._ready[-1].seq if filtering else len(self._ready)
        self._losses.tell()
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._losses.total,
            filtered=self._filtered,
            restarts=self._restarts,
            next_seq=self._position(),
            backlog=max(0, self._youngest + 1 - self._next) + held,
            losses=self._losses.ranges(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.url} was closed")

    def __del__(self) -> None:
        # An unclosed reader should not leak descriptors.
        if not getattr(self, "_closed", True):
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._losses.tell(at_once=True)
            self._ready.clear()
            self._sleeper.close()
            self._device.close()


# --- positions ----------------------------------------------------------------------------------

#: Columns of the slot table.
_ID: Final = Slot._fields.index("id")
_TIME: Final = Slot._fields.index("time")


def _oldest_seq(device: Device, status: Status, youngest: int) -> int:
    """Return the number of the oldest message, or of the next one if the queue is empty.

    Slots that a writer, alive or dead, has freed or reused without updating the status are skipped.
    A damaged slot is not: the caller must report it.
    """
    oldest = youngest - live_span(status) + 1
    for age, (_, slot) in enumerate(live_slots(device, status)):
        if not slot_is_passed_on(slot, (oldest + age) % ID_COUNT, status.nslots):
            return oldest + age
    return youngest + 1


def _first_seq_at(device: Device, status: Status, youngest: int, second: int) -> int:
    """Return the first message at `second` or later, or the number of the next one."""
    # Slots store whole seconds: start with the first message of that second. Times need not
    # be in order: a writer may set them.
    slots, is_theirs = live_table(device, status)
    late_enough = is_theirs & (slots[:, _TIME] >= second)
    if not late_enough.any():
        return youngest + 1
    return youngest - live_span(status) + 1 + int(late_enough.argmax())


def _seq_of_id(device: Device, status: Status, youngest: int, id: int) -> int | None:
    """Return the number of the message with this LROSE id, or None."""
    slots, is_theirs = live_table(device, status)
    matches = is_theirs & (slots[:, _ID] == id)
    if not matches.any():
        return None
    return youngest - live_span(status) + 1 + int(matches.argmax())


# --- recreation ---------------------------------------------------------------------------------

#: The number of a message that was read, and the bytes of its slot.
_LastSlot: TypeAlias = tuple[int, bytes]


def _is_another_queue(
    device: Device, status: Status, known: Status, youngest: int, last_slot: _LastSlot | None
) -> bool:
    """Tell whether a status belongs to another queue than the known one.

    `youngest` is the youngest message of the known queue. If sizes and ids are inconclusive,
    compare the slot of the message that was read last: another message may have the same id.
    """
    if (status.nslots, status.buf_size) != (known.nslots, known.buf_size):
        return True
    if youngest >= 0 and (status.youngest_id < 0 or id_distance(status.youngest_id, youngest) < 0):
        return True
    if last_slot is None:
        return False
    seq, seen = last_slot
    age = id_distance(status.youngest_id, seq % ID_COUNT)
    if not 0 <= age < live_span(status):
        return False
    now = device.read_slots((status.youngest_slot - age) % status.nslots, 1, status.nslots)
    if len(now) != SLOT_SIZE or now[:8] != seen[:8] or now == seen:
        return False
    # A valid checksum: not merely a slot that a writer is changing.
    return bool(slot_checksums_hold(decode_slots(now)))


# --- progress (docs/specs/lrose.md 1.9, 1.10) ---------------------------------------------------


#: Reports remembered, to detect that a writer restored an older one.
_REMEMBERED = 8


class _Progress:
    """Stores the id of the last message read in the status of the queue."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._reports: deque[int] = deque(maxlen=_REMEMBERED)
        self._may_report = True

    def forget(self) -> None:
        """Reset, for another queue."""
        self._reports.clear()

    def report(self, device: Device, status: Status, seq: int) -> None:
        """Report that all messages up to `seq` were read, unless that was reported last."""
        id = seq % ID_COUNT
        if seq >= 0 and not (self._reports and self._reports[-1] == id):
            self._write(device, status, id)

    def insist(self, device: Device, status: Status) -> None:
        """Report again if a concurrent status write of a writer restored an older report."""
        reports = list(self._reports)
        if reports and status.last_id_read in reports[:-1]:
            self._write(device, status, reports[-1])

    def _write(self, device: Device, status: Status, id: int) -> None:
        if not self._may_report:
            return
        if not self._reports:
            self._reports.append(status.last_id_read)  # which a writer may restore
        try:
            device.report_last_id_read(id)
        except OSError as error:
            self._may_report = False
            log.warning(
                "%s: its writer waits for a reader, and this one may not tell it: %s",
                self._url,
                error.strerror,
            )
            return
        if self._reports[-1] != id:
            self._reports.append(id)
