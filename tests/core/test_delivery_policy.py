from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import ManualClock
from penstock.core.delivery_policy import DeliveryPolicy, DeliveryQueue
from penstock.core.errors import Closed, InvalidOption, WriteTimeout
from penstock.core.overflow import DropReason
from support.waiting import SOON, background, waits

SECOND = 1_000_000_000


def queue_of(text: str) -> DeliveryQueue[int]:
    return DeliveryQueue(DeliveryPolicy.parse(text), time_of=lambda item: item)


def books_add_up(queue: DeliveryQueue[int]) -> bool:
    books = queue.statistics()
    return books.accepted == books.delivered + sum(books.dropped.values()) + books.held


def test_unlimited_holds_everything_in_order() -> None:
    queue = queue_of("unlimited")
    assert all(queue.put(i, 0) for i in range(10_000))
    assert queue.get_many(20_000, 0) == list(range(10_000))
    assert not queue.statistics().dropped


def test_latest_keeps_the_newest_and_counts_the_rest() -> None:
    queue = queue_of("latest")
    for i in range(10):
        assert queue.put(i)
    assert queue.get_many(10, 0) == [9]
    assert queue.statistics().dropped == {DropReason.OVERFLOW_OLDEST: 9}
    assert books_add_up(queue)


def test_a_constrained_queue_drops_the_oldest() -> None:
    queue = queue_of("queue-size:3")
    for i in range(5):
        queue.put(i)
    assert queue.get_many(10, 0) == [2, 3, 4]
    assert queue.statistics().dropped == {DropReason.OVERFLOW_OLDEST: 2}


@pytest.mark.parametrize(
    ("policy", "most"), [("throttle", 1), ("queue-throttled:3", 3), ("queue-size:3:throttle", 3)]
)
def test_a_throttled_sender_waits_and_nothing_is_dropped(policy: str, most: int) -> None:
    queue = queue_of(policy)
    for i in range(most):
        assert not queue.is_throttled
        queue.put(i, 0)
    assert queue.is_throttled
    with pytest.raises(WriteTimeout):
        queue.put(99, 0.01)
    with background(queue.put, most) as putting:
        assert waits(putting)
        assert queue.get(0) == 0
        assert putting.result(SOON)
    assert queue.get_many(10, 0) == list(range(1, most + 1))
    assert queue.statistics() == (most + 1, most + 1, {}, 0, 1)


def test_what_is_too_old_when_its_turn_comes_is_dropped() -> None:
    clock = ManualClock(100 * SECOND)
    queue: DeliveryQueue[int] = DeliveryQueue(
        DeliveryPolicy.parse("latency:2s"), time_of=lambda item: item * SECOND, clock=clock
    )
    for second in (97, 98, 99, 100):
        queue.put(second)
    # Exactly the limit is not above it.
    assert queue.get_many(10, 0) == [98, 99, 100]
    queue.put(99)
    clock.advance(2)
    assert queue.get_many(10, 0) == []
    assert queue.statistics().dropped == {DropReason.EXPIRED: 2}
    assert books_add_up(queue)


def test_a_guaranteed_message_is_never_dropped_by_size() -> None:
    policy = DeliveryPolicy.queue_size_constrained(2).with_guarantees(lambda item: item >= 100)
    queue: DeliveryQueue[int] = DeliveryQueue(policy)
    assert queue.put(100)
    assert queue.put(1)
    assert queue.put(2)  # the oldest that may go is 1
    assert queue.put(101)  # then 2
    assert not queue.put(3)  # nothing may go but itself
    assert queue.put(102)  # above the size
    assert not queue.put(4)
    assert queue.get_many(10, 0) == [100, 101, 102]
    assert queue.statistics().dropped == {
        DropReason.OVERFLOW_OLDEST: 2,
        DropReason.OVERFLOW_NEWEST: 2,
    }
    assert books_add_up(queue)


def test_a_guaranteed_message_is_never_dropped_by_age() -> None:
    policy = DeliveryPolicy.latency_constrained(1).with_guarantees(lambda item: item == 5)
    queue: DeliveryQueue[int] = DeliveryQueue(
        policy, time_of=lambda item: item * SECOND, clock=ManualClock(100 * SECOND)
    )
    for second in (4, 5, 6):
        queue.put(second)
    assert queue.get_many(10, 0) == [5]


