"""How are the messages of one priority class stored, taken and settled?"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.dispatch.outbox.expiries import NEVER, Expiries
from penstock.dispatch.outbox.lane_log import LaneLog
from penstock.dispatch.outbox.latest import Latest
from penstock.dispatch.outbox.opening import where_to_go_on
from penstock.dispatch.outbox.records import decode, items_of
from penstock.dispatch.outbox.settled import BLOCK, Reason
from penstock.dispatch.outbox.sidecar import LaneNotes
from penstock.dispatch.outbox.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.outbox.common_log import FirstMessages
    from penstock.dispatch.outbox.latest import Keyed
    from penstock.dispatch.outbox.records import Columns, Item
    from penstock.dispatch.outbox.state_file import LaneState
    from penstock.queue.options import Sync

__all__ = ["Lane", "LaneOptions"]

log = logging.getLogger(__name__)

#: Bytes that are read at a time, about, where only a look is taken.
_LOOK: Final = 4 << 20
#: Messages that are read at a time where it is not known how large they are.
_CAREFUL: Final = 64
#: What was found to be wrong is told up to so many times.
_FINDINGS: Final = 100


class LaneOptions(NamedTuple):
    """What is the same for all lanes of an outbox."""

    segment: int
    sync: Sync
    #: Messages, and bytes of them, that wait in memory at most.
    window: int
    window_bytes: int


class Lane:
    """A log, and which of its messages are settled. Whoever calls has the outbox's lock."""

    def __init__(
        self,
        folder: Path,
        priority: int,
        options: LaneOptions,
        state: LaneState,
        notes: LaneNotes,
        keyed: Keyed,
        first: FirstMessages | None = None,
    ) -> None:
        """Open it, and go on where it was left.

        :param first: where its messages are stored until its log is made
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: the log cannot be read.
        """
        self.priority = priority
        self.folder = folder
        self.log = LaneLog(folder, options.segment, options.sync, first, priority)
        #: Bytes of the messages that are not settled.
        self.bytes = 0
        #: Taken to be settled: they have no room any more.
        self.leaving: dict[int, int] = {}
        self._of_keys = keyed
        #: Blocks in which there are messages with a key.
        self._keyed: set[int] = set()
        self._overdue: dict[int, int] = {}
        #: Bytes of all messages by block.
        self._sizes: dict[int, int] = {}
        self._expiries = Expiries()
        self._is_opening = True
        #: What was found to be wrong.
        self.findings: list[str] = []
        try:
            self._go_on(state, notes, options)
        except BaseException:
            self.log.suspend()
            raise
        self._is_opening = False

    # --- opening --------------------------------------------------------------------------------

    def _go_on(self, state: LaneState, notes: LaneNotes, options: LaneOptions) -> None:
        self.settled, what = where_to_go_on(state, self.log)
        if what:
            self._find(what)
        floor = self.settled.floor
        self._lowest = floor // BLOCK
        self.window = Window(self, floor, options.window, options.window_bytes)
        known = self.log.successor(notes.epoch, self.head)
        if known is not None:  # the numbers behind are given again after a power failure
            self.settled.restore(notes.marks, known)
            whole = {at: of for at, of in notes.contents.items() if (at + 1) * BLOCK <= known}
            notes = replace(notes, contents=whole)
        else:
            notes = LaneNotes()
        self._restore_contents(notes)

    def _find(self, what: str) -> None:
        log.warning("%s: %s", self.folder, what)
        self.findings.append(f"{self.folder.name}: {what}")
        del self.findings[:-_FINDINGS]

    def _restore_contents(self, notes: LaneNotes) -> None:
        """Find out bytes and times of what is queued, from the notes where they are of use."""
        floor, head = self.settled.floor, self.head
        for block in range(floor // BLOCK, -(-head // BLOCK)):
            first = block * BLOCK
            is_whole = first >= floor and first + BLOCK <= head
            known = notes.contents.get(block)
            if known is not None and is_whole and not self.settled.has_marks(block):
                least, size = known
                self._expiries.lower(block, least)
                self._sizes[block] = size
                self.bytes += size
                continue
            size = 0
            for item in self._scan(max(first, floor), min(first + BLOCK, head)):
                size += len(item.raw)
                self._expiries.lower(block, item.expires_at_ms or NEVER)
            self._sizes[block] = size
            self.bytes += size

    @property
    def last_arrival(self) -> int:
        """The arrival number of the newest message that is there; 0 when there is none."""
        message = self.log.last_message()
        item = None if message is None else decode(message, self.priority, {})
        return 0 if item is None else item.arrival

    # --- how much -------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        return self.log.head

    @property
    def queued(self) -> int:
        """Messages that are not settled."""
        return self.log.head - self.settled.floor - self.settled.ahead

    @property
    def waiting(self) -> int:
        """Messages that nobody works on."""
        return self.queued - len(self.window.taken)

    @property
    def waiting_bytes(self) -> int:
        loaded = self.window.loaded
        return self.bytes - sum(len(loaded[seq].raw) for seq in self.window.taken)

    def affordable(self, at: int, size: int) -> int:
        """Return how many messages of a block, from there on, have about that many bytes."""
        block, start = divmod(at, BLOCK)
        known = self._sizes.get(block)
        if known is None:
            return _CAREFUL
        return min(BLOCK - start, max(1, size * BLOCK // max(1, known)))

    # --- in -------------------------------------------------------------------------------------

    def append(
        self, columns: Columns, records: Sequence[bytes], stored_ms: int, key: int | None = None
    ) -> None:
        """Store messages, of which these are the records.

        :raises StorageError: there is no space. Those of them that were stored, are.
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
        sizes = list(map(len, columns.raws))
        at, count = 0, len(sizes)
        while at < count:
            block, start = divmod(first + at, BLOCK)
            part = sizes[at : at + BLOCK - start]
            self._sizes[block] = self._sizes.get(block, 0) + sum(part)
            at += len(part)
        size = sum(sizes)
        self.bytes += size
        self._expiries.add(first, columns.times)
        if self.window.wants(first, count):
            self.window.offer(items_of(columns, first, stored_ms), size)

    def is_waiting(self, seq: int) -> bool:
        """Tell whether a message is queued, and nobody works on it."""
        return seq not in self.settled and seq not in self.window.taken

    def supersede(self, old: Latest) -> None:
        """Settle a message that waits, because there is a newer one of its key."""
        self._settle_one(old.seq, old.size, Reason.SUPERSEDED)
        self._went_on()

    # --- out ------------------------------------------------------------------------------------

    def read(self, which: str, at: int, count: int) -> tuple[list[Item], int]:
        """Return those that are not settled, of some messages from there on, and where it goes on.

        Those that are not right any more are settled as such.
        """
        messages, end = self.log.read(which, at, min(count, self.log.head - at))
        priority, settled = self.priority, self.settled
        keys: dict[int, int] = {}
        items = []
        has_marks = bool(settled.blocks) or at < settled.floor
        expected = at
        for message in messages:
            seq = message.seq
            if seq != expected:
                self._miss(expected, seq)
            expected = seq + 1
            if has_marks and seq in settled:
                continue
            item = decode(message, priority, keys)
            if item is None:
                self._miss(seq, seq + 1)
            else:
                items.append(item)
        if expected != end:
            self._miss(expected, end)
        for item in items if keys else ():
            if (key := keys.get(item.seq)) is not None:
                self._note_key(key, item.arrival, item.seq, len(item.raw))
        return items, end

    def _note_key(self, key: int, arrival: int, seq: int, size: int) -> None:
        self._of_keys.add(key, Latest(arrival, self.priority, seq, size))
        self._keyed.add(seq // BLOCK)

    def _miss(self, first: int, end: int) -> None:
        """Settle what the log does not have any more, unless it is in memory."""
        lost = [seq for seq in range(first, end) if seq not in self.settled]
        lost = [seq for seq in lost if seq not in self.window.loaded]
        if lost:
            # Nobody knows any more how large they were.
            size = 0 if self._is_opening else self.bytes // max(1, self.queued)
            for seq in lost:
                self._settle_one(seq, size, Reason.DAMAGED)
            self._find(f"{len(lost)} messages from {lost[0]} on are damaged, or not there any more")
            self._went_on()

    def _scan(self, at: int, end: int) -> Iterator[Item]:
        """Read messages of a range, for a look only."""
        while at < end:
            items, at = self.read("any", at, min(end - at, self.affordable(at, _LOOK)))
            yield from items

    def look(self, start: int, limit: int) -> tuple[list[Item], int]:
        """Return messages that are not settled from a number on, and where to go on."""
        found: list[Item] = []
        start = max(start, self.settled.floor)
        while start < self.head and len(found) < limit:
            count = min(limit - len(found), self.affordable(start, _LOOK))
            items, start = self.read("any", start, count)
            found += items
        return found, start

    def give_back(self, items: Sequence[Item]) -> None:
        """Let messages wait again that somebody took."""
        for item in items:
            was_leaving = self.leaving.pop(item.seq, None) is not None
            was_due = self._overdue.pop(item.seq, None) is not None
            if (was_due or was_leaving) and item.expires_at_ms and item.seq not in self.settled:
                self._expiries.restore(item.seq, item.expires_at_ms)
        self.window.give_back(items)

    def leave(self, items: Sequence[Item]) -> None:
        """Take messages that will be settled, or given back; until then they have no room."""
        for item in items:
            if item.seq not in self.window.loaded:
                self.window.loaded[item.seq] = item
                self.window.bytes += len(item.raw)
            self.leaving[item.seq] = len(item.raw)
        self.window.take(items, in_order=False)

    # --- settling -------------------------------------------------------------------------------

    def settle(self, items: Sequence[Item], reason: Reason) -> int:
        """Settle those that are not; return how many that were."""
        seqs = [item[1] for item in items]
        first, count = seqs[0], len(seqs)
        window = self.window
        if window.taken.issuperset(seqs) and seqs == list(range(first, first + count)):
            size = sum([len(item[7]) for item in items])
            self.settled.add(first, count, reason)
            window.drop(seqs, size)
            self.bytes -= size
            if self.leaving:
                for seq in seqs:
                    self.leaving.pop(seq, None)
        else:
            count = 0
            for item in items:
                if item.seq < self.head and item.seq not in self.settled:
                    self._settle_one(item.seq, len(item.raw), reason)
                    count += 1
        self._went_on()
        return count

    def _settle_one(self, seq: int, size: int, reason: Reason) -> None:
        self.settled.add(seq, 1, reason)
        self.bytes -= size
        self.leaving.pop(seq, None)
        if seq in self.window.loaded:
            self.window.drop((seq,), size)

    def _went_on(self) -> None:
        """Forget what is known of blocks that the floor has passed."""
        lowest = self.settled.floor // BLOCK
        while self._lowest < lowest:
            self._expiries.forget(self._lowest)
            self._sizes.pop(self._lowest, None)
            self._keyed.discard(self._lowest)
            self._lowest += 1
        self.window.go_to(self.settled.floor)
        if self.settled.floor == self.log.head:
            self.bytes = 0
            self._overdue.clear()

    # --- expiry ---------------------------------------------------------------------------------

    def next_expiry_ms(self) -> int | None:
        return self._expiries.next_ms()

    def expired(self, now_ms: int, enough: int) -> list[Item]:
        """Return the messages whose time is over, except those in flight; they are not settled.

        It stops at the end of a block when there are enough.
        """
        found: list[Item] = []
        while len(found) < enough and (block := self._expiries.due(now_ms)) is not None:
            if not self._expiries.knows(block):
                self._learn(block)
            unloaded = []
            for seq in self._expiries.expired(block, now_ms):
                if seq in self.settled:
                    continue
                if seq in self.window.taken:
                    self._overdue[seq] = now_ms
                elif (item := self.window.loaded.get(seq)) is not None:
                    found.append(item)
                else:
                    unloaded.append(seq)
            found += self._read_these(unloaded)
        return found

    def prepare(self, until_ms: int) -> bool:
        """Find out the times of a block that will be due by then; tell whether there was one."""
        block = self._expiries.unknown_before(until_ms)
        if block is None:
            return False
        self._learn(block)
        return True

    def _learn(self, block: int) -> None:
        """Find out when each message of a block expires."""
        times = np.full(BLOCK, NEVER, np.uint64)
        first = max(block * BLOCK, self.settled.floor)
        end = min((block + 1) * BLOCK, self.head)
        loaded = self.window.loaded
        for seq in range(first, end):
            item = loaded.get(seq)
            if item is not None:
                times[seq % BLOCK] = item.expires_at_ms or NEVER
            elif seq not in self.settled:  # one is enough: read them all
                for other in self._scan(seq, end):
                    times[other.seq % BLOCK] = other.expires_at_ms or NEVER
                break
        self._expiries.learn(block, times)

    def _read_these(self, seqs: Sequence[int]) -> Iterator[Item]:
        wanted = set(seqs)
        at = 0
        while at < len(seqs):
            run = at + 1
            while run < len(seqs) and seqs[run] == seqs[run - 1] + 1:
                run += 1
            for item in self._scan(seqs[at], seqs[run - 1] + 1):
                if item.seq in wanted:
                    yield item
            at = run

    # --- for the next who opens it --------------------------------------------------------------

    def notes(self) -> LaneNotes:
        """Return what is known above the floor."""
        settled, sizes = self.settled, self._sizes
        contents = {
            block: (least, sizes[block])
            for block, least in self._expiries.least.items()
            if block in sizes
            and block not in self._keyed  # they are to be found
            and (block + 1) * BLOCK <= self.head
            and block * BLOCK >= settled.floor
        }
        marks = {block: bytes(marks) for block, marks in settled.blocks.items()}
        return LaneNotes(self.log.epoch, marks, contents)
