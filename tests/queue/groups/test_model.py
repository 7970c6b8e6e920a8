"""A group as a state machine: whatever its members do, the map is that of a plain model."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import LeaseLost
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.overflow import DropReason
from penstock.queue.groups import state_file
from penstock.queue.groups.leases import Leases
from penstock.queue.groups.settled import NOBODY, SettledMap, Span, runs_of
from penstock.queue.groups.state import Ending, GroupState
from penstock.queue.groups.state_file import StateFile

SECOND: Final = 1_000_000_000
LEASE: Final = 10
DELIVERIES: Final = 3
KEYS: Final = 3


@dataclass
class Known:
    """A message that somebody was given."""

    deliveries: int = 0
    member: int = NOBODY
    until: int = 0
    ending: str = ""


class GroupMachine(RuleBasedStateMachine):
    """Members come, take, settle and die; the power fails; the journal is replaced often."""

    keyed = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/dev/shm"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(state_file, "_LONGEST_JOURNAL", 600)
        self.patch.setattr(state_file, "_TIMES_CHECKPOINT", 0)
        self.now = 1000 * SECOND
        self.epoch = 1
        self.lineage: list[Ancestor] = []
        self.end = 0
        #: What was given, in order; behind it all is fresh.
        self.known: list[Known] = []
        self.members: dict[int, Leases] = {}
        self.dead: set[int] = set()
        self.acked = self.reverted = self.redelivered = self.buried = self.lost = 0

    # --- the model ---------------------------------------------------------------------------

    def _reclaim(self, taker: int) -> None:
        for known in self.known:
            if known.member in self.dead and known.member != taker:
                known.member, known.until = NOBODY, 0
        self.dead.discard(taker)
        self.dead.clear()

    def _open(self) -> list[tuple[int, Known]]:
        return [(seq, known) for seq, known in enumerate(self.known) if not known.ending]

    def _is_held(self, known: Known) -> bool:
        return known.member != NOBODY and known.until > self.now

    def _key(self, seq: int) -> int:
        return seq % KEYS if self.keyed else 0

    # --- what happens ------------------------------------------------------------------------

    @rule(count=st.integers(1, 30))
    def append(self, count: int) -> None:
        self.end += count

    @rule(seconds=st.integers(1, LEASE + 2))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @precondition(lambda self: len(self.members) < 4)
    @rule()
    def join(self) -> None:
        begin = GroupState(self.epoch, SettledMap(0), "type" if self.keyed else None)
        file = StateFile(self.folder, "g", lambda: begin)
        leases = Leases(file, lease=LEASE, deliveries=DELIVERIES, now=lambda: self.now)
        assert leases.me not in self.members
        for known in self.known:
            if known.member in self.dead:
                known.member, known.until = NOBODY, 0
        self.dead.clear()
        self.members[leases.me] = leases

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """End a member as SIGKILL does: the kernel closes its files, and that is all."""
        member = data.draw(st.sampled_from(sorted(self.members)))
        self.members.pop(member)._file.close()
        self.dead.add(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.members)))
        self.members.pop(member).close()
        for _, known in self._open():
            if known.member == member:
                known.member, known.until = NOBODY, 0

    @precondition(lambda self: self.members)
    @rule(data=st.data(), limit=st.integers(1, 25))
    def take(self, data: st.DataObject, limit: int) -> None:
        member = data.draw(st.sampled_from(sorted(self.members)))
        leases = self.members[member]
        leases._look_at = 0
        keys = self._fresh_keys if self.keyed else None
        taken = leases.take(limit, self.end, {self.epoch}, keys)
        assert taken is not None
        self._reclaim(member)
        numbers = [seq for span in taken.spans for seq in range(span.first, span.end)]
        dying = [seq for span in taken.dying for seq in range(span.first, span.end)]
        if self.keyed:
            self._check_order(member, numbers)
            for _ in range(len(self.known), leases.next):
                self.known.append(Known())
        else:
            due = [(seq, known) for seq, known in self._open() if known.until <= self.now]
            assert dying == [seq for seq, known in due if known.deliveries >= DELIVERIES]
            again = [seq for seq, known in due if known.deliveries < DELIVERIES][:limit]
            fresh = range(len(self.known), min(self.end, len(self.known) + limit - len(again)))
            assert numbers == [*again, *fresh]
            self.known += [Known() for _ in fresh]
        assert len(numbers) <= limit
        for seq in (*numbers, *dying):
            known = self.known[seq]
            assert not known.ending
            assert not self._is_held(known), "two members have a lease of it"
            known.member, known.until = member, self.now + LEASE * SECOND
        for seq in numbers:
            self.known[seq].deliveries += 1
            self.redelivered += self.known[seq].deliveries > 1
        if dying:
            leases.bury(taken.dying)
            for seq in dying:
                self.known[seq].ending = "dead"
            self.buried += len(dying)

    def _fresh_keys(self, first: int, limit: int) -> list[tuple[int, int]]:
        return [(seq, self._key(seq)) for seq in range(first, min(first + limit, self.end))]

    def _check_order(self, member: int, numbers: list[int]) -> None:
        """Whatever is taken, all before it of its key is settled or with the same member."""
        mine = set(numbers)
        for seq in numbers:
            for earlier in range(seq % KEYS, min(seq, len(self.known)), KEYS):
                known = self.known[earlier]
                is_out_of_the_way = known.ending or known.member == member or earlier in mine
                # One that is delivered too often goes to the dead letters before the others.
                assert is_out_of_the_way or known.deliveries >= DELIVERIES, (seq, earlier)
            others = {
                known.member
                for other, known in self._open()
                if other % KEYS == seq % KEYS and self._is_held(known)
            }
            assert others <= {member}

    @precondition(lambda self: self.members and self.known)
    @rule(data=st.data(), acks=st.booleans(), delay=st.sampled_from((0, 0, 1, 7)))
    def settle(self, data: st.DataObject, acks: bool, delay: int) -> None:
        member = data.draw(st.sampled_from(sorted(self.members)))
        numbers = data.draw(st.lists(st.integers(0, len(self.known) - 1), max_size=20))
        own = [seq for seq, known in self._open() if known.member == member]
        if data.draw(st.booleans()):
            numbers += own[: data.draw(st.integers(0, len(own)))]
        leases = self.members[member]
        refused = sorted(set(numbers) - set(own))
        told: list[int] = []
        try:
            ranges = runs_of(numbers)
            leases.ack(ranges) if acks else leases.nack(ranges, delay)
        except LeaseLost as error:
            told = [seq for first, last in error.ranges for seq in range(first, last + 1)]
        assert told == refused
        for seq in set(numbers) & set(own):
            known = self.known[seq]
            known.member, known.until = NOBODY, self.now + delay * SECOND
            known.ending = "acked" if acks else ""
            self.acked += acks

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Retention removes the oldest messages, and a member finds out."""
        oldest = data.draw(st.integers(0, self.end))
        leases = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        found = leases.lose([], oldest, DropReason.RETENTION)
        gone = [
            seq
            for seq in range(oldest)
            if seq >= len(self.known)
            or (not self.known[seq].ending and self.known[seq].member == NOBODY)
        ]
        assert sorted(seq for loss in found for seq in range(loss.first, loss.last + 1)) == gone
        self.known += [Known() for _ in range(len(self.known), oldest)]
        for seq in gone:
            self.known[seq].ending = "lost"
        self.lost += len(gone)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """The power fails: what lies beyond the cut is numbered anew."""
        cut = data.draw(st.integers(max(0, self.end - 20), self.end))
        self.lineage.append(Ancestor(self.epoch, cut))
        self.epoch += 1
        bounds = Bounds(self.epoch, 0, cut, tuple(self.lineage))
        leases = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        assert leases.take(1, self.end, {self.epoch}) is None, "numbers of another epoch"
        leases.renumber(lambda: (bounds, 0, 0))
        self.end = cut
        self.reverted += sum(bool(known.ending) for known in self.known[cut:])
        del self.known[cut:]

    @precondition(lambda self: self.members)
    @rule(data=st.data(), garbage=st.binary(min_size=1, max_size=40))
    def tear(self, data: st.DataObject, garbage: bytes) -> None:
        """Somebody dies while it writes a record."""
        del data
        path = self.folder / "g.state"
        with path.open("ab") as file:
            file.write(garbage)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A turn fails: the member reads all of the file again."""
        self.members[data.draw(st.sampled_from(sorted(self.members)))]._file._is_stale = True

    # --- what holds --------------------------------------------------------------------------

    @invariant()
    def the_map_is_that_of_the_model(self) -> None:
        if not self.members:
            return
        leases = next(iter(self.members.values()))
        with leases._file.turn() as state:
            found = {
                seq: (span.deliveries, span.member)
                for span in state.map.spans
                for seq in range(span.first, span.end)
            }
            assert state.map.next == len(self.known)
            spans = state.map.spans
        assert found == {seq: (k.deliveries, k.member) for seq, k in self._open()}
        assert all(a.end <= b.first for a, b in itertools.pairwise(spans))
        assert not any(b.follows(a) for a, b in itertools.pairwise(spans))
        books = leases.statistics(self.end)
        assert (books.acked, books.dead, books.lost) == (self.acked, self.buried, self.lost)
        assert (books.redelivered, books.reverted) == (self.redelivered, self.reverted)
        assert books.leased + books.waiting == len(found)
        assert books.lag == len(found) + self.end - len(self.known)

    def teardown(self) -> None:
        for leases in self.members.values():
            leases.close()
        self.patch.undo()
        shutil.rmtree(self.folder)


class OrderedMachine(GroupMachine):
    """The same with an order of messages by a key."""

    keyed = True


SMALL = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LARGE = settings(SMALL, max_examples=1500, stateful_step_count=80)


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(LARGE, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("machine", [GroupMachine, OrderedMachine])
def test_a_group_is_as_the_model_says(machine: type[GroupMachine], size: settings) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=size)


def test_numbers_become_ranges() -> None:
    assert runs_of([]) == []
    assert runs_of([3, 4, 5]) == [(3, 6)]
    assert runs_of([5, 3, 4, 9, 9]) == [(3, 6), (9, 10)]
    assert runs_of([3, 9, 5]) == [(3, 4), (5, 6), (9, 10)]


def test_a_map_of_many_settled_messages_is_small() -> None:
    settled = SettledMap()
    for first in range(0, 1_000_000, 1000):
        settled.put(Span(first, first + 1000, 1, 0, 5))
        settled.settle(first, first + 999)
    assert len(settled.spans) == 1000
    for first in range(0, 1_000_000, 1000):
        settled.settle(first + 999, first + 1000)
    assert (settled.spans, settled.floor, settled.next) == ([], 1_000_000, 1_000_000)


def test_every_loss_has_an_ending() -> None:
    for ending in Ending:
        assert ending.loss is None or Ending.of(ending.loss) is ending