def test_the_last_message_removes_what_happened_after_it_and_stays() -> None:
    queue = queue_of("queue-size:3")
    for i in (5, 7, 9):
        queue.put(i)
    queue.put_last(6)
    for i in (1, 2, 3):
        queue.put(i)
    assert queue.get_many(10, 0) == [6, 2, 3]
    dropped = queue.statistics().dropped
    assert dropped == {DropReason.AFTER_END: 2, DropReason.OVERFLOW_OLDEST: 2}
    assert books_add_up(queue)


def test_a_free_receiver_runs_on_the_senders_thread() -> None:
    ran: list[tuple[int, int]] = []
    queue: DeliveryQueue[int] = DeliveryQueue(
        DeliveryPolicy.SYNCHRONOUS_OR_THROTTLE,
        receive=lambda item: ran.append((item, threading.get_ident())),
    )
    queue.put(1)
    assert ran == [(1, threading.get_ident())]
    assert queue.statistics() == (1, 1, {}, 0, 0)


def test_a_busy_receiver_makes_it_queue_and_throttle() -> None:
    go, ran = threading.Event(), []

    def receive(item: int) -> None:
        if item == 1:
            assert go.wait(SOON)
        ran.append(item)

    queue: DeliveryQueue[int] = DeliveryQueue(
        DeliveryPolicy.SYNCHRONOUS_OR_THROTTLE, receive=receive
    )
    with background(queue.put, 1) as first:
        assert waits(first)
        assert queue.put(2, 0)  # waits in the queue
        with pytest.raises(WriteTimeout):
            queue.put(3, 0.01)
        go.set()
        first.result(SOON)
    assert queue.receive(0)
    assert not queue.receive(0)
    assert ran == [1, 2]
    assert books_add_up(queue)


def test_closing_wakes_a_throttled_sender_and_leaves_what_is_held() -> None:
    queue = queue_of("throttle")
    queue.put(1)
    with background(queue.put, 2) as putting:
        assert waits(putting)
        queue.close()
        with pytest.raises(Closed):
            putting.result(SOON)
    assert queue.get(0) == 1
    with pytest.raises(Closed):
        queue.get(0)


def test_many_threads_lose_nothing_unaccounted() -> None:
    queue = queue_of("queue-size:50")
    got: list[int] = []

    def take() -> None:
        try:
            while True:
                got.extend(queue.get_many(10))
        except Closed:
            pass

    taker = threading.Thread(target=take)
    putters = [
        threading.Thread(target=lambda: [queue.put(i) for i in range(2000)]) for _ in range(3)
    ]
    for thread in (taker, *putters):
        thread.start()
    for thread in putters:
        thread.join()
    queue.close()
    taker.join()
    books = queue.statistics()
    assert books.accepted == 6000
    assert len(got) == books.delivered
    assert books_add_up(queue)


def test_a_wait_for_something_fresh_ends_in_time() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(
        DeliveryPolicy.latency_constrained(0), time_of=lambda _: 0
    )
    queue.put(1)
    began = time.monotonic()
    assert queue.get(0.05) is None
    assert time.monotonic() - began < SOON
    assert queue.statistics().dropped == {DropReason.EXPIRED: 1}


@pytest.mark.parametrize(
    "text",
    ["unlimited", "latest", "throttle", "synchronous", "queue-size:7", "queue-size:7:throttle",
     "queue-throttled:9", "latency:500ms"],
)  # fmt: skip
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    assert str(DeliveryPolicy.parse(text)) == text
    assert DeliveryPolicy.parse(f" {text.upper()} ") == DeliveryPolicy.parse(text)


@given(st.text(alphabet="xyz:09- é", max_size=30))
def test_any_other_text_is_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        DeliveryPolicy.parse(text)
    assert caught.value.option == "policy"
    assert "queue-size:N" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["queue-size:0", "queue-size", "latency:-1s", "latest:3", "", "x"])
def test_a_policy_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        DeliveryPolicy.parse(text)


@pytest.mark.parametrize(
    ("text", "can"),
    [("unlimited", False), ("latest", True), ("queue-size:3", True), ("latency:1s", True),
     ("queue-size:3:throttle", False), ("throttle", False)],
)  # fmt: skip
def test_a_policy_says_whether_it_can_drop(text: str, can: bool) -> None:
    assert DeliveryPolicy.parse(text).can_drop is can


def test_a_limit_of_latency_needs_to_know_the_time_of_a_message() -> None:
    with pytest.raises(InvalidOption):
        DeliveryQueue(DeliveryPolicy.latency_constrained(1))
