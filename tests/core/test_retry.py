from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import ManualClock
from penstock.core.errors import InvalidOption
from penstock.core.retry import Backoff, OnRetry, RetryPolicy, Scarcity, retry, retry_async

STEADY = Backoff(jitter=0)
MQTT = Backoff(table=(0.5, 1, 2, 4, 10), jitter=0)

#: `retry`, and `retry_async` in a loop of its own: what one does the other does.
Retry = Callable[
    [Callable[[], str], RetryPolicy, ManualClock, OnRetry | None, random.Random | None], str
]


def run_async(
    call: Callable[[], str],
    policy: RetryPolicy,
    clock: ManualClock,
    on_retry: OnRetry | None,
    rng: random.Random | None,
) -> str:
    async def awaited() -> str:
        await asyncio.sleep(0)
        return call()

    return asyncio.run(retry_async(awaited, policy, clock, on_retry, rng))


both_ways = pytest.mark.parametrize("run", [retry, run_async])


class Flaky:
    """Fails as often as told, then works."""

    def __init__(self, failures: int, error: type[Exception] = ConnectionError) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "done"


def test_delays_double_up_to_the_maximum() -> None:
    delays = list(islice(STEADY.delays(random.Random(0)), 9))
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])


def test_the_maximum_holds_however_many_attempts_were_made() -> None:
    assert STEADY.delay(1_000_000, random.Random(0)) == 10


def test_a_table_gives_its_delays_and_repeats_the_last() -> None:
    assert list(islice(MQTT.delays(random.Random(0)), 7)) == [0.5, 1, 2, 4, 10, 10, 10]


@given(st.integers(1, 100), st.floats(0, 1), st.integers())
def test_jitter_only_shortens_and_by_no_more_than_its_fraction(
    attempt: int, jitter: float, seed: int
) -> None:
    full = STEADY.delay(attempt, random.Random(0))
    spread = Backoff(jitter=jitter).delay(attempt, random.Random(seed))
    assert full * (1 - jitter) * (1 - 1e-9) <= spread <= full


def test_the_same_seed_gives_the_same_delays_and_leaves_global_randomness_alone() -> None:
    state = random.getstate()
    first = list(islice(Backoff().delays(random.Random(7)), 20))
    assert list(islice(Backoff().delays(random.Random(7)), 20)) == first
    retry(Flaky(1), RetryPolicy(retry_on=(ConnectionError,)), ManualClock())
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("initial", lambda: Backoff(initial=0)),
        ("initial", lambda: Backoff(initial=float("nan"))),
        ("factor", lambda: Backoff(factor=0.5)),
        ("maximum", lambda: Backoff(initial=2, maximum=1)),
        ("maximum", lambda: Backoff(maximum=float("inf"))),
        ("jitter", lambda: Backoff(jitter=1.1)),
        ("table", lambda: Backoff(table=(1, -1))),
        ("max_attempts", lambda: RetryPolicy(retry_on=(), max_attempts=0)),
        ("max_elapsed", lambda: RetryPolicy(retry_on=(), max_elapsed=-1)),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(option: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidOption) as caught:
        make()
    assert caught.value.option == option


