"""Who gets which messages of a group, for how long, and what becomes of them?"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.capabilities import GroupStatistics
from penstock.core.errors import DamagedQueue, InvalidOption, LeaseLost, Unsupported
from penstock.core.interfaces import LONGEST_PAUSE, LONGEST_SLEEP, Closable
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss
from penstock.queue.groups.settled import NOBODY, Span
from penstock.queue.groups.state import Ending, Join, Leave, Put, Renumber, Restart, Settle
from penstock.queue.groups.state_file import MOST_MEMBERS, StateFile, group_names, look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from penstock.core.interfaces import Bounds
    from penstock.queue.groups.state import GroupState
    from penstock.queue.options import Sync

__all__ = ["Leases", "Taken", "describe_groups", "running_ns"]

_SECOND: Final = 1_000_000_000
#: How often (seconds) a member checks that the others are alive.
_BETWEEN_LOOKS: Final = 0.25
#: Messages that may wait for an earlier one of the same key; above this, take no fresh ones.
_MOST_PARKED: Final = 10_000
#: How often (seconds) the hold advances when `sync` sets no interval.
_BETWEEN_HOLDS: Final = 0.2


#: Counters of a group that `info` shows.
_SHOWN: Final = (
    "next_seq",
    "floor",
    "lag",
    "leased",
    "waiting",
    "acked",
    "redelivered",
    "dead",
    "lost",
    "reverted",
)


def running_ns() -> int:
    """Return the time since boot, which never jumps, unlike the wall clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Taken(NamedTuple):
    """Messages leased to a member by one call."""

    #: To be delivered.
    spans: list[Span]
    #: Out of deliveries: to move to the dead-letter stream.
    dying: list[Span]


