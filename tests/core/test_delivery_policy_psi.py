"""Each sentence of docs/specs/psi.md 8 holds for our policies."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import ManualClock
from penstock.core.delivery_policy import DeliveryPolicy, DeliveryQueue
from penstock.core.errors import WriteTimeout
from penstock.core.overflow import DropReason
from support.waiting import SOON, background, waits

SECOND = 1_000_000_000
P = DeliveryPolicy


@pytest.mark.parametrize(
    ("policy", "max_size", "latency", "throttle_at", "is_synchronous"),
    [
        (P.UNLIMITED, None, None, None, False),
        (P.LATEST_MESSAGE, 1, None, None, False),
        (P.THROTTLE, None, None, 1, False),
        (P.SYNCHRONOUS_OR_THROTTLE, None, None, 1, True),
        (P.queue_size_constrained(7), 7, None, None, False),
        (P.queue_size_constrained(7, throttle_when_full=True), 7, None, 7, False),
        (P.queue_size_constrained(7, is_synchronous=True), 7, None, None, True),
        (P.queue_size_throttled(7), None, None, 7, False),
        (P.latency_constrained(0.5), None, 0.5, None, False),
    ],
)
def test_the_table_of_policies(
    policy: DeliveryPolicy,
    max_size: int | None,
    latency: float | None,
    throttle_at: int | None,
    is_synchronous: bool,
) -> None:
    assert (policy.max_size, policy.max_latency) == (max_size, latency)
    assert (policy.throttle_at, policy.is_synchronous) == (throttle_at, is_synchronous)
    assert DeliveryPolicy.parse(str(policy)) == policy


@given(size=st.integers(1, 5), items=st.lists(st.integers(), max_size=30))
def test_when_full_at_enqueue_the_oldest_is_dropped_and_then_the_new_one_added(
    size: int, items: list[int]
) -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(P.queue_size_constrained(size))
    for item in items:
        assert queue.put(item, 0)
    assert queue.get_many(100, 0) == items[-size:] if items else True
    dropped = queue.statistics().dropped.get(DropReason.OVERFLOW_OLDEST, 0)
    assert dropped == max(0, len(items) - size)


def test_latency_is_checked_at_dequeue_and_not_before_and_then_the_next_is_tried() -> None:
    clock = ManualClock(10 * SECOND)
    queue: DeliveryQueue[int] = DeliveryQueue(
        P.latency_constrained(1), time_of=lambda item: item, clock=clock
    )
    queue.put(2 * SECOND)  # far too old already, and it waits all the same
    queue.put(9 * SECOND - 1)  # by one nanosecond above the limit
    queue.put(9 * SECOND)  # exactly the limit is not above it
    assert (len(queue), queue.statistics().dropped) == (3, {})
    assert queue.get(0) == 9 * SECOND
    assert queue.statistics().dropped == {DropReason.EXPIRED: 2}


def test_the_sender_is_locked_when_the_count_reaches_the_threshold_until_it_falls_below() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(P.queue_size_throttled(3))
    for item in range(3):
        assert not queue.is_throttled
        queue.put(item, 0)  # the one that reaches it is taken
    assert queue.is_throttled
    with pytest.raises(WriteTimeout):
        queue.put(9, 0)
    with background(queue.put, 3) as putting:
        assert waits(putting)
        queue.get(0)
        assert putting.result(SOON)
    assert queue.get_many(9, 0) == [1, 2, 3]
    assert not queue.statistics().dropped  # nothing is dropped


def test_a_synchronous_attempt_queues_nothing_if_the_queue_is_empty_and_the_receiver_free() -> None:
    here: list[int] = []
    queue: DeliveryQueue[int] = DeliveryQueue(
        P.queue_size_constrained(2, is_synchronous=True),
        receive=lambda _: here.append(threading.get_ident()),
    )
    assert queue.put(1)
    assert here == [threading.get_ident()]
    assert len(queue) == 0


def test_otherwise_it_is_queued_and_throttled_and_none_overtakes_those_that_wait() -> None:
    go, ran = threading.Event(), []

    def receive(item: int) -> None:
        ran.append(item)
        assert go.wait(SOON)

    queue: DeliveryQueue[int] = DeliveryQueue(P.SYNCHRONOUS_OR_THROTTLE, receive=receive)
    with background(queue.put, 1) as first:
        while not ran:
            assert waits(first)
        assert queue.put(2, 0)  # the receiver's lock is taken: it waits in the queue
        assert queue.is_throttled
        with pytest.raises(WriteTimeout):
            queue.put(3, 0)
        go.set()
        assert first.result(SOON)
    with pytest.raises(WriteTimeout):
        queue.put(3, 0)  # the receiver is free, the queue is not empty
    assert queue.receive(0)
    assert queue.put(3, 0)
    assert ran == [1, 2, 3]


@given(
    size=st.integers(1, 4),
    items=st.lists(st.tuples(st.booleans(), st.sampled_from(["put", "get"])), max_size=60),
)
def test_with_guarantees_is_as_psi_has_it(size: int, items: list[tuple[bool, str]]) -> None:
    """A model of the sentence, word by word, beside the queue."""
    policy = P.queue_size_constrained(size).with_guarantees(lambda item: item[0])
    queue: DeliveryQueue[tuple[bool, int]] = DeliveryQueue(policy)
    model: list[tuple[bool, int]] = []
    for number, (is_guaranteed, what) in enumerate(items):
        if what == "get":
            assert queue.get(0) == (model.pop(0) if model else None)
            continue
        item = (is_guaranteed, number)
        is_taken = True
        if len(model) >= size:
            droppable = next((each for each in model if not each[0]), None)
            if droppable is not None:
                model.remove(droppable)
            elif not is_guaranteed:
                is_taken = False
        if is_taken:
            model.append(item)
        assert queue.put(item, 0) == is_taken
        assert len(queue) == len(model)
        assert len(model) <= size or all(guaranteed for guaranteed, _ in model)
    assert queue.get_many(100, 0) == model
    books = queue.statistics()
    assert books.accepted == books.delivered + sum(books.dropped.values()) + books.held


def test_a_guarantee_holds_for_latency_too_and_another_one_does_not_end_it() -> None:
    policy = P.latency_constrained(1).with_guarantees(lambda item: item == 1)
    policy = policy.with_guarantees(lambda item: item == 3)
    queue: DeliveryQueue[int] = DeliveryQueue(
        policy, time_of=lambda item: item, clock=ManualClock(100 * SECOND)
    )
    for item in (1, 2, 3):
        queue.put(item)
    assert queue.get_many(9, 0) == [1, 3]


@pytest.mark.parametrize("text", ["latest", "queue-size:2", "latency:1ms", "throttle"])
def test_the_closing_message_is_never_dropped_and_removes_what_is_later(text: str) -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(
        P.parse(text), time_of=lambda item: item, clock=ManualClock(0)
    )
    queue.put(8 * SECOND)
    queue.put_last(5 * SECOND)  # throttles nobody, and needs no room
    assert queue.get_many(9, 0) == [5 * SECOND]
    assert queue.statistics().dropped == {DropReason.AFTER_END: 1}
