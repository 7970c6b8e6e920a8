from __future__ import annotations

import asyncio
import threading
import time

import pytest

from penstock.core.clock import SYSTEM_CLOCK, Clock, ManualClock, SystemClock


def test_the_system_clock_tells_the_time_of_the_machine() -> None:
    before = time.time_ns()
    now = SYSTEM_CLOCK.now_ns()
    assert before <= now <= time.time_ns()


def test_the_system_clock_sleeps_for_at_least_the_time_asked() -> None:
    started = SYSTEM_CLOCK.monotonic()
    SYSTEM_CLOCK.sleep(0.002)
    asyncio.run(SYSTEM_CLOCK.sleep_async(0.002))
    assert SYSTEM_CLOCK.monotonic() - started >= 0.004


def test_a_manual_clock_stands_still_until_told() -> None:
    clock = ManualClock(now_ns=1_000)
    assert (clock.now_ns(), clock.monotonic()) == (1_000, 0.0)
    clock.advance(1.5)
    assert (clock.now_ns(), clock.monotonic()) == (1_500_001_000, 1.5)


def test_sleeping_on_a_manual_clock_moves_it_and_takes_no_time() -> None:
    clock = ManualClock()
    started = time.monotonic()
    clock.sleep(3_600)
    asyncio.run(clock.sleep_async(3_600))
    assert clock.monotonic() == 7_200
    assert time.monotonic() - started < 60


def test_sleeping_in_a_task_gives_the_other_tasks_a_turn() -> None:
    turns: list[str] = []

    async def take_turns(name: str, clock: Clock) -> None:
        for _ in range(2):
            turns.append(name)
            await clock.sleep_async(1)

    async def both() -> None:
        clock = ManualClock()
        await asyncio.gather(take_turns("a", clock), take_turns("b", clock))

    asyncio.run(both())
    assert turns == ["a", "b", "a", "b"]


def test_a_manual_clock_loses_no_move_when_threads_share_it() -> None:
    clock = ManualClock()

    def sleep_often() -> None:
        for _ in range(1_000):
            clock.sleep(0.001)

    threads = [threading.Thread(target=sleep_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now_ns() == 4_000_000_000


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_no_clock_sleeps_for_less_than_no_time(clock: Clock, seconds: float) -> None:
    with pytest.raises(ValueError):
        clock.sleep(seconds)
    with pytest.raises(ValueError):
        asyncio.run(clock.sleep_async(seconds))
