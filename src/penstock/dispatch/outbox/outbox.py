"""How does a receiver's queue outlive everything, and what comes next in it?"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.closing import Closable
from penstock.core.errors import Closed, InvalidOption, MessageTooLarge
from penstock.dispatch.outbox.books import OutboxBooks
from penstock.dispatch.outbox.choosing import in_order_of_arrival, in_order_of_priority
from penstock.dispatch.outbox.crowding import Limits, make_room
from penstock.dispatch.outbox.lane import LaneOptions
from penstock.dispatch.outbox.lanes import Lanes
from penstock.dispatch.outbox.records import CLASSES, OVERHEAD, Columns, Entry, Item, key_of
from penstock.dispatch.outbox.settled import Reason
from penstock.dispatch.outbox.upkeep import look_after

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.outbox.common_log import FirstMessages
    from penstock.dispatch.outbox.lane import Lane
    from penstock.dispatch.outbox.latest import Latest
    from penstock.queue.options import Sync

__all__ = ["Appended", "Order", "Outbox"]

Order = Literal["arrival", "priority"]

#: Without another time to sync after, upkeep is this often (seconds).
_BETWEEN_UPKEEP: Final = 1.0
#: At upkeep the blocks are read whose time comes within this (milliseconds), so many of a lane.
_SOON_MS: Final = 3000
_PREPARED: Final = 16


class Appended(NamedTuple):
    """What became of messages that were to be stored, and of others because of them."""

    #: How many of them were stored.
    stored: int
    #: Queued ones of lower classes that made room.
    evicted: list[Item]
    #: Those that there was no room for.
    refused: list[Entry]
    #: Queued ones that one of them took the place of.
    superseded: int = 0


class Outbox(Closable):
    """The durable queue of one receiver. Safe to share between threads.

    A message is stored when `append` returns: it then outlives this process, and with `sync` the
    machine. It stays queued until it is settled. What was not, comes again after a restart.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_messages: int = 1_000_000,
        max_bytes: int = 2 << 30,
        sync: Sync = 1.0,
        segment: int = 16 << 20,
        window: int = 4096,
        window_bytes: int = 8 << 20,
        starvation: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        lock_timeout: float = 5.0,
        first: FirstMessages | None = None,
    ) -> None:
        """Open it; make it if there is none.

        :param first: where the messages are of one that has no files, which are made later
        :raises LockTimeout: another process has it open.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: a log of it cannot be read.
        """
        for name, value in {"max_messages": max_messages, "max_bytes": max_bytes}.items():
            if value < 1:
                raise InvalidOption(name, value, "must be at least 1")
        self.folder = Path(folder)
        self._limits = Limits(max_messages, max_bytes)
        self._largest = segment - OVERHEAD
        self._starvation, self._clock = starvation, clock
        #: Messages of higher classes since one of the lowest.
        self._passed = 0
        self._lock = threading.Lock()
        #: Whoever brings things to the disk has it, and takes the other one in it if at all.
        self._upkeep = threading.Lock()
        if not isinstance(sync, str):
            sync = float(sync) or "batch"
        options = LaneOptions(segment, sync, window, window_bytes)
        self._lanes = Lanes(self.folder, options, lock_timeout, first)
        self._is_closed = False
        look_after(self, sync if isinstance(sync, float) else _BETWEEN_UPKEEP)

    # --- in -------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry] | Columns, *, settle: bool = True) -> Appended:
        """Store messages; return when they are.

        When there is no room, messages of lower classes make it: the lowest class first, the oldest
        first, none that is in flight. They are settled as QUEUE_FULL, unless `settle` is False:
        then they are in flight, and whoever calls settles them when the dead letters are written.

        :raises MessageTooLarge: one of them fits in no segment; none was stored.
        :raises StorageError: there is no space; of these messages, some may be stored.
        """
        if isinstance(entries, Columns):
            columns = entries
        elif given := list(entries):
            columns = Columns.of(given)
        else:
            return Appended(0, [], [])
        self._check(columns)
        count = len(columns.raws)
        with self._lock:
            self._check_open()
            messages, size = self._lanes.held()
            size += sum(map(len, columns.raws))
            if messages + count <= self._limits.messages and size <= self._limits.bytes:
                self._store(columns)
                return Appended(count, [], [])
            return self._append_crowded(columns.entries(), settle=settle)

    def _check(self, columns: Columns) -> None:
        """Make sure that messages can be stored."""
        for priority in set(columns.priorities):
            if not 0 <= priority < CLASSES:
                raise ValueError(f"class {priority}; there are 0 to {CLASSES - 1}")
        if (size := max(map(len, columns.raws))) > self._largest:
            hint = "open the outbox with larger segments"
            raise MessageTooLarge(size, self._largest, hint=hint)

    def append_latest(
        self, key: int | bytes, entry: Entry, most: int = 1, *, settle: bool = True
    ) -> Appended:
        """Store a message; if so many of the same key wait, in the place of the oldest of them.

        Everything else is as with `append`.
        """
        number = key_of(key)
        self._check(Columns.of([entry]))
        with self._lock:
            self._check_open()
            old = self._lanes.in_the_way(number, most)
            # The new one first: a crash between leaves both, not none.
            done = self._append_crowded([entry], number, old, settle=settle)
            if old is None or not done.stored:
                return done
            lane, last = old
            lane.supersede(last)
            self._lanes.note([lane])
            return done._replace(superseded=1)

    def _append_crowded(
        self,
        entries: Sequence[Entry],
        key: int | None = None,
        superseded: tuple[Lane, Latest] | None = None,
        *,
        settle: bool,
    ) -> Appended:
        evicted: list[Item] = []
        refused: list[Entry] = []
        try:
            for entry in entries:
                room = make_room(self._lanes, entry, self._limits, superseded)
                if room is None:
                    refused.append(entry)
                else:
                    evicted += room
                    self._store(Columns.of([entry]), key)
        except BaseException:
            for lane, own in self._by_lane(evicted):
                lane.give_back(own)
            raise
        if settle:
            self._settle(evicted, Reason.QUEUE_FULL)
        return Appended(len(entries) - len(refused), evicted, refused)

    def _store(self, columns: Columns, key: int | None = None) -> None:
        self._lanes.store(columns, self._clock.now_ns() // 1_000_000, key)

    # --- out ------------------------------------------------------------------------------------

    def take(
        self,
        limit: int = 256,
        max_bytes: int | None = None,
        order: Order = "arrival",
        blocked: Collection[int] = frozenset(),
    ) -> list[Item]:
        """Return the next messages, which then are in flight until they are settled or given back.

        The first may have more bytes than that. Sources that are `blocked` are passed over.
        """
        with self._lock:
            self._check_open()
            lanes = [lane for lane in self._lanes if lane.waiting]
            if not lanes or limit < 1:
                return []
            if order == "priority":
                items, self._passed = in_order_of_priority(
                    lanes, limit, max_bytes, blocked, self._passed, self._starvation
                )
            else:
                items = in_order_of_arrival(lanes, limit, max_bytes, blocked)
            return items

    def give_back(self, items: Iterable[Item]) -> None:
        """Let messages wait again that were not delivered, where they were."""
        with self._lock:
            self._check_open()
            for lane, own in self._by_lane(items):
                lane.give_back(own)

    def settle(self, items: Iterable[Item], reason: Reason) -> int:
        """Let messages be done with, in any order, in flight or not; return how many were not yet.

        :raises Closed: the outbox was closed.
        """
        with self._lock:
            self._check_open()
            return self._settle(items, reason)

    def _settle(self, items: Iterable[Item], reason: Reason) -> int:
        parts = self._by_lane(items)
        count = sum(lane.settle(own, reason) for lane, own in parts)
        if parts:
            self._lanes.note([lane for lane, _ in parts])
        return count

    def _by_lane(self, items: Iterable[Item]) -> list[tuple[Lane, Sequence[Item]]]:
        items = list(items)
        classes = {item[0] for item in items}
        parts: dict[int, Sequence[Item]] = dict.fromkeys(classes, items)
        if len(classes) > 1:
            parts = {each: [item for item in items if item[0] == each] for each in classes}
        lanes = ((self._lanes.of(priority), own) for priority, own in parts.items())
        return [(lane, own) for lane, own in lanes if lane is not None]

    # --- expiry ---------------------------------------------------------------------------------

    def next_expiry_ms(self) -> int | None:
        """Return when `expire` may have something to do; not later than that."""
        with self._lock:
            self._check_open()
            times = [lane.next_expiry_ms() for lane in self._lanes]
            return min((ms for ms in times if ms is not None), default=None)

    def expire(self, now_ms: int, *, settle: bool = True, enough: int = sys.maxsize) -> list[Item]:
        """Return the messages whose time is over, except those in flight; they are settled.

        Where there are enough of them, some may be left: then `next_expiry_ms` is past.

        With `settle=False` they are in flight instead: whoever calls settles them as EXPIRED when
        the dead letters are written, so that a crash between the two loses none.
        """
        with self._lock:
            self._check_open()
            found: list[Item] = []
            for lane in self._lanes:
                due = lane.expired(now_ms, enough - len(found))
                due.sort(key=lambda item: item.seq)
                lane.leave(due)
                found += due
            if settle:
                self._settle(found, Reason.EXPIRED)
            return found

    # --- for people -----------------------------------------------------------------------------

    def look(
        self, priority: int, start: int = 0, limit: int = 256
    ) -> tuple[list[Item], int | None]:
        """Return messages of a class that are not settled, and where to go on; None: that is all.

        They are not taken. `settle` takes them too: those that a person wants to be dropped.
        """
        with self._lock:
            self._check_open()
            lane = self._lanes.of(priority)
            if lane is None:
                return [], None
            items, at = lane.look(start, limit)
            return items, at if at < lane.head else None

    def books(self) -> OutboxBooks:
        with self._lock:
            settled = [lane.settled for lane in self._lanes]
            counts = {
                reason.name.lower(): sum(each.count(reason) for each in settled)
                for reason in Reason
            }
            queued = sum(lane.queued for lane in self._lanes)
            return OutboxBooks(stored=sum(counts.values()) + queued, queued=queued, **counts)

    @property
    def findings(self) -> list[str]:
        """What was wrong with the files, and what was done about it."""
        with self._lock:
            return self._lanes.findings

    @property
    def last_arrival(self) -> int:
        """The largest arrival number up to now, also before a restart."""
        with self._lock:
            self._check_open()
            return self._lanes.last_arrival

    @property
    def queued(self) -> int:
        """Messages that are not settled."""
        with self._lock:
            return sum(lane.queued for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Messages that are not settled, and not in flight."""
        with self._lock:
            return sum(lane.waiting for lane in self._lanes)

    @property
    def size(self) -> int:
        """Bytes of the messages that are not settled."""
        with self._lock:
            return sum(lane.bytes for lane in self._lanes)

    # --- upkeep ---------------------------------------------------------------------------------

    def tend(self) -> None:
        """Bring everything to the disk, and give back what is free. It is called once a second.

        :raises StorageError: the device refuses.
        """
        with self._upkeep:
            with self._lock:
                if self._is_closed:
                    return
                is_new = self._lanes.is_to_be_made
                if is_new:
                    self._lanes.make()
                if not self._lanes.is_made:
                    return
                lanes = list(self._lanes)
                notes = self._lanes.new_notes()
                floors = [lane.settled.floor for lane in lanes]
            self._lanes.bring_to_disk(lanes)
            # Only now: a floor that is lost with the machine must not be in a segment that is gone.
            for lane, floor in zip(lanes, floors, strict=True):
                lane.log.free(floor)
            with self._lock:
                self._lanes.rest(at_once=is_new)
            self._prepare(lanes)
            # Last, since a disk that is full refuses this, and gets room by what was before.
            if notes is not None:
                self._lanes.save_notes(notes)

    def _prepare(self, lanes: Sequence[Lane]) -> None:
        """Read what will expire soon, so that it does in time."""
        until_ms = self._clock.now_ns() // 1_000_000 + _SOON_MS
        for lane in lanes:
            for _ in range(_PREPARED):
                with self._lock:
                    if not lane.prepare(until_ms):
                        break

    def close(self) -> None:
        """Bring everything to the disk, and let go. What is in flight comes again.

        :raises StorageError: the device refuses.
        """
        with self._upkeep, self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._lanes.close()

    def close_if_empty(self) -> bool:
        """Close it for good, unless something is queued; tell whether it is closed.

        Nothing is brought to the disk: whoever calls removes the folder, and calls `discard`.
        """
        with self._upkeep, self._lock:
            if not self._is_closed and not any(lane.queued for lane in self._lanes):
                self._is_closed = True
                self._lanes.let_go()
            return self._is_closed

    def discard(self) -> None:
        """Hear that the folder is removed, and nothing of it needed any more."""
        self._lanes.discard()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_to_be_made(self) -> bool:
        """Whether `tend` has to make its files first."""
        return self._lanes.is_to_be_made

    @property
    def is_busy(self) -> bool:
        """Whether somebody works with it just now, so that any other call has to wait."""
        return self._lock.locked()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the outbox {self.folder} was closed")
