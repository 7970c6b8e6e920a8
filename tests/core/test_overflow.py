from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import Closed, InvalidOption, WriteTimeout
from penstock.core.overflow import (
    BoundedBuffer,
    BufferStatistics,
    DropCounts,
    DropReason,
    OverflowPolicy,
    QueueFull,
)


def adds_up(statistics: BufferStatistics) -> bool:
    left = statistics.delivered + sum(statistics.dropped.values()) + statistics.held
    return statistics.accepted == left


def full_buffer(policy: OverflowPolicy) -> BoundedBuffer[int]:
    buffer = BoundedBuffer[int](2, policy)
    assert buffer.put(1)
    assert buffer.put(2)
    return buffer


def test_drop_oldest_makes_room_for_the_new() -> None:
    buffer = full_buffer(OverflowPolicy.DROP_OLDEST)
    assert buffer.put(3)
    assert buffer.get_many(10) == [2, 3]
    assert buffer.statistics().dropped == {DropReason.OVERFLOW_OLDEST: 1}


def test_drop_newest_keeps_what_waits_and_tells_the_writer() -> None:
    buffer = full_buffer(OverflowPolicy.DROP_NEWEST)
    assert not buffer.put(3)
    assert buffer.get_many(10) == [1, 2]
    assert buffer.statistics().dropped == {DropReason.OVERFLOW_NEWEST: 1}


def test_fail_raises_at_once_and_leaves_the_message_with_the_writer() -> None:
    buffer = full_buffer(OverflowPolicy.FAIL)
    with pytest.raises(QueueFull) as caught:
        buffer.put(3)
    assert caught.value.capacity == 2
    assert buffer.statistics() == BufferStatistics(2, 0, {}, held=2, refused=1)
    assert buffer.get() == 1
    assert buffer.put(3)


@pytest.mark.parametrize("timeout", [0, 0.002])
def test_block_raises_once_the_time_is_over_and_leaves_the_message_with_the_writer(
    timeout: float,
) -> None:
    buffer = full_buffer(OverflowPolicy.BLOCK)
    with pytest.raises(WriteTimeout):
        buffer.put(3, timeout)
    assert buffer.statistics() == BufferStatistics(2, 0, {}, held=2, refused=1)


def test_block_waits_until_a_reader_makes_room() -> None:
    buffer = full_buffer(OverflowPolicy.BLOCK)
    writer = threading.Thread(target=buffer.put, args=(3,))
    writer.start()
    assert [buffer.get(), buffer.get(), buffer.get()] == [1, 2, 3]
    writer.join()
    assert buffer.statistics() == BufferStatistics(3, 3, {}, held=0, refused=0)


def test_reading_an_empty_buffer_ends_with_the_timeout() -> None:
    buffer = BoundedBuffer[int](2, OverflowPolicy.BLOCK)
    assert buffer.get(timeout=0) is None
    assert buffer.get_many(5, timeout=0.001) == []


def test_a_waiting_reader_gets_what_comes() -> None:
    buffer = BoundedBuffer[int](2, OverflowPolicy.BLOCK)
    got: list[int | None] = []
    reader = threading.Thread(target=lambda: got.append(buffer.get()))
    reader.start()
    buffer.put(7)
    reader.join()
    assert got == [7]


def test_a_batch_is_no_larger_than_asked() -> None:
    buffer = full_buffer(OverflowPolicy.BLOCK)
    assert buffer.get_many(1) == [1]
    assert len(buffer) == 1


def test_a_closed_buffer_gives_what_it_holds_and_takes_no_more() -> None:
    buffer = full_buffer(OverflowPolicy.DROP_OLDEST)
    buffer.close()
    with pytest.raises(Closed):
        buffer.put(3)
    assert buffer.get_many(10) == [1, 2]
    with pytest.raises(Closed):
        buffer.get()
    assert buffer.statistics() == BufferStatistics(2, 2, {}, held=0, refused=1)


def test_closing_wakes_everyone_who_waits() -> None:
    full = full_buffer(OverflowPolicy.BLOCK)
    empty = BoundedBuffer[int](1, OverflowPolicy.BLOCK)
    woken: list[str] = []

    def write() -> None:
        with pytest.raises(Closed):
            full.put(3)
        woken.append("writer")

    def read() -> None:
        with pytest.raises(Closed):
            empty.get()
        woken.append("reader")

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    full.close()
    empty.close()
    for thread in threads:
        thread.join()
    assert sorted(woken) == ["reader", "writer"]


