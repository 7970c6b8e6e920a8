"""Does an outbox behave as a list would, whatever is done to it in whatever order?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.clock import ManualClock
from penstock.dispatch.outbox import Entry, Item, Order, Outbox, Reason
from support.outbox_model import Known, OutboxModel

SOURCES = st.integers(0, 3)
CLASSES = st.sampled_from([0, 1, 1, 1, 6])
ENTRIES = st.builds(
    Entry,
    priority=CLASSES,
    arrival=st.just(0),
    expires_at_ms=st.sampled_from([0, 0, 5, 10, 50, 100, 1000]),
    source=SOURCES,
    type=st.integers(1, 4),
    raw=st.binary(max_size=40),
)
ORDERS = st.sampled_from(["arrival", "priority"])


class OutboxMachine(RuleBasedStateMachine):
    """Does the same to both, and compares."""

    @initialize(
        messages=st.sampled_from([5, 40, 10_000]),
        size=st.sampled_from([200, 1 << 20]),
        window=st.sampled_from([1, 3, 16, 4096]),
        starvation=st.sampled_from([1, 3, 64]),
    )
    def begin(self, messages: int, size: int, window: int, starvation: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.clock = ManualClock()
        self.options: dict[str, Any] = {
            "max_messages": messages,
            "max_bytes": size,
            "window": window,
            "window_bytes": 2000,
            "starvation": starvation,
            "segment": 1 << 16,
        }
        self.model = OutboxModel(messages, size, starvation)
        self.outbox = self._open(self.folder / "outbox")
        self.flying: list[Item] = []

    def _open(self, folder: Path) -> Outbox:
        return Outbox(folder, sync="none", clock=self.clock, **self.options)

    @rule(entries=st.lists(ENTRIES, max_size=6), settle=st.booleans())
    def append(self, entries: list[Entry], *, settle: bool) -> None:
        done = self.outbox.append(entries, settle=settle)
        outcomes = [(entry, *self.model.append(entry, 1, settle=settle)) for entry in entries]
        self.flying += [] if settle else done.evicted
        assert done.stored == sum(stored for _, stored, _, _ in outcomes)
        assert done.refused == [entry for entry, stored, _, _ in outcomes if not stored]
        self._same(done.evicted, [known for _, _, evicted, _ in outcomes for known in evicted])

    @rule(entry=ENTRIES, count=st.sampled_from([100, 700]))
    def append_many(self, entry: Entry, count: int) -> None:
        done = self.outbox.append([entry] * count)
        stored, evicted, _ = self.model.append(entry, count)
        assert done.stored == stored
        self._same(done.evicted, evicted)

    @rule(entry=ENTRIES, key=st.integers(0, 2), most=st.sampled_from([1, 1, 2, 5]))
    def append_latest(self, entry: Entry, key: int, most: int) -> None:
        done = self.outbox.append_latest(key, entry, most)
        stored, evicted, superseded = self.model.append(entry, 1, key, most)
        assert (done.stored, done.superseded) == (stored, len(superseded))
        self._same(done.evicted, evicted)

    @rule(
        limit=st.sampled_from([1, 2, 5, 300, 2000]),
        size=st.sampled_from([None, 1, 50, 100_000]),
        order=ORDERS,
        blocked=st.sets(SOURCES, max_size=2),
    )
    def take(self, limit: int, size: int | None, order: Order, blocked: set[int]) -> None:
        items = self.outbox.take(limit, size, order, blocked)
        expected = self.model.take(limit, size, order, blocked)
        self._same(items, expected)
        self.flying += items

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), reason=st.sampled_from([Reason.ACKED, Reason.PERMANENT, Reason.GONE]))
    def settle(self, data: st.DataObject, reason: Reason) -> None:
        items = self._some(data)
        assert self.outbox.settle(items, reason) == len(items)
        self.model.settle(self._known(items), reason)
        assert self.outbox.settle(items, Reason.ADMIN) == 0

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        items = self._some(data)
        self.outbox.give_back(items)
        for known in self._known(items):
            known.in_flight = known.leaving = False

    def _some(self, data: st.DataObject) -> list[Item]:
        start = data.draw(st.integers(0, len(self.flying) - 1))
        step = data.draw(st.sampled_from([1, 1, 2]))
        chosen = self.flying[start::step]
        del self.flying[start::step]
        return chosen

    def _known(self, items: list[Item]) -> list[Known]:
        places = self.model.by_place()
        return [places[item.priority, item.seq] for item in items]

    @rule(ms=st.sampled_from([1, 5, 50, 500]), settle=st.booleans())
    def expire(self, ms: int, *, settle: bool) -> None:
        self.clock.advance(ms / 1000)
        now_ms = self.clock.now_ns() // 1_000_000
        soonest = self.outbox.next_expiry_ms()
        items = self.outbox.expire(now_ms, settle=settle)
        self.flying += [] if settle else items
        expected = sorted(self.model.expire(now_ms, settle=settle), key=lambda known: known.place)
        if expected:
            assert soonest is not None
            assert soonest <= min(known.entry.expires_at_ms for known in expected)
        self._same(sorted(items), expected)

    @rule(data=st.data())
    def drop_some_that_wait(self, data: st.DataObject) -> None:
        items, _ = self.outbox.look(data.draw(st.integers(0, 50)), 3)
        flying = {(item.priority, item.seq) for item in self.flying}
        items = [item for item in items if (item.priority, item.seq) not in flying]
        assert self.outbox.settle(items, Reason.ADMIN) == len(items)
        self.model.settle(self._known(items), Reason.ADMIN)

    @rule()
    def tend(self) -> None:
        self.outbox.tend()

    @rule()
    def reopen(self) -> None:
        self.outbox.close()
        self.outbox = self._open(self.folder / "outbox")
        assert not self.outbox.findings
        self.model.restart()
        self.flying = []

    @rule()
    def look_at_what_a_kill_leaves(self) -> None:
        with self.outbox._upkeep:  # which renames and removes files meanwhile
            shutil.copytree(self.folder / "outbox", self.folder / "copy")
        with self._open(self.folder / "copy") as copy:
            books = copy.books()
            items = copy.take(1 << 30)
            assert books.stored == self.model.stored
            assert books.queued == sum(books) - 2 * books.stored + books.queued == len(items)
        shutil.rmtree(self.folder / "copy")
        assert [item.arrival for item in items] == sorted(item.arrival for item in items)
        places = {(item.priority, item.seq) for item in items}
        assert places >= {known.place for known in self.model.queued() if known.key is None}

    @invariant()
    def books_balance(self) -> None:
        books = self.outbox.books()
        assert books.stored == sum(books[1:])
        for reason in Reason:
            assert getattr(books, reason.name.lower()) == self.model.settled[reason]
        queued = self.model.queued()
        assert books.queued == len(queued)
        assert self.outbox.waiting == sum(known.waits for known in queued)
        assert self.outbox.size == sum(len(known.entry.raw) for known in queued)

    def _same(self, items: list[Item], expected: list[Known]) -> None:
        found = [(item.priority, item.seq, item.arrival, item.raw) for item in items]
        assert found == [(*known.place, known.arrival, known.entry.raw) for known in expected]

    def teardown(self) -> None:
        if hasattr(self, "outbox"):
            self.outbox.close()
            shutil.rmtree(self.folder)


def _run(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        OutboxMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=checks,
            phases=[Phase.generate],  # to make one smaller takes long, with files
        ),
    )


def test_an_outbox_behaves_as_a_list_does() -> None:
    _run(25, 20)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_an_outbox_behaves_as_a_list_does_for_long() -> None:
    _run(1000, 50)
