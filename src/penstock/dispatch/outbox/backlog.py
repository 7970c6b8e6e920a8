"""Which messages wait for a receiver, by priority, and how are they taken and settled?"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.dispatch.outbox.log import CLASSES, OutboxLog, decode, items_of
from penstock.dispatch.outbox.state import (
    BLOCK,
    UNKNOWN,
    Contents,
    Notes,
    Reason,
    where_to_go_on,
)
from penstock.dispatch.outbox.window import Lane
from penstock.queue.groups.settled import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.dispatch.outbox.log import Columns, FirstMessages, Item
    from penstock.dispatch.outbox.state import Floor, StateFile
    from penstock.dispatch.outbox.window import Window
    from penstock.queue.options import Sync

__all__ = ["NEVER", "Backlog", "BacklogOptions", "Expiries", "Keyed", "Latest", "Times"]

log = logging.getLogger(__name__)

#: Number of stale keys from which they are removed.
_TOO_MANY: Final = 1024


class Latest(NamedTuple):
    """A message with a key."""

    arrival: int
    seq: int
    #: Bytes of the message.
    size: int


class Keyed:
    """The known messages of each key that may still be queued."""

    def __init__(self) -> None:
        self._of_key: dict[int, list[Latest]] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def add(self, key: int, message: Latest) -> None:
        """Add a message; it may be known already."""
        known = self._of_key.setdefault(key, [])
        if message not in known[-1:]:
            insort(known, message)

    def oldest_above(
        self,
        key: int,
        most: int,
        is_queued: Callable[[Latest], bool],
        is_waiting: Callable[[Latest], bool],
    ) -> list[Latest]:
        """Return the oldest waiting messages of a key: all but the newest `most - 1`."""
        known = self._of_key.get(key)
        if known is None or len(known) < most:
            return []
        known[:] = [message for message in dict.fromkeys(known) if is_queued(message)]
        waiting = [message for message in known if is_waiting(message)]
        return waiting[: max(0, len(waiting) - most + 1)]

    def tidy(self, queued: int, is_queued: Callable[[Latest], bool]) -> None:
        """Remove keys without queued messages, if there are many."""
        if len(self._of_key) > 2 * queued + _TOO_MANY:
            self._of_key = {
                key: known for key, known in self._of_key.items() if any(map(is_queued, known))
            }


#: The expiry times of one block, by message.
Times: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

#: Number of blocks up to which all times of a new block are kept.
_MOST_KNOWN: Final = 1024

#: Later than any time.
NEVER: Final = (1 << 64) - 1


class Expiries:
    """The earliest expiry time of every block, and all times of some blocks.

    All times are kept of blocks that were due once, and of up to `_MOST_KNOWN` others.
    """

    def __init__(self) -> None:
        #: Lower bound by block; NEVER if no message of the block expires.
        self.least: dict[int, int] = {}
        self._times: dict[int, Times] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, first: int, times: Sequence[int]) -> None:
        """Add the times (0: never) of consecutive messages."""
        if not any(times) and first // BLOCK in self.least and first % BLOCK + len(times) <= BLOCK:
            return  # the common case: none expires, and the block is known
        at = 0
        while at < len(times):
            block, start = divmod(first + at, BLOCK)
            part = times[at : at + BLOCK - start]
            at += len(part)
            least = min(part) or min((ms for ms in part if ms), default=NEVER)
            known = self._times.get(block)
            is_first = self.least.get(block, NEVER) == NEVER  # the block has no other time
            if known is None and is_first and least < NEVER and len(self._times) < _MOST_KNOWN:
                known = self._times[block] = np.full(BLOCK, NEVER, np.uint64)
            if known is not None:
                known[start : start + len(part)] = [ms or NEVER for ms in part]
            self.lower(block, least)

    def lower(self, block: int, ms: int) -> None:
        """Lower the due time of a block to `ms`, if it is later."""
        if ms < self.least.setdefault(block, NEVER):
            self.least[block] = ms
            heapq.heappush(self._heap, (ms, block))
            if len(self._heap) > 2 * len(self.least) + BLOCK:  # most entries are stale
                self._heap = [(ms, block) for block, ms in self.least.items() if ms < NEVER]
                heapq.heapify(self._heap)

    def restore(self, seq: int, ms: int) -> None:
        """Set the time of a message that `clear` cleared before."""
        block, at = divmod(seq, BLOCK)
        known = self._times.get(block)
        if known is not None:
            known[at] = ms
        self.lower(block, ms)

    def next_ms(self) -> int | None:
        """Return a lower bound of the next time, or None."""
        while self._heap:
            ms, block = self._heap[0]
            if self.least.get(block) == ms:
                return ms
            heapq.heappop(self._heap)
        return None

    def due(self, now_ms: int) -> int | None:
        """Return a block that is due, or None."""
        ms = self.next_ms()
        return None if ms is None or ms > now_ms else self._heap[0][1]

    def unknown_before(self, ms: int) -> int | None:
        """Return a block due before `ms` whose single times are unknown, or None."""
        soon = (block for due, block in self._heap if due < ms and block not in self._times)
        return next((block for block in soon if self.least.get(block, NEVER) < ms), None)

    def knows(self, block: int) -> bool:
        """Tell whether all times of a block are known."""
        return block in self._times

    def learn(self, block: int, times: Times) -> None:
        """Set all times of a block; NEVER for settled messages."""
        self._times[block] = times

    def expired(self, block: int, now_ms: int) -> list[int]:
        """Return the messages of a block that are due."""
        first = block * BLOCK
        places = np.flatnonzero(self._times[block] <= np.uint64(now_ms))
        return [first + place for place in places.tolist()]

    def clear(self, block: int, now_ms: int) -> None:
        """Clear the times of the messages of a block that are due."""
        times = self._times.get(block)
        if times is None:  # all are settled, and it was forgotten
            return
        times[times <= np.uint64(now_ms)] = NEVER
        self.least[block] = NEVER
        self.lower(block, int(times.min()))
        if self.least[block] == NEVER:
            del self._times[block]

    def forget(self, block: int) -> None:
        """Forget a block whose messages are all settled."""
        self.least.pop(block, None)
        self._times.pop(block, None)


#: Approximate bytes per read when scanning.
_LOOK: Final = 4 << 20
#: Messages per read while their sizes are unknown.
_CAREFUL: Final = 64
#: Number of findings kept.
_FINDINGS: Final = 100
#: Gaps of up to this many messages of other classes are read, not skipped.
_GAP: Final = 8
#: Limits of messages, and of bytes, that were read in such gaps and are kept for their class.
_MOST_SPARE: Final = 8192
_MOST_SPARE_BYTES: Final = 8 << 20


class BacklogOptions(NamedTuple):
    """Options of a backlog."""

    segment: int
    sync: Sync
    #: Messages and bytes of each class in memory, at most.
    window: int
    window_bytes: int


class Backlog:
    """The log of one receiver, and the state of each message in it.

    The log has the messages of all classes in order of arrival. The marks say which of them are
    settled, and the class of the others; each class has some of its next messages in memory. The
    caller holds the outbox's lock.
    """

    def __init__(
        self,
        folder: Path,
        options: BacklogOptions,
        state: Floor,
        notes: Notes,
        first: FirstMessages | None = None,
    ) -> None:
        """Resume with the log in the folder, or create it.

        :param first: the messages of an outbox that has no files yet
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: the log cannot be read.
        """
        self.options = options
        self._folder = folder
        self.log = OutboxLog(folder, options.segment, options.sync, first)
        #: By class, the lowest first; only classes that have had a message.
        self.lanes: dict[int, Lane] = {}
        #: Bytes of evicted and expired messages not settled yet. They take no room.
        self.leaving: dict[int, int] = {}
        self.keyed = Keyed()
        #: Blocks that have messages with a key.
        self._keyed: set[int] = set()
        self._overdue: dict[int, int] = {}
        #: Bytes of the queued messages by block and class.
        self._sizes: dict[int, list[int]] = {}
        self._expiries = Expiries()
        #: Messages read together with those of another class.
        self._spare: dict[int, Message] = {}
        self._spare_bytes = 0
        #: Faults found in the log.
        self.findings: list[str] = []
        try:
            self._go_on(state, notes)
        except BaseException:
            self.log.suspend()
            raise

    # --- opening --------------------------------------------------------------------------------

    def _go_on(self, state: Floor, notes: Notes) -> None:
        self.marks, what = where_to_go_on(state, self.log)
        marks = self.marks
        marks.head = marks.floor
        if what:
            self._find(what)
        self._lowest = marks.floor // BLOCK
        head = self.log.head
        marks.append(bytes((UNKNOWN,)) * (head - marks.floor))
        # After a power failure the numbers from `known` on are reused.
        known = self.log.successor(notes.epoch, head)
        if known is not None:
            marks.restore(notes.marks, known)
        self._restore_contents(notes, known or 0)
        for priority, count in enumerate(marks.queued):
            if count:
                self._lane(priority, head).bytes = sum(
                    sizes[priority] for sizes in self._sizes.values()
                )

    def _find(self, what: str) -> None:
        log.warning("%s: %s", self._folder, what)
        self.findings.append(f"{self._folder.name}: {what}")
        del self.findings[:-_FINDINGS]

    def _restore_contents(self, notes: Notes, known: int) -> None:
        """Restore class, bytes and times of queued messages, from the notes or else the log."""
        head = self.log.head
        at = self.marks.floor
        while at < head:
            block = at // BLOCK
            end = (block + 1) * BLOCK
            contents = notes.contents.get(block)
            is_whole = at == block * BLOCK and end <= known
            if contents is not None and is_whole and not self.marks.count_in(block, UNKNOWN):
                self._expiries.lower(block, contents.least_ms)
                self._sizes[block] = list(contents.bytes)
            else:
                self._learn_contents(block, at, min(end, head))
            at = max(end, self.marks.floor)

    def _learn_contents(self, block: int, at: int, end: int) -> None:
        sizes = [0] * CLASSES
        self._expiries.lower(block, NEVER)
        for item in self._scan(at, end):
            self.marks.classify(item.seq, item.priority)
            sizes[item.priority] += len(item.raw)
            self._expiries.lower(block, item.expires_at_ms or NEVER)
        self._sizes[block] = sizes
        self._went_on()

    @property
    def last_arrival(self) -> int:
        """The arrival number of the newest message in the log; 0 if it is empty."""
        message = self.log.last_message()
        item = None if message is None else decode(message, {})
        return 0 if item is None else item.arrival

    # --- how much -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Lane]:
        """Yield the lanes, the lowest class first."""
        return iter(self.lanes.values())

    def _lane(self, priority: int, end: int = 0) -> Lane:
        lane = self.lanes.get(priority)
        if lane is None:
            start = self.marks.floor
            lane = Lane(self, priority, start, max(start, end))
            self.lanes = dict(sorted([*self.lanes.items(), (priority, lane)]))
        return lane

    @property
    def queued(self) -> int:
        """Number of unsettled messages."""
        return self.marks.head - self.marks.floor - self.marks.ahead

    @property
    def waiting(self) -> int:
        """Number of unsettled messages not in flight."""
        return self.queued - sum([len(lane.window.taken) for lane in self.lanes.values()])

    @property
    def size(self) -> int:
        """Bytes of the unsettled messages."""
        return sum([lane.bytes for lane in self.lanes.values()])

    def held(self) -> tuple[int, int]:
        """Return the number and bytes of messages that count against the limits."""
        if not self.leaving:
            return self.queued, self.size
        return self.queued - len(self.leaving), self.size - sum(self.leaving.values())

    def affordable(self, at: int, size: int, priority: int | None = None) -> int:
        """Return how many messages from `at` to the end of its block have about `size` bytes."""
        block, start = divmod(at, BLOCK)
        known = self._sizes.get(block)
        if known is None:
            return _CAREFUL
        total = sum(known) if priority is None else known[priority]
        count = self.marks.count_in(block, priority)
        return min(BLOCK - start, max(1, size * count // max(1, total)))

    # --- in -------------------------------------------------------------------------------------

    def append(
        self, columns: Columns, records: Sequence[bytes], stored_ms: int, key: int | None = None
    ) -> None:
        """Write the records of messages to the log.

        :raises StorageError: the disk is full; messages written before that are stored.
        """
        first = self.log.head
        try:
            self.log.write(records, columns.types)
        finally:
            count = self.log.head - first
            if count:
                self._enter(first, columns.first(count), stored_ms)
        if key is not None:
            self._note_key(key, columns.arrivals[0], first, len(columns.raws[0]))

    def _enter(self, first: int, columns: Columns, stored_ms: int) -> None:
        priorities = columns.priorities
        self.marks.append(priorities)
        self._expiries.add(first, columns.times)
        sizes = list(map(len, columns.raws))
        seqs: Sequence[int] = range(first, first + len(sizes))
        classes = set(priorities)
        if len(classes) == 1:
            (priority,) = classes
            size = self._resize(priority, seqs, sizes)
            self._lane(priority).enter(seqs, size, lambda _: items_of(columns, first, stored_ms))
            return
        items = items_of(columns, first, stored_ms)
        for priority in classes:
            seqs = [item.seq for item in items if item.priority == priority]
            size = self._resize(priority, seqs, [sizes[seq - first] for seq in seqs])
            self._lane(priority).enter(seqs, size, lambda own: [items[seq - first] for seq in own])

    def _resize(
        self, priority: int, seqs: Sequence[int], sizes: Sequence[int], sign: int = 1
    ) -> int:
        """Add the sizes of messages, in order, to the bytes of their blocks; return the sum."""
        first, last = seqs[0] // BLOCK, seqs[-1] // BLOCK
        if first == last:
            size = sum(sizes)
            self._size_of(first)[priority] += sign * size
            return size
        total = at = 0
        for block in range(first, last + 1):
            end = bisect_left(seqs, (block + 1) * BLOCK, at)
            if end > at:
                size = sum(sizes[at:end])
                self._size_of(block)[priority] += sign * size
                total += size
                at = end
        return total

    def _size_of(self, block: int) -> list[int]:
        sizes = self._sizes.get(block)
        if sizes is None:
            sizes = self._sizes[block] = [0] * CLASSES
        return sizes

    def in_the_way(self, key: int, most: int) -> list[Latest]:
        """Return the oldest waiting messages of a key: all but the newest `most - 1`.

        They can be several: messages in flight do not wait, and may be requeued.
        """

        def is_queued(message: Latest) -> bool:
            return message.seq not in self.marks

        def is_waiting(message: Latest) -> bool:
            return message.seq not in self._window_of(message.seq).taken

        self.keyed.tidy(self.held()[0], is_queued)
        return self.keyed.oldest_above(key, most, is_queued, is_waiting)

    def lane_of(self, seq: int) -> Lane:
        """Return the lane of a queued message."""
        return self._lane(self.marks.class_of(seq))

    def _window_of(self, seq: int) -> Window:
        return self.lane_of(seq).window

    def supersede(self, old: Sequence[Latest]) -> int:
        """Settle waiting messages that a newer one of their key replaces; return how many.

        Some may be settled already: they were found damaged while room was made.
        """
        left = [message for message in old if message.seq not in self.marks]
        for message in left:
            self._settle_one(message.seq, message.size, Reason.SUPERSEDED)
        self._went_on()
        return len(left)

    # --- out ------------------------------------------------------------------------------------

    def read_class(self, which: str, priority: int, at: int, count: int) -> tuple[list[Item], int]:
        """Return queued messages of a class from `at` on, and where to continue."""
        lane = self.lanes[priority]
        numbers, end = self.marks.numbers_of(priority, at, lane.head, count)
        if not numbers:
            return [], end
        spare = self._spare
        found = {seq: message for seq in numbers if (message := spare.pop(seq, None)) is not None}
        self._spare_bytes -= sum([len(message.payload) for message in found.values()])
        wanted = [seq for seq in numbers if seq not in found] if found else numbers
        for first, stop in _near(wanted) if wanted else ():
            while first < stop:
                some = min(stop - first, self.affordable(first, _LOOK))
                messages, first = self._messages(which, first, some)  # noqa: PLW2901
                found.update([(message.seq, message) for message in messages])
        if len(found) > len(numbers):
            own = {seq: found.pop(seq) for seq in numbers if seq in found}
            spare.update(found)
            self._spare_bytes += sum([len(message.payload) for message in found.values()])
            found = own
        if len(spare) > _MOST_SPARE or self._spare_bytes > _MOST_SPARE_BYTES:
            spare.clear()
            self._spare_bytes = 0
        return self._decoded([found[seq] for seq in numbers if seq in found]), end

    def read(self, which: str, at: int, count: int) -> tuple[list[Item], int]:
        """Read messages from `at` on; return the unsettled ones, and where to continue.

        Damaged messages are settled as DAMAGED.
        """
        messages, end = self._messages(which, at, count)
        return self._decoded(messages), end

    def _messages(self, which: str, at: int, count: int) -> tuple[list[Message], int]:
        messages, end = self.log.read(which, at, min(count, self.log.head - at))
        if len(messages) < end - at:
            expected = at
            for message in messages:
                if message.seq != expected:
                    self._miss(expected, message.seq)
                expected = message.seq + 1
            if expected != end:
                self._miss(expected, end)
        marks = self.marks
        if marks.ahead or at < marks.floor:
            messages = [message for message in messages if message.seq not in marks]
        return messages, end

    def _decoded(self, messages: Sequence[Message]) -> list[Item]:
        keys: dict[int, int] = {}
        items = []
        for message in messages:
            item = decode(message, keys)
            if item is None:
                self._miss(message.seq, message.seq + 1)
            else:
                items.append(item)
        for item in items if keys else ():
            if (key := keys.get(item.seq)) is not None:
                self._note_key(key, item.arrival, item.seq, len(item.raw))
        return items

    def _note_key(self, key: int, arrival: int, seq: int, size: int) -> None:
        self.keyed.add(key, Latest(arrival, seq, size))
        self._keyed.add(seq // BLOCK)

    def _miss(self, first: int, end: int) -> None:
        """Settle messages that the log has lost as DAMAGED, except those in memory."""
        marks = self.marks
        lost = [seq for seq in range(first, end) if seq not in marks]
        lost = [
            seq
            for seq in lost
            if (lane := self.lanes.get(marks.class_of(seq))) is None
            or seq not in lane.window.loaded
        ]
        if lost:
            for seq in lost:
                priority, block = marks.class_of(seq), seq // BLOCK
                size = 0  # their sizes are lost: use the mean
                if priority != UNKNOWN:
                    size = self._size_of(block)[priority] // max(1, marks.count_in(block, priority))
                self._settle_one(seq, size, Reason.DAMAGED)
            self._find(f"{len(lost)} messages from {lost[0]} on are damaged, or not there any more")
            if self.lanes:
                self._went_on()

    def _scan(self, at: int, end: int) -> Iterator[Item]:
        """Yield the unsettled messages of a range."""
        while at < end:
            items, at = self.read("any", at, min(end - at, self.affordable(at, _LOOK)))
            yield from items

    def look(self, start: int, limit: int) -> tuple[list[Item], int]:
        """Return up to `limit` unsettled messages from `start` on, and where to continue."""
        found: list[Item] = []
        start = max(start, self.marks.floor)
        while start < self.log.head and len(found) < limit:
            count = min(limit - len(found), self.affordable(start, _LOOK))
            items, start = self.read("any", start, count)
            found += items
        return found, start

    def give_back(self, items: Sequence[Item]) -> None:
        """Requeue messages in flight."""
        for item in items:
            was_leaving = self.leaving.pop(item.seq, None) is not None
            was_due = self._overdue.pop(item.seq, None) is not None
            if (was_due or was_leaving) and item.expires_at_ms and item.seq not in self.marks:
                self._expiries.restore(item.seq, item.expires_at_ms)
        for lane, own in self.by_lane(items):
            lane.window.give_back(own)

    def leave(self, items: Sequence[Item]) -> None:
        """Take messages that are about to be settled; until then they take no room."""
        for lane, own in self.by_lane(items):
            window = lane.window
            for item in own:
                if item.seq not in window.loaded:
                    window.loaded[item.seq] = item
                    window.bytes += len(item.raw)
                self.leaving[item.seq] = len(item.raw)
            window.take(own, in_order=False)

    def by_lane(self, items: Sequence[Item]) -> list[tuple[Lane, Sequence[Item]]]:
        """Group messages by lane."""
        classes = {item.priority for item in items}
        if len(classes) == 1:
            return [(self._lane(items[0].priority), items)]
        return [
            (self._lane(each), [item for item in items if item.priority == each])
            for each in sorted(classes)
        ]

    # --- settling -------------------------------------------------------------------------------

    def settle(self, items: Sequence[Item], reason: Reason) -> int:
        """Settle messages; return how many were not settled yet."""
        count = 0
        for lane, own in self.by_lane(items):
            seqs = [item.seq for item in own]
            if lane.window.taken.issuperset(seqs) and len(set(seqs)) == len(seqs):
                sizes = [len(item.raw) for item in own]
                first, end = seqs[0], seqs[0] + len(seqs)
                if seqs == list(range(first, end)):
                    self.marks.settle(first, len(seqs), reason)
                else:
                    in_order = sorted(zip(seqs, sizes, strict=True))
                    seqs, sizes = map(list, zip(*in_order, strict=True))
                    self.marks.settle_some(lane.priority, seqs, reason)
                size = self._resize(lane.priority, seqs, sizes, -1)
                lane.window.drop(seqs, size)
                lane.bytes -= size
                if self.leaving or self._overdue:
                    for seq in seqs:
                        self.leaving.pop(seq, None)
                        self._overdue.pop(seq, None)
                count += len(seqs)
                continue
            for item in own:
                if item.seq < self.log.head and item.seq not in self.marks:
                    self._settle_one(item.seq, len(item.raw), reason)
                    count += 1
        self._went_on()
        return count

    def _settle_one(self, seq: int, size: int, reason: Reason) -> None:
        priority = self.marks.class_of(seq)
        self.marks.settle(seq, 1, reason)
        self.leaving.pop(seq, None)
        self._overdue.pop(seq, None)
        if priority != UNKNOWN:
            self._size_of(seq // BLOCK)[priority] -= size
        if (lane := self.lanes.get(priority)) is not None:
            lane.bytes -= size
            if seq in lane.window.loaded:
                lane.window.drop((seq,), size)

    def _went_on(self) -> None:
        """Forget the blocks below the floor."""
        floor = self.marks.floor
        lowest = floor // BLOCK
        while self._lowest < lowest:
            self._expiries.forget(self._lowest)
            self._sizes.pop(self._lowest, None)
            self._keyed.discard(self._lowest)
            self._lowest += 1
        for lane in self.lanes.values():
            lane.window.go_to(floor)
        if floor == self.log.head:
            for lane in self.lanes.values():
                lane.bytes = 0
            self._overdue.clear()
            self._spare.clear()
            self._spare_bytes = 0

    # --- expiry ---------------------------------------------------------------------------------

    def next_expiry_ms(self) -> int | None:
        return self._expiries.next_ms()

    def expired(self, now_ms: int, enough: int) -> list[Item]:
        """Return the expired messages, except those in flight, without settling them.

        It stops at the end of a block when it has `enough`.
        """
        found: list[Item] = []
        try:
            while len(found) < enough and (block := self._expiries.due(now_ms)) is not None:
                found += self._expired_in(block, now_ms)
        except BaseException:  # they are due again
            for item in found:
                self._expiries.restore(item.seq, item.expires_at_ms)
            raise
        return found

    def _expired_in(self, block: int, now_ms: int) -> list[Item]:
        if not self._expiries.knows(block):
            self._learn(block)
        found: list[Item] = []
        taken, unloaded = [], []
        for seq in self._expiries.expired(block, now_ms):
            if seq in self.marks:
                continue
            window = self._window_of(seq)
            if seq in window.taken:
                taken.append(seq)
            elif (item := window.loaded.get(seq)) is not None:
                found.append(item)
            else:
                unloaded.append(seq)
        wanted = set(unloaded)
        for first, end in runs_of(unloaded):
            found += [item for item in self._scan(first, end) if item.seq in wanted]
        # Last: if the log cannot be read, they stay due.
        self._overdue.update(dict.fromkeys(taken, now_ms))
        self._expiries.clear(block, now_ms)
        return found

    def prepare(self, until_ms: int) -> bool:
        """Read the times of one block due before `until_ms`; tell whether there was one."""
        block = self._expiries.unknown_before(until_ms)
        if block is None:
            return False
        self._learn(block)
        return True

    def _learn(self, block: int) -> None:
        """Read the expiry time of each message of a block."""
        times = np.full(BLOCK, NEVER, np.uint64)
        first = max(block * BLOCK, self.marks.floor)
        end = min((block + 1) * BLOCK, self.log.head)
        for seq in range(first, end):
            if seq in self.marks:
                continue
            item = self._window_of(seq).loaded.get(seq)
            if item is not None:
                times[seq % BLOCK] = item.expires_at_ms or NEVER
            else:  # one is not in memory: read the rest of the block
                for other in self._scan(seq, end):
                    times[other.seq % BLOCK] = other.expires_at_ms or NEVER
                break
        self._expiries.learn(block, times)

    # --- saved state ----------------------------------------------------------------------------

    def save_floor(self, state: StateFile) -> None:
        """Set the floor of a state file, and the counts below it."""
        state.set_floor(self.log.epoch, self.marks.floor, self.marks.below)

    def notes(self) -> Notes:
        """Return the notes to save: marks and contents above the floor."""
        marks, sizes = self.marks, self._sizes
        # Leave out blocks that the next process must read: they have keys, or expired messages
        # not settled yet.
        unsure = {*self._keyed, *(seq // BLOCK for seq in (*self.leaving, *self._overdue))}
        contents = {
            block: Contents(least, tuple(sizes[block]))
            for block, least in self._expiries.least.items()
            if block in sizes
            and block not in unsure
            and (block + 1) * BLOCK <= marks.head
            and block * BLOCK >= marks.floor
        }
        blocks = {number: bytes(block) for number, block in marks.blocks.items()}
        return Notes(self.log.epoch, blocks, contents)


def _near(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) that cover all these numbers, and few others."""
    first = last = numbers[0]
    if numbers[-1] - first < len(numbers) + _GAP:
        yield first, numbers[-1] + 1
        return
    for number in numbers:
        if number - last > _GAP:
            yield first, last + 1
            first = number
        last = number
    yield first, last + 1