def test_a_buffer_without_room_for_anything_is_refused() -> None:
    with pytest.raises(InvalidOption):
        BoundedBuffer[int](0, OverflowPolicy.BLOCK)


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_the_counts_add_up_and_nothing_is_lost_or_doubled_between_threads(
    policy: OverflowPolicy,
) -> None:
    buffer = BoundedBuffer[tuple[int, int]](16, policy)
    each, writers, readers = 2_000, 4, 3
    taken: list[list[tuple[int, int]]] = [[] for _ in range(readers)]
    snapshots: list[BufferStatistics] = []

    def write(writer: int) -> None:
        for n in range(each):
            while True:
                try:
                    buffer.put((writer, n))
                except QueueFull:
                    continue
                break

    def read(reader: int) -> None:
        try:
            while True:
                taken[reader] += buffer.get_many(5)
                snapshots.append(buffer.statistics())
        except Closed:
            pass

    writing = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    reading = [threading.Thread(target=read, args=(n,)) for n in range(readers)]
    for thread in writing + reading:
        thread.start()
    for thread in writing:
        thread.join()
    buffer.close()
    for thread in reading:
        thread.join()

    statistics = buffer.statistics()
    assert all(map(adds_up, [*snapshots, statistics]))
    everything = [item for items in taken for item in items]
    assert len(everything) == len(set(everything)) == statistics.delivered
    assert (statistics.accepted, statistics.held) == (each * writers, 0)
    if policy in {OverflowPolicy.BLOCK, OverflowPolicy.FAIL}:
        assert statistics.delivered == each * writers
    for items in taken:
        for writer in range(writers):
            order = [n for who, n in items if who == writer]
            assert order == sorted(order)


class BufferMachine(RuleBasedStateMachine):
    """One thread against a model: a deque and five numbers."""

    @initialize(capacity=st.integers(1, 5), policy=st.sampled_from(OverflowPolicy))
    def create(self, capacity: int, policy: OverflowPolicy) -> None:
        self.buffer = BoundedBuffer[int](capacity, policy)
        self.model: deque[int] = deque()
        self.offered = self.accepted = self.delivered = self.refused = 0
        self.dropped: dict[DropReason, int] = {}
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule()
    def put(self) -> None:
        self.offered += 1
        room = len(self.model) < self.buffer.capacity
        match self.buffer.policy:
            case OverflowPolicy.BLOCK if not room:
                with pytest.raises(WriteTimeout):
                    self.buffer.put(self.offered, timeout=0)
                self.refused += 1
                return
            case OverflowPolicy.FAIL if not room:
                with pytest.raises(QueueFull):
                    self.buffer.put(self.offered)
                self.refused += 1
                return
            case OverflowPolicy.DROP_NEWEST if not room:
                assert not self.buffer.put(self.offered)
                self.drop(DropReason.OVERFLOW_NEWEST)
            case _:
                assert self.buffer.put(self.offered, timeout=0)
                self.model.append(self.offered)
                if not room:
                    self.model.popleft()
                    self.drop(DropReason.OVERFLOW_OLDEST)
        self.accepted += 1

    def drop(self, reason: DropReason) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @precondition(lambda self: self.closed)
    @rule()
    def put_after_closing(self) -> None:
        with pytest.raises(Closed):
            self.buffer.put(0)
        self.refused += 1

    @rule(limit=st.integers(1, 6))
    def get_many(self, limit: int) -> None:
        expected = [self.model.popleft() for _ in range(min(limit, len(self.model)))]
        if self.closed and not expected:
            with pytest.raises(Closed):
                self.buffer.get_many(limit, timeout=0)
        else:
            assert self.buffer.get_many(limit, timeout=0) == expected
        self.delivered += len(expected)

    @rule()
    def close(self) -> None:
        self.buffer.close()
        self.closed = True

    @invariant()
    def the_books_are_right(self) -> None:
        statistics = self.buffer.statistics()
        assert adds_up(statistics)
        assert statistics == BufferStatistics(
            self.accepted, self.delivered, self.dropped, len(self.model), self.refused
        )


TestBufferAgainstItsModel = BufferMachine.TestCase


def test_drops_are_counted_by_reason() -> None:
    counts = DropCounts()
    counts.add(DropReason.EXPIRED)
    counts.add(DropReason.OVERRUN, 41)
    counts.add(DropReason.DAMAGED, 0)
    assert counts.total == 42
    assert counts.as_dict() == {DropReason.EXPIRED: 1, DropReason.OVERRUN: 41}


def test_a_drop_cannot_be_taken_back() -> None:
    counts = DropCounts()
    with pytest.raises(ValueError):
        counts.add(DropReason.EXPIRED, -1)
    assert counts.total == 0


def test_no_drop_goes_uncounted_between_threads() -> None:
    counts = DropCounts()

    def drop_often() -> None:
        for _ in range(5_000):
            counts.add(DropReason.OVERRUN)

    threads = [threading.Thread(target=drop_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.total == 20_000
