"""How are messages read from a classic queue, in order and without a silent gap?"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.batch import Batch, batch_from_messages
from penstock.core.capabilities import Replayable
from penstock.core.errors import Closed, DamagedQueue, NotFound, PositionError
from penstock.core.interfaces import Bounds, Reader
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.statistics import Loss, ReaderStatistics
from penstock.queue.classic.copying import Run, copy_run, explain_fault
from penstock.queue.classic.layout import ID_COUNT, STATUS_SIZE, unwrap
from penstock.queue.classic.opening import open_to_read
from penstock.queue.classic.options import CANNOT_CARRY
from penstock.queue.classic.places import first_seq_at, oldest_seq, seq_of_id
from penstock.queue.classic.progress import Progress
from penstock.queue.classic.recreation import LastSlot, is_another_queue
from penstock.queue.classic.slots import youngest_seq
from penstock.queue.classic.status import PATIENCE, NotYetMade, check_sizes, read_status
from penstock.queue.classic.watch import Sleeper
from penstock.queue.losses import LoggedLosses
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.queue.classic.layout import Status
    from penstock.queue.classic.options import ClassicOptions

__all__ = ["ClassicReader"]

log = logging.getLogger(__name__)

#: Messages copied ahead of a caller that asks for one at a time.
_READ_AHEAD = 256
#: Messages copied at a time at most.
_LARGEST_RUN = 4096
#: While nothing comes, look this often (seconds) whether the path means another queue by now.
_LOOK_AT_PATH = 0.25


class ClassicReader(Replayable, Reader):
    """Reads an LROSE queue while others, LROSE's programs among them, write to it."""

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
        self._ready: deque[Message] = deque()
        #: With a filter: of the run that `_ready` is from, what is in the books, and its end.
        self._booked_to = self._copied_to = 0
        self._progress = Progress(url)
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

    # --- where it stands --------------------------------------------------------------------

    def _meet(self, status: Status) -> None:
        """Take a queue as new: number its messages from its own ids."""
        self._status = status
        self._youngest = youngest_seq(status)
        self._next = 0
        self._last_slot: LastSlot | None = None
        self._idle_status = b""
        self._progress.forget()

    def _refresh(self) -> Status:
        """Read the status, and notice a queue that was created anew meanwhile."""
        status = read_status(self._device)
        if is_another_queue(self._device, status, self._status, self._youngest, self._last_slot):
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
        self._losses.add(Loss(self._next, next_seq - 1, reason))
        self._next = next_seq

    def _slot_of(self, seq: int) -> int:
        """Ids and slots advance together, one a message (spec lrose 1.7)."""
        return (self._status.youngest_slot - (self._youngest - seq)) % self._status.nslots

    def _oldest(self, status: Status) -> int:
        """Return the oldest message there; the one to come if there is none."""
        return oldest_seq(self._device, status, self._youngest)

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        place = Position.of(position)
        with storage_errors("reading", self._path):
            if not self._device.is_current():
                here, self._next = self._next, self._youngest + 1  # who seeks leaves the unread
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
                    target = first_seq_at(
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
        """Find a number given by an earlier reader, which may have counted more rounds of ids."""
        if seq <= self._youngest + 1:
            return seq
        rounds = -(-(seq - 1 - self._youngest) // ID_COUNT)
        youngest = self._youngest + rounds * ID_COUNT
        if youngest - seq > ID_COUNT // 2:  # rather a number that is not there yet
            raise PositionError(
                f"{self.url} has no message {seq} yet: the youngest is {self._youngest}",
                hint="use end to wait for the next message",
            )
        self._youngest = youngest
        return seq

    def seek_back(self, messages: int = 1) -> None:
        """Step back, so that the last message(s) are read again; not past the oldest."""
        self._check_open()
        oldest = self._oldest(self._refresh())
        self._stand_at(max(self._position() - messages, min(oldest, self._position())))

    def seek_after_id(self, id: int) -> None:
        """Stand behind the message with this LROSE id.

        :raises PositionError: it is not in the queue.
        """
        self._check_open()
        status = self._refresh()
        seq = seq_of_id(self._device, status, self._youngest, id)
        if seq is None:
            raise PositionError(f"{self.url} holds no message with id {id}")
        self._stand_at(seq + 1)

    def _position(self) -> int:
        return self._ready[0].seq if self._ready else self._next

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
        # The format has no epoch; a queue that is created anew is told by its numbers.
        return Bounds(0, oldest, self._youngest + 1)

    # --- reading ----------------------------------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._check_open()
        ready = self._ready
        if ready:
            messages = [ready.popleft() for _ in range(min(limit, len(ready)))]
        else:
            messages = self._fetch(max(limit, _READ_AHEAD))
            ready.extend(messages[limit:])
            del messages[limit:]
        if messages:
            self._delivered(len(messages), sum([len(m.payload) for m in messages]))
        elif self._status.blocking_write:
            self._report()  # past what was filtered or lost
        return messages

    def read(self, timeout: float | None = None) -> Message | None:
        ready = self._ready
        if ready and self._options.type is None and not self._status.blocking_write:
            message = ready.popleft()
            self._messages += 1
            self._bytes += len(message.payload)
            return message
        return super().read(timeout)

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        self._check_open()
        if not self._ready and self._options.type is None and n > 0:
            run = self._fetch_run(n)
            if run and not run.is_compressed:
                first = self._next
                self._next += len(run.starts)
                self._delivered(len(run.starts), run.payload_bytes)
                return run.batch(first)
        return batch_from_messages(self.read_many(n, timeout))

    def _delivered(self, count: int, size: int) -> None:
        self._messages += count
        self._bytes += size
        if self._options.type is not None:
            # Those of other types up to the next one of ours.
            reached = self._ready[0].seq if self._ready else self._copied_to
            self._filtered += reached - self._booked_to - count
            self._booked_to = reached
        if self._status.blocking_write:
            self._report()

    def _report(self, seq: int | None = None) -> None:
        """Let the writer go on behind this message, or else behind all that was delivered."""
        if self._options.trace:
            reached = self._position() - 1 if seq is None else seq
            self._progress.report(self._device, self._status, reached)

    def _fetch(self, limit: int) -> list[Message]:
        """Return messages that pass the filter, up to what is there now."""
        wanted = self._options.type
        stop_after: int | None = None
        while True:
            run = self._fetch_run(limit)
            if not run:
                return []
            messages = run.messages(self._next)
            if not messages:
                self._skip_or_raise()
                continue
            self._next += len(messages)
            if wanted is None:
                return messages
            chosen = [message for message in messages if message.type == wanted]
            if chosen:
                self._booked_to, self._copied_to = messages[0].seq, self._next
                return chosen
            self._filtered += len(messages)
            if stop_after is None:
                stop_after = self._youngest
            if self._next > stop_after:
                return []

    def _fetch_run(self, limit: int) -> Run | None:
        """Copy the messages from here on; count those that are gone. None: nothing new."""
        with storage_errors("reading", self._path):
            if self._is_idle():
                return None
            deadline: float | None = None
            while True:
                try:
                    status = self._refresh()
                except NotYetMade:  # somebody creates it anew
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
        """Deal with a message that is there and stays unreadable."""
        status = self._refresh()
        if self._next > self._youngest:
            return
        slot = self._slot_of(self._next)
        restarts = self._restarts
        fault = explain_fault(self._device, status, slot, self._next % ID_COUNT)
        if fault is None:
            return
        if self._oldest(self._refresh()) > self._next or self._restarts != restarts:
            return  # a writer was at work on it
        if not self._device.is_current() and self._go_over():
            return  # it was removed, or only its buffer was
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
        """Tell cheaply that nothing happened since the last look."""
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
        """Everything is read: remember how the status looks."""
        status = self._status
        if status.blocking_write and self._options.trace:
            self._progress.insist(self._device, status)
        self._idle_status = status.encode()

    def _idle(self) -> bool:
        self._follow_path()
        return True

    def _follow_path(self) -> None:
        """Go over to the queue that the path means, if it is another one by now.

        What is left in the one that was removed is read first.
        """
        if not self._device.is_current() and not self._has_more():
            self._go_over()

    def _go_over(self) -> bool:
        """Open the queue that the path means; what is unread of the other one is lost."""
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
        """Tell whether there is something to read in the queue that is open."""
        try:
            self._refresh()
        except (DamagedQueue, OSError):
            return False
        if self._next > self._youngest:
            return False
        self._idle_status = b""
        return True

    # --- the rest ---------------------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        # With a filter, those that `_ready` skips are not looked at yet either.
        filtering = self._options.type is not None
        held = 0
        if self._ready:
            held = self._copied_to - self._ready[0].seq if filtering else len(self._ready)
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
        # Who forgets to close should not run out of files.
        if not getattr(self, "_closed", True):
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ready.clear()
            self._sleeper.close()
            self._device.close()
