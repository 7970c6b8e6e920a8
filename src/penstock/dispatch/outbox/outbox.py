"""How does a receiver's queue outlive everything, and what comes next in it?"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import Closed, InvalidOption, MessageTooLarge, PenstockError
from penstock.core.interfaces import Closable
from penstock.dispatch.outbox.backlog import BacklogOptions
from penstock.dispatch.outbox.log import CLASSES, OVERHEAD, Columns, Entry, Item, encode, key_of
from penstock.dispatch.outbox.state import Reason
from penstock.dispatch.outbox.store import Store, look_after
from penstock.dispatch.outbox.window import in_order_of_arrival, in_order_of_priority
from penstock.queue.storage import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.outbox.backlog import Backlog, Latest
    from penstock.dispatch.outbox.log import FirstMessages
    from penstock.queue.options import Sync

__all__ = [
    "Appended",
    "Limits",
    "Order",
    "Outbox",
    "OutboxBooks",
    "make_room",
]

log = logging.getLogger(__name__)


class OutboxBooks(NamedTuple):
    """Counters of an outbox. `stored` is always the sum of all others, also after a crash."""

    #: Messages stored since the outbox was created.
    stored: int
    #: Settled messages by `Reason`.
    acked: int
    expired: int
    queue_full: int
    permanent: int
    admin: int
    gone: int
    superseded: int
    damaged: int
    #: Messages not settled: waiting or in flight.
    queued: int

    @property
    def settled(self) -> int:
        return self.stored - self.queued


class Limits(NamedTuple):
    """Capacity of an outbox."""

    messages: int
    bytes: int


def make_room(
    backlog: Backlog, entry: Entry, limits: Limits, superseded: Sequence[Latest]
) -> list[Item] | None:
    """Evict waiting messages of lower classes to make room for `entry`; return them.

    The lowest class goes first, and in it the oldest message. Messages in flight stay, and so do
    those of `superseded`, whose own room counts as free. Return None, and evict nothing, if all of
    them together would not free enough.
    """
    messages, size = backlog.held()
    messages += 1 - limits.messages
    size += len(entry.raw) - limits.bytes
    lower = [lane for lane in backlog if lane.priority < entry.priority]
    leaves = leaves_size = 0
    for old in superseded:
        messages -= 1
        size -= old.size
        if backlog.lane_of(old.seq) in lower:
            leaves += 1
            leaves_size += old.size
    kept = {old.seq for old in superseded}
    if messages <= 0 and size <= 0:
        return []
    if messages > sum(lane.waiting for lane in lower) - leaves:
        return None
    if size > 0 and size > sum(lane.waiting_bytes for lane in lower) - leaves_size:
        return None
    evicted: list[Item] = []
    for lane in lower:
        victims: list[Item] = []
        for item in lane.window.available((), 1):
            if messages <= 0 and size <= 0:
                break
            if item.seq in kept:
                continue
            victims.append(item)
            messages -= 1
            size -= len(item.raw)
        backlog.leave(victims)
        evicted += victims
    return evicted


Order = Literal["arrival", "priority"]

#: Upkeep interval (seconds) if `sync` is not a time.
_BETWEEN_UPKEEP: Final = 1.0
#: Upkeep reads up to `_PREPARED` blocks that expire within `_SOON_MS` milliseconds.
_SOON_MS: Final = 3000
_PREPARED: Final = 16


class Appended(NamedTuple):
    """Result of an append."""

    #: How many messages were stored.
    stored: int
    #: Queued messages of lower classes, evicted to make room.
    evicted: list[Item]
    #: Messages rejected for lack of room.
    refused: list[Entry]
    #: How many queued messages were superseded.
    superseded: int = 0


class Outbox(Closable):
    """The durable queue of one receiver. Safe to share between threads.

    A message is stored when `append` returns: it then survives a crash of the process and, once
    synced (`sync`), a power failure. It stays queued until it is settled. After a restart,
    unsettled messages are redelivered.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_messages: int = 1_000_000,
        max_bytes: int = 2 << 30,
        sync: Sync = 1.0,
        segment: int = 16 << 20,
        window: int = 16384,
        window_bytes: int = 16 << 20,
        starvation: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        lock_timeout: float = 5.0,
        first: FirstMessages | None = None,
    ) -> None:
        """Open the outbox, or create it.

        :param first: the messages of an outbox without files; the files are created later
        :raises LockTimeout: another process has the outbox open.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: its log cannot be read.
        """
        for name, value in {"max_messages": max_messages, "max_bytes": max_bytes}.items():
            if value < 1:
                raise InvalidOption(name, value, "must be at least 1")
        self.folder = Path(folder)
        self._limits = Limits(max_messages, max_bytes)
        self._largest = segment - OVERHEAD
        self._starvation, self._clock = starvation, clock
        #: Messages of higher classes taken since one of the lowest.
        self._passed = 0
        self._lock = threading.Lock()
        #: Held while writing to the disk. Lock order: `_upkeep` before `_lock`.
        self._upkeep = threading.Lock()
        if not isinstance(sync, str):
            sync = float(sync) or "batch"
        options = BacklogOptions(segment, sync, window, window_bytes)
        self._store = Store(self.folder, options, lock_timeout, first)
        self._backlog = self._store.backlog
        self._state = self._store.state
        self._is_closed = False
        try:
            look_after(self, sync if isinstance(sync, float) else _BETWEEN_UPKEEP)
        except RuntimeError as error:
            self.close()
            raise no_thread(str(self.folder)) from error

    # --- in -------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry] | Columns, *, settle: bool = True) -> Appended:
        """Store messages; return when they are stored.

        A full outbox evicts waiting messages of lower classes: the lowest class first, and in it
        the oldest. They are settled as QUEUE_FULL. With `settle=False` they are in flight instead,
        and the caller settles them after writing their dead letters.

        :raises MessageTooLarge: a message does not fit in a segment; none was stored.
        :raises StorageError: the disk is full; some of the messages may be stored.
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
            messages, size = self._backlog.held()
            size += sum(map(len, columns.raws))
            if messages + count <= self._limits.messages and size <= self._limits.bytes:
                self._append(columns)
                return Appended(count, [], [])
            return self._append_crowded(columns.entries(), settle=settle)

    def _check(self, columns: Columns) -> None:
        """Check the classes and sizes of messages."""
        for priority in set(columns.priorities):
            if not 0 <= priority < CLASSES:
                raise ValueError(f"class {priority}; there are 0 to {CLASSES - 1}")
        if (size := max(map(len, columns.raws))) > self._largest:
            hint = "open the outbox with larger segments"
            raise MessageTooLarge(size, self._largest, hint=hint)

    def append_latest(
        self, key: int | bytes, entry: Entry, most: int = 1, *, settle: bool = True
    ) -> Appended:
        """Store a message; it supersedes the oldest of its key that wait, so that `most` wait.

        Otherwise like `append`.
        """
        number = key_of(key)
        self._check(Columns.of([entry]))
        with self._lock:
            self._check_open()
            old = self._backlog.in_the_way(number, most)
            # Store the new one first: a crash in between leaves all, not none.
            done = self._append_crowded([entry], number, old, settle=settle)
            if not old or not done.stored:
                return done
            count = self._backlog.supersede(old)
            self._keep_floor()
            return done._replace(superseded=count)

    def _append_crowded(
        self,
        entries: Sequence[Entry],
        key: int | None = None,
        superseded: Sequence[Latest] = (),
        *,
        settle: bool,
    ) -> Appended:
        evicted: list[Item] = []
        refused: list[Entry] = []
        try:
            for entry in entries:
                room = make_room(self._backlog, entry, self._limits, superseded)
                if room is None:
                    refused.append(entry)
                else:
                    evicted += room
                    self._append(Columns.of([entry]), key)
        except BaseException:
            self._backlog.give_back(evicted)
            raise
        if settle:
            self._settle(evicted, Reason.QUEUE_FULL)
        return Appended(len(entries) - len(refused), evicted, refused)

    def _append(self, columns: Columns, key: int | None = None) -> None:
        """Append messages; return when they are stored.

        :raises ValueError: a number is out of range; none is stored.
        :raises StorageError: the disk is full; some may be stored.
        """
        now_ms = self._clock.now_ns() // 1_000_000
        columns = columns._replace(arrivals=self._numbered(columns.arrivals))
        records = encode(columns, now_ms, key)
        first = self._store.first
        if first is not None and not first.has_room(sum(map(len, records))):
            self._store.make()
        try:
            self._backlog.append(columns, records, now_ms, key)
        finally:
            self._state.keep()

    def _numbered(self, arrivals: Sequence[int]) -> Sequence[int]:
        """Assign arrival numbers where they are 0."""
        last = self._state.last_arrival
        if not any(arrivals):
            arrivals = range(last + 1, last + 1 + len(arrivals))
            last = arrivals[-1]
        elif all(arrivals):
            last = max(last, *arrivals)
        else:
            given, arrivals = arrivals, []
            for number in given:
                arrivals.append(number or last + 1)
                last = max(last, arrivals[-1])
        self._state.last_arrival = last
        return arrivals

    # --- out ------------------------------------------------------------------------------------

    def take(
        self,
        limit: int = 256,
        max_bytes: int | None = None,
        order: Order = "arrival",
        blocked: Collection[int] = frozenset(),
    ) -> list[Item]:
        """Return the next messages; they are in flight until settled or returned by `give_back`.

        The first message may exceed `max_bytes`. Messages of `blocked` sources are skipped.
        """
        with self._lock:
            self._check_open()
            lanes = [lane for lane in self._backlog if lane.waiting]
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
        """Requeue messages in flight at their old positions."""
        with self._lock:
            self._check_open()
            self._backlog.give_back(list(items))

    def settle(self, items: Iterable[Item], reason: Reason) -> int:
        """Settle messages, in any order, in flight or not; return how many were not settled yet.

        :raises Closed: the outbox was closed.
        """
        with self._lock:
            self._check_open()
            return self._settle(items, reason)

    def _settle(self, items: Iterable[Item], reason: Reason) -> int:
        items = list(items)
        if not items:
            return 0
        count = self._backlog.settle(items, reason)
        self._keep_floor()
        return count

    def _keep_floor(self) -> None:
        """Save the floor, so that it survives the process."""
        self._backlog.save_floor(self._state)
        self._state.keep()

    # --- expiry ---------------------------------------------------------------------------------

    def next_expiry_ms(self) -> int | None:
        """Return a lower bound of the next expiry, or None if no message expires."""
        with self._lock:
            self._check_open()
            return self._backlog.next_expiry_ms()

    def expire(self, now_ms: int, *, settle: bool = True, enough: int = sys.maxsize) -> list[Item]:
        """Settle the expired messages, except those in flight, and return them.

        It stops after about `enough` messages; `next_expiry_ms` is then still in the past.

        With `settle=False` they are in flight instead: the caller settles them as EXPIRED after
        writing their dead letters, so that a crash in between loses none.
        """
        with self._lock:
            self._check_open()
            found = self._backlog.expired(now_ms, enough)
            found.sort(key=lambda item: item.seq)
            self._backlog.leave(found)
            if settle:
                self._settle(found, Reason.EXPIRED)
            return found

    # --- for people -----------------------------------------------------------------------------

    def look(self, start: int = 0, limit: int = 256) -> tuple[list[Item], int | None]:
        """Return unsettled messages from `start` on, and where to continue; None at the end.

        They are not taken. An operator drops them by passing them to `settle`.
        """
        with self._lock:
            self._check_open()
            items, at = self._backlog.look(start, limit)
            return items, at if at < self._backlog.log.head else None

    def books(self) -> OutboxBooks:
        with self._lock:
            return self._books()

    def _books(self) -> OutboxBooks:
        marks = self._backlog.marks
        counts = {reason.name.lower(): marks.count(reason) for reason in Reason}
        queued = self._backlog.queued
        return OutboxBooks(stored=sum(counts.values()) + queued, queued=queued, **counts)

    @property
    def findings(self) -> list[str]:
        """Faults found in the files, and how each was handled."""
        with self._lock:
            return self._store.findings

    @property
    def last_arrival(self) -> int:
        """The largest arrival number so far, including before a restart."""
        with self._lock:
            self._check_open()
            return self._state.last_arrival

    @property
    def queued(self) -> int:
        """Number of unsettled messages."""
        with self._lock:
            return self._backlog.queued

    @property
    def waiting(self) -> int:
        """Number of unsettled messages not in flight."""
        with self._lock:
            return self._backlog.waiting

    @property
    def size(self) -> int:
        """Bytes of the unsettled messages."""
        with self._lock:
            return self._backlog.size

    # --- upkeep ---------------------------------------------------------------------------------

    def tend(self) -> None:
        """Sync the files and free settled segments. The upkeep thread calls this periodically.

        :raises StorageError: the device refuses.
        """
        with self._upkeep:
            with self._lock:
                if self._is_closed:
                    return
                is_new = self._store.is_to_be_made
                if is_new:
                    self._store.make()
                if self._store.first is not None:
                    return
                notes = self._store.new_notes()
                floor = self._backlog.marks.floor
            self._store.bring_to_disk()
            # After the sync: a power failure may take back the floor, never to a removed segment.
            self._backlog.log.free(floor)
            with self._lock:
                self._store.rest(at_once=is_new)
            self._prepare()
            # Last: this fails on a full disk, and the steps before it free space.
            if notes is not None:
                self._store.save_notes(notes)

    def _prepare(self) -> None:
        """Read the blocks that expire soon, so that `expire` need not wait for the disk."""
        until_ms = self._clock.now_ns() // 1_000_000 + _SOON_MS
        for _ in range(_PREPARED):
            with self._lock:
                if not self._backlog.prepare(until_ms):
                    break

    def close(self) -> None:
        """Sync and close the files. Messages in flight are redelivered. Idempotent.

        :raises StorageError: the device refuses.
        """
        with self._upkeep, self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._store.close()

    def close_if_empty(self, remove: Callable[[OutboxBooks], None]) -> bool:
        """Close the outbox for good unless a message is queued; tell whether it was closed.

        Nothing is synced: the caller removes the folder, and then calls `discard`.

        :param remove: called with the counters before it is closed; if it raises, it stays open
        """
        with self._upkeep, self._lock:
            if self._is_closed or self._backlog.queued:
                return False
            # What may fail comes first, and opens again on demand if `remove` fails.
            self._backlog.log.suspend()
            remove(self._books())
            self._is_closed = True
            try:
                self._store.let_go()
            except PenstockError:
                log.warning("%s, which is removed, was not closed well", self.folder, exc_info=True)
            return True

    def discard(self) -> None:
        """Drop its entries in the common log, after the folder was removed."""
        self._store.discard()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_to_be_made(self) -> bool:
        """Whether `tend` has to create its files first."""
        return self._store.is_to_be_made

    @property
    def is_busy(self) -> bool:
        """Whether another call holds the lock now."""
        return self._lock.locked()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the outbox {self.folder} was closed")