class Leases(Closable):
    """One member's access to the state of its group.

    :param lease: seconds until an unsettled message is redelivered to another member
    :param deliveries: most deliveries of a message; 0: no limit
    :param sync: when settled state is synced to disk
    :param hold: called with epoch and floor: every message below the floor is settled
    :param now: clock that all members share, in nanoseconds
    """

    def __init__(
        self,
        file: StateFile,
        *,
        lease: float = 30.0,
        deliveries: int = 0,
        sync: Sync = "none",
        hold: Callable[[int, int], None] | None = None,
        now: Callable[[], int] = running_ns,
    ) -> None:
        self._file = file
        self._lease_ns = round(lease * _SECOND)
        self._deliveries = deliveries
        self._sync = sync
        self._hold = hold
        self._now = now
        self._look_at = self._keep_at = 0
        #: `changes` of the file at the last sync.
        self._synced = 0
        #: What the last `take` leased, until it is with the caller of the reader.
        self._taken = Taken([], [])
        self._me = NOBODY
        self._me = self._join()

    @property
    def me(self) -> int:
        """The number of this member."""
        return self._me

    @property
    def next(self) -> int:
        """The first message not yet leased to any member, as of the last turn."""
        return self._file.state.map.next

    def _join(self) -> int:
        with self._file.turn() as state:
            self._reclaim_from_dead(state, self._now())
            for member in range(MOST_MEMBERS):
                if member not in state.members and self._file.claim(member):
                    self._file.add(Join(member, os.getpid(), time.time_ns()))
                    return member
        raise InvalidOption("group", str(self._file.path), f"has {MOST_MEMBERS} members already")

    # --- leasing -------------------------------------------------------------------------------

    def take(
        self,
        limit: int,
        end: int,
        epochs: AbstractSet[int],
        keys: Callable[[int, int], Sequence[tuple[int, int]]] | None = None,
    ) -> Taken | None:
        """Lease up to `limit` messages below `end`, redeliveries first.

        :param epochs: epochs whose sequence numbers the caller can read
        :param keys: `keys(first, limit)` returns number and key of up to `limit` messages from
            `first` on; None: the group keeps no order by key
        :returns: None when the group is in another epoch
        """
        with self._file.turn() as state:
            if state.epoch not in epochs:
                return None
            now = self._now()
            self._reclaim_from_dead(state, now)
            # Set before the leases are stored: a signal may interrupt this call right behind that.
            self._taken = taken = Taken([], [])
            if keys is None:
                left = self._take_due(state.map.due(now), limit, taken)
                if left and state.map.next < end:
                    first = state.map.next
                    taken.spans.append(Span(first, min(first + left, end)))
            else:
                self._take_ordered(state, now, limit, taken, keys)
            until = now + self._lease_ns
            if taken.spans:
                self._file.add(Put(self._me, until, [_entry(span, 1) for span in taken.spans]))
            if taken.dying:
                self._file.add(Put(self._me, until, [_entry(span) for span in taken.dying]))
        return taken

    def _take_due(self, due: Iterable[Span], limit: int, taken: Taken) -> int:
        """Add due spans to `taken`, up to `limit` messages; return the remaining limit."""
        for span in due:
            if self._deliveries and span.deliveries >= self._deliveries:
                taken.dying.append(span)
            elif limit:
                part = span._replace(end=min(span.end, span.first + limit))
                taken.spans.append(part)
                limit -= part.size
        return limit

    def _take_ordered(
        self,
        state: GroupState,
        now: int,
        limit: int,
        taken: Taken,
        keys: Callable[[int, int], Sequence[tuple[int, int]]],
    ) -> None:
        """Take messages whose key no other member holds; park the others."""
        holders = {span.key: span.member for span in state.map.spans if span.is_held(now)}
        blocked: set[int] = set()
        parked = 0
        for span in state.map.spans:
            if span.is_held(now):
                continue
            is_free = holders.get(span.key, self._me) == self._me and span.key not in blocked
            if limit and is_free and span.until <= now:
                limit = self._take_due([span], limit, taken)
                holders[span.key] = self._me
            else:
                blocked.add(span.key)
                parked += span.size
        while limit and parked < _MOST_PARKED and (fresh := keys(state.map.next, limit)):
            spans = [Span(seq, seq + 1, key=key) for seq, key in fresh]
            self._file.add(Put(NOBODY, 0, [_entry(span) for span in spans]))
            for span in spans:
                if holders.setdefault(span.key, self._me) == self._me and span.key not in blocked:
                    taken.spans.append(span)
                    limit -= 1
                else:
                    blocked.add(span.key)
                    parked += 1

    def has_free(self, end: int, epochs: AbstractSet[int]) -> bool:
        """Tell whether `take` would return messages now, or park some by key.

        Returned are those for this member, and those to be buried.
        """
        with self._file.turn() as state:
            if state.epoch not in epochs:
                return True  # the next read adopts the epoch
            now = self._now()
            self._reclaim_from_dead(state, now)
            if state.key is None:
                return state.map.next < end or bool(state.map.due(now))
            # As `_take_ordered` does: of each key only the first can be free.
            held = [span for span in state.map.spans if span.is_held(now)]
            blocked = {span.key for span in held if span.member != self._me}
            parked = 0
            for span in state.map.spans:
                if span.is_held(now):
                    continue
                if span.until <= now and span.key not in blocked:
                    return True
                blocked.add(span.key)
                parked += span.size
            return state.map.next < end and parked < _MOST_PARKED

    # --- settling and returning ----------------------------------------------------------------

    def ack(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Settle messages, given as ranges (first, end) of their numbers.

        :raises LeaseLost: this member no longer holds some of them; the others are settled.
        """
        self._settle_held(ranges, lambda parts: Settle(Ending.ACKED, [part[:2] for part in parts]))

    def nack(self, ranges: Sequence[tuple[int, int]], delay: float = 0.0) -> None:
        """Return messages for redelivery after `delay` seconds.

        :raises LeaseLost: as for `ack`.
        """
        until = self._now() + round(delay * _SECOND)
        self._settle_held(
            ranges, lambda parts: Put(NOBODY, until, [_entry(part) for part in parts])
        )

    def _settle_held(
        self,
        ranges: Sequence[tuple[int, int]],
        record: Callable[[list[Span]], Settle | Put],
    ) -> None:
        """Record the end of those ranges that this member holds; raise for the rest."""
        mine: list[Span] = []
        lost: list[tuple[int, int]] = []
        with self._file.turn() as state:
            for first, end in ranges:
                at = first
                for part in state.map.within(first, end):
                    if part.member == self._me:
                        if part.first > at:
                            lost.append((at, part.first))
                        mine.append(part)
                        at = part.end
                if at < end:
                    lost.append((at, end))
            if mine:
                self._file.add(record(mine))
        self._changed()
        if lost:
            raise LeaseLost(
                [(first, end - 1) for first, end in lost],
                hint="the lease ran out, or they were settled before; lease= makes it longer",
            )

    def unsettled(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges of these delivered messages that are not settled."""
        with self._file.turn() as state:
            return [part[:2] for first, end in ranges for part in state.map.within(first, end)]

    def ack_all(self) -> None:
        """Settle all messages leased to this member."""
        with self._file.turn() as state:
            if mine := state.map.of_member(self._me):
                self._file.add(Settle(Ending.ACKED, [span[:2] for span in mine]))
        self._changed()

    def keep_taken(self) -> None:
        """Note that what was leased so far is with the caller of the reader."""
        self._taken = Taken([], [])

    def give_back_taken(self) -> None:
        """Return what the last `take` leased and nobody got, because of an error or a signal."""
        self.give_back(self._taken.spans)
        self.give_back(self._taken.dying, counted=True)

    def give_back(
        self, spans: Iterable[Span], *, after: float = 0.0, counted: bool = False
    ) -> None:
        """Return leased messages that were not delivered; the lease counts as no delivery.

        :param counted: keep the delivery count, which this lease did not raise
        """
        with self._file.turn() as state:
            parts = [part for span in spans for part in self._mine(state, span)]
            until = self._now() + round(after * _SECOND)
            if parts:
                self._file.add(Put(NOBODY, until, [_entry(part, counted - 1) for part in parts]))

    def bury(self, spans: Iterable[Span]) -> None:
        """Settle messages that were appended to the dead-letter stream."""
        with self._file.turn() as state:
            parts = [part[:2] for span in spans for part in self._mine(state, span)]
            if parts:
                self._file.add(Settle(Ending.DEAD, parts))
        self._changed()

    def lose(
        self, ranges: Iterable[tuple[int, int]], oldest: int, reason: DropReason
    ) -> list[Loss]:
        """Settle `ranges` and messages below `oldest` as lost; return the losses.

        Messages leased to other members stay: those may have read them already.
        """
        found: list[Loss] = []
        with self._file.turn() as state:
            # This member may have read its own leases below the oldest before they were removed.
            wanted = [(first, end, {NOBODY, self._me}) for first, end in ranges]
            for first, end, members in (*wanted, (0, oldest, {NOBODY})):
                parts = state.map.within(first, end)
                gone = [part[:2] for part in parts if part.member in members]
                if end > state.map.next >= first:
                    gone.append((state.map.next, end))
                if gone:
                    self._file.add(Settle(Ending.of(reason), gone))
                    found += [Loss(at, behind - 1, reason) for at, behind in gone]
        self._changed()
        return found

    def _mine(self, state: GroupState, span: Span) -> list[Span]:
        parts = state.map.within(span.first, span.end)
        return [part for part in parts if part.member == self._me]

    # --- members that died ---------------------------------------------------------------------

    def _reclaim_from_dead(self, state: GroupState, now: int) -> None:
        if now < self._look_at:
            return
        self._look_at = now + round(_BETWEEN_LOOKS * _SECOND)
        for member in [m for m in state.members if m != self._me and not self._file.is_alive(m)]:
            if spans := state.map.of_member(member):
                self._file.add(Put(NOBODY, 0, [_entry(span) for span in spans]))
            self._file.add(Leave(member))

    def rest(self) -> float:
        """Return how many seconds to sleep at most: no redelivery can be due earlier."""
        state, now = self._file.state, self._now()
        self._sync_and_hold()
        longest = LONGEST_SLEEP if len(state.members) < 2 else _BETWEEN_LOOKS  # noqa: PLR2004
        soonest = min((span.until for span in state.map.spans), default=None)
        if soonest is None:
            return longest
        return min(longest, max(LONGEST_PAUSE, (soonest - now) / _SECOND))

    # --- epochs --------------------------------------------------------------------------------

    def renumber(self, find: Callable[[], tuple[Bounds, int, int]]) -> list[Loss] | None:
        """Adopt the current epoch of the stream.

        :param find: returns the bounds of the stream, its first number ever, and its last known end
            before it was recreated
        :returns: the losses, if the stream was recreated; None: the stream continues
        """
        with self._file.turn() as state:
            bounds, first, known_end = find()
            cut = bounds.successor(state.epoch, state.map.next)
            if cut is not None:
                if (cut := min(cut, bounds.end)) < state.map.next or bounds.epoch != state.epoch:
                    self._file.add(Renumber(bounds.epoch, cut))
                return None
            gone = [span[:2] for span in state.map.spans]
            if known_end > state.map.next:
                gone.append((state.map.next, known_end))
            if gone:
                self._file.add(Settle(Ending.RECREATED, gone))
            # What is removed of it already is settled as lost when it is read.
            self._file.add(Restart(bounds.epoch, first))
        return [Loss(at, end - 1, DropReason.RECREATED) for at, end in gone]

    # --- counters and closing ------------------------------------------------------------------

    def statistics(self, end: int) -> GroupStatistics:
        """Return the counters of the group; `end` is the next number of its stream."""
        with self._file.turn() as state:
            return books_of(state, end)

    def _changed(self) -> None:
        if self._sync == "batch":
            self._file.sync()
        self._sync_and_hold()

    def _sync_and_hold(self, *, at_once: bool = False) -> None:
        """Sync if due, then advance the hold to the floor."""
        now = self._now()
        if now < self._keep_at and not at_once:
            return
        interval = self._sync if isinstance(self._sync, float) else _BETWEEN_HOLDS
        self._keep_at = now + round(interval * _SECOND)
        epoch, floor = self._file.state.epoch, self._file.state.map.floor
        changes = self._file.changes
        if self._sync != "none" and changes != self._synced:
            self._file.sync()
            self._synced = changes
        if self._hold is not None:
            self._hold(epoch, floor)

    def close(self) -> None:
        """Return all leased messages, and leave the group."""
        try:
            with self._file.turn() as state:
                if mine := state.map.of_member(self._me):
                    self._file.add(Put(NOBODY, 0, [_entry(span) for span in mine]))
                self._file.add(Leave(self._me))
            self._sync_and_hold(at_once=True)
        finally:
            self._file.close()


def books_of(state: GroupState, end: int) -> GroupStatistics:
    """Return the counters of a group; `end` is the next number of its stream."""
    leased, waiting = state.map.leased(), state.map.waiting()
    return GroupStatistics(
        members=len(state.members),
        next_seq=state.map.next,
        floor=state.map.floor,
        lag=leased + waiting + max(0, end - state.map.next),
        leased=leased,
        waiting=waiting,
        acked=state.settled[Ending.ACKED],
        redelivered=state.redelivered,
        dead=state.settled[Ending.DEAD],
        lost=state.losses.total,
        reverted=state.reverted,
        losses=state.losses.ranges(),
    )


def describe_groups(folder: Path, end: int) -> list[dict[str, Any]]:
    """Describe the groups of a stream; `end` is its next number."""
    found: list[dict[str, Any]] = []
    for name in group_names(folder):
        try:
            state, alive = look(folder, name)
        except (DamagedQueue, Unsupported) as error:
            found.append({"name": name, "damage": str(error)})
            continue
        books = books_of(state, end)
        found.append(
            {
                "name": name,
                "key": state.key,
                **{field: getattr(books, field) for field in _SHOWN},
                "losses": [str(loss) for loss in books.losses],
                "members": [
                    {
                        "pid": member.pid,
                        "alive": index in alive,
                        "joined_ns": member.joined_ns,
                        "leased": sum(span.size for span in state.map.of_member(index)),
                    }
                    for index, member in sorted(state.members.items())
                ],
            }
        )
    return found


def _entry(span: Span, more: int = 0) -> tuple[int, int, int, int]:
    return span.first, span.end, span.deliveries + more, span.key
