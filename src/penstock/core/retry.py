"""When something fails that may work later, when is it tried again, and when no more?"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, ClassVar, TypeVar

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption
from penstock.core.units import format_duration

if TYPE_CHECKING:
    import logging

__all__ = ["Backoff", "OnRetry", "RetryPolicy", "Scarcity", "retry", "retry_async"]

T = TypeVar("T")

#: Called before each wait with the number of the attempt that failed, its error and the wait.
OnRetry = Callable[[int, Exception, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait after each failure: growing delays, or a table of delays.

    :raises InvalidOption: a number is out of its range
    """

    #: Seconds to wait after the first failure.
    initial: float = 0.1
    #: How many times longer each wait is than the one before, at least 1.
    factor: float = 2.0
    #: No wait is longer than this.
    maximum: float = 10.0
    #: Each wait is shortened by a random part of it, up to this fraction, so that clients
    #: that failed together do not retry together. Never lengthened: the maximum holds.
    jitter: float = 0.2
    #: Seconds to wait after each failure, instead of the three numbers above; the last repeats.
    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # Each is written so that NaN and infinity are refused too.
        if not 0 < self.initial < float("inf"):
            raise InvalidOption("initial", self.initial, "must be above 0 seconds")
        if not 1 <= self.factor < float("inf"):
            raise InvalidOption("factor", self.factor, "must be at least 1")
        if not self.initial <= self.maximum < float("inf"):
            raise InvalidOption("maximum", self.maximum, "must not be below the initial delay")
        if not 0 <= self.jitter <= 1:
            raise InvalidOption("jitter", self.jitter, "must be from 0 to 1")
        if not all(0 <= delay < float("inf") for delay in self.table):
            raise InvalidOption("table", self.table, "delays must not be negative")

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Return the seconds to wait after failed attempt number `attempt`, counted from 1."""
        if self.table:
            delay = self.table[min(attempt, len(self.table)) - 1]
        else:
            try:
                delay = min(self.initial * self.factor ** (attempt - 1), self.maximum)
            except OverflowError:  # after a thousand attempts the power overflows a float
                delay = self.maximum
        return delay * (1 - self.jitter * rng.random())

    def delays(self, rng: random.Random) -> Iterator[float]:
        """Yield the seconds to wait after the first failure, the second, and so on for ever."""
        return (self.delay(attempt, rng) for attempt in count(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Which failures are worth another attempt, how many, and how far apart.

    :raises InvalidOption: a number is out of its range
    """

    #: The errors worth retrying: their types, or a predicate.
    retry_on: tuple[type[Exception], ...] | Callable[[Exception], bool]
    backoff: Backoff = field(default_factory=Backoff)
    #: Attempts in all, the first included; None is no limit.
    max_attempts: int | None = 10
    #: No attempt starts later than this many seconds after the first; None is no limit, 0 a single
    #: attempt.
    max_elapsed: float | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidOption("max_attempts", self.max_attempts, "must be at least 1")
        if self.max_elapsed is not None and not self.max_elapsed >= 0:
            raise InvalidOption("max_elapsed", self.max_elapsed, "must not be negative")

    def is_worth_retrying(self, error: Exception) -> bool:
        """Tell whether another attempt may succeed."""
        if isinstance(self.retry_on, tuple):
            return isinstance(error, self.retry_on)
        return self.retry_on(error)


def retry(
    call: Callable[[], T],
    policy: RetryPolicy,
    clock: Clock = SYSTEM_CLOCK,
    on_retry: OnRetry | None = None,
    rng: random.Random | None = None,
) -> T:
    """Return the result of `call`, retried after failures according to the policy.

    :raises Exception: the last attempt's own error, with a note of the attempts made
    """
    attempts = _Attempts(policy, clock, on_retry, rng)
    while True:
        try:
            return call()
        except Exception as error:
            delay = attempts.wait_after(error)
            if delay is None:
                raise
        clock.sleep(delay)


async def retry_async(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    clock: Clock = SYSTEM_CLOCK,
    on_retry: OnRetry | None = None,
    rng: random.Random | None = None,
) -> T:
    """Retry as `retry` does, for a `call` that is awaited. Cancelling ends it at once.

    :raises Exception: the last attempt's own error, with a note of the attempts made
    """
    attempts = _Attempts(policy, clock, on_retry, rng)
    while True:
        try:
            return await call()
        except Exception as error:
            delay = attempts.wait_after(error)
            if delay is None:
                raise
        await clock.sleep_async(delay)


class _Attempts:
    """The attempts of one call: counts the failures and decides after each."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Clock,
        on_retry: OnRetry | None,
        rng: random.Random | None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._on_retry = on_retry
        self._started = clock.monotonic()
        # Own state, seeded by the system: does not disturb a program that seeds `random`.
        rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._failures = enumerate(policy.backoff.delays(rng), start=1)

    def wait_after(self, error: Exception) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up."""
        attempt, delay = next(self._failures)
        elapsed = self._clock.monotonic() - self._started
        policy = self._policy
        if policy.max_elapsed == 0:  # one attempt was asked for: nothing was given up
            return None
        if not policy.is_worth_retrying(error):
            why = "this error is not worth retrying"
        elif policy.max_attempts is not None and attempt >= policy.max_attempts:
            why = f"the limit is {policy.max_attempts}"
        elif policy.max_elapsed is not None and elapsed + delay > policy.max_elapsed:
            why = f"the time allowed is {format_duration(policy.max_elapsed)}"
        else:
            if self._on_retry is not None:
                self._on_retry(attempt, error, delay)
            return delay
        error.add_note(f"gave up after attempt {attempt}, {format_duration(elapsed)}: {why}")
        return None


class Scarcity:
    """A temporary shortage of a resource that a server needs, such as descriptors.

    The server resumes by itself when the shortage ends; until then it must neither burn a core
    nor fill the log. Not thread-safe.
    """

    #: Seconds without a failure before it counts as over: with one descriptor that comes and goes,
    #: every other attempt works.
    _CALM: ClassVar = 10.0

    def __init__(self, doing: str, log: logging.Logger, clock: Clock = SYSTEM_CLOCK) -> None:
        """Log failures of `doing` to `log`."""
        self._doing = doing
        self._log = log
        self._clock = clock
        self._failures = 0
        self._failed_at = 0.0
        self._backoff = Backoff(initial=0.05, maximum=1.0, jitter=0.0)
        self._rng = random.Random()  # noqa: S311 - keeps no secret

    def wait_after(self, error: Exception) -> float:
        """Return the seconds to wait after a failure; only the first one is logged."""
        self._failures += 1
        self._failed_at = self._clock.monotonic()
        if self._failures == 1:
            self._log.warning("%s is not possible now: %s; trying again", self._doing, error)
        return self._backoff.delay(self._failures, self._rng)

    def note_success(self) -> None:
        """Note a success; after a while without failures, the next one is logged again."""
        if self._failures and self._clock.monotonic() - self._failed_at > self._CALM:
            self._log.info("%s is possible again, after %d failures", self._doing, self._failures)
            self._failures = 0