@both_ways
def test_a_call_that_works_is_made_once_and_never_waits(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(0)
    assert run(call, RetryPolicy(retry_on=(Exception,)), clock, None, None) == "done"
    assert (call.calls, clock.monotonic()) == (1, 0)


@both_ways
def test_a_call_is_made_again_until_it_works_and_each_retry_is_told(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(3)
    told: list[tuple[int, str, float]] = []
    policy = RetryPolicy(retry_on=(ConnectionError,), backoff=MQTT)
    result = run(
        call, policy, clock, lambda n, error, wait: told.append((n, str(error), wait)), None
    )
    assert result == "done"
    assert told == [(1, "failure 1", 0.5), (2, "failure 2", 1), (3, "failure 3", 2)]
    assert clock.monotonic() == 3.5


@both_ways
def test_the_last_error_comes_out_with_the_attempts_noted(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(99)
    policy = RetryPolicy(retry_on=(ConnectionError,), backoff=MQTT, max_attempts=3)
    with pytest.raises(ConnectionError, match="failure 3") as caught:
        run(call, policy, clock, None, None)
    assert caught.value.__notes__ == ["gave up after attempt 3, 1.5 s: the limit is 3"]
    assert call.calls == 3


@both_ways
def test_no_attempt_starts_after_the_time_allowed(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(99)
    policy = RetryPolicy(
        retry_on=(ConnectionError,), backoff=MQTT, max_attempts=None, max_elapsed=5
    )
    with pytest.raises(ConnectionError) as caught:
        run(call, policy, clock, None, None)
    # After 0.5, 1.5 and 3.5 s; the next would start at 7.5 s, so nobody waits for it.
    assert (call.calls, clock.monotonic()) == (4, 3.5)
    assert caught.value.__notes__ == ["gave up after attempt 4, 3.5 s: the time allowed is 5 s"]


@both_ways
def test_a_single_attempt_that_was_asked_for_needs_no_note(run: Retry) -> None:
    policy = RetryPolicy(retry_on=(ConnectionError,), max_attempts=None, max_elapsed=0)
    with pytest.raises(ConnectionError) as caught:
        run(Flaky(99), policy, ManualClock(), None, None)
    assert not hasattr(caught.value, "__notes__")


@both_ways
def test_an_error_that_is_not_worth_it_ends_the_attempts_at_once(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(99, PermissionError)
    with pytest.raises(PermissionError) as caught:
        run(call, RetryPolicy(retry_on=(ConnectionError,)), clock, None, None)
    assert (call.calls, clock.monotonic()) == (1, 0)
    assert "not worth retrying" in caught.value.__notes__[0]


@both_ways
def test_a_function_may_say_which_errors_are_worth_it(run: Retry) -> None:
    call = Flaky(99)
    policy = RetryPolicy(retry_on=lambda error: str(error) != "failure 2")
    with pytest.raises(ConnectionError, match="failure 2"):
        run(call, policy, ManualClock(), None, None)
    assert call.calls == 2


@both_ways
def test_without_limits_it_goes_on_through_a_thousand_failures(run: Retry) -> None:
    clock, call = ManualClock(), Flaky(1_000)
    policy = RetryPolicy(retry_on=(ConnectionError,), backoff=STEADY, max_attempts=None)
    assert run(call, policy, clock, None, None) == "done"
    assert clock.monotonic() == pytest.approx(12.7 + 993 * 10)


@both_ways
def test_an_interrupt_is_never_retried(run: Retry) -> None:
    calls: list[None] = []

    def interrupted() -> str:
        calls.append(None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, RetryPolicy(retry_on=lambda _: True), ManualClock(), None, None)
    assert len(calls) == 1


def test_cancelling_ends_an_asynchronous_retry_at_once() -> None:
    calls: list[None] = []

    async def cancel_while_waiting() -> None:
        failed = asyncio.Event()

        async def fail() -> None:
            calls.append(None)
            failed.set()
            raise ConnectionError

        slow = RetryPolicy(retry_on=(ConnectionError,), backoff=Backoff(table=(3_600,)))
        task = asyncio.create_task(retry_async(fail, slow))
        await failed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_while_waiting())
    assert len(calls) == 1


def test_a_shortage_is_one_line_however_long_it_lasts_and_however_it_flickers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    scarcity = Scarcity("taking connections", logging.getLogger("test"), clock)
    caplog.set_level(logging.INFO)
    scarcity.note_success()
    waits = []
    for _ in range(20):
        waits.append(scarcity.wait_after(OSError(24, "Too many open files")))
        clock.sleep(waits[-1])
        scarcity.note_success()
    assert waits[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
    assert waits[-1] == 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "taking connections is not possible now: [Errno 24]" in caplog.text
    clock.sleep(11)
    scarcity.note_success()
    assert "possible again, after 20 failures" in caplog.text
    assert scarcity.wait_after(OSError(24, "Too many open files")) == pytest.approx(0.05)
    assert len(caplog.records) == 3
