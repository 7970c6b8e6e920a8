"""How does a relay wait during an outage, and still react to a stop?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.endpoints import Endpoint, endpoint_of
from penstock.core.errors import ConnectionLost, LockTimeout, ServerBusy, UnknownScheme
from penstock.core.retry import Backoff, OnRetry, RetryPolicy, retry
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StopAsked", "StoppableClock", "connection_options", "outage_policy", "retried", "side"]

T = TypeVar("T")

_BACKOFF: Final = Backoff(initial=0.05, maximum=5.0)
#: The longest time (seconds) until a stop is noticed.
_SLICE: Final = 0.1


class StopAsked(Exception):
    """A wait was ended because the relay was told to stop."""


class StoppableClock:
    """A clock whose sleep ends when the relay is told to stop."""

    def __init__(self, should_stop: Callable[[], bool], clock: Clock = SYSTEM_CLOCK) -> None:
        self.should_stop = should_stop
        self._clock = clock

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait.

        :raises StopAsked: the relay was told to stop.
        """
        until = self._clock.monotonic() + seconds
        while (left := until - self._clock.monotonic()) > 0:
            if self.should_stop():
                raise StopAsked
            self._clock.sleep(min(left, _SLICE))

    async def sleep_async(self, seconds: float) -> None:
        """Wait, as `sleep` does.

        :raises StopAsked: the relay was told to stop.
        """
        until = self._clock.monotonic() + seconds
        while (left := until - self._clock.monotonic()) > 0:
            if self.should_stop():
                raise StopAsked
            await self._clock.sleep_async(min(left, _SLICE))


def side(url: str) -> Endpoint:
    """Return the endpoint of one side; a plain `Endpoint` for an unknown scheme."""
    try:
        return endpoint_of(url)
    except UnknownScheme:
        return Endpoint()


def connection_options(url: str) -> dict[str, str]:
    """Return options to open one side of a relay, which handles outages itself."""
    return side(url).relay_options(URL.parse(url))


def outage_policy(give_up: float | None, *, until_created: bool = False) -> RetryPolicy:
    """Return the retry policy for outages: for `give_up` seconds, or for ever (None).

    `until_created`: also retry while a side does not exist yet.
    """

    def may_pass(error: Exception) -> bool:
        if isinstance(error, (ConnectionLost, LockTimeout, ServerBusy)):
            return True
        return until_created and isinstance(error, FileNotFoundError)

    return RetryPolicy(retry_on=may_pass, backoff=_BACKOFF, max_attempts=None, max_elapsed=give_up)


def retried(
    call: Callable[[], T], policy: RetryPolicy, clock: StoppableClock, on_retry: OnRetry
) -> T:
    """Return the result of `call`, retried during outages. Other errors are raised unchanged.

    :raises StopAsked: the relay was told to stop.
    """
    failures: list[Exception] = []
    try:
        return call()  # nearly always; the setup of `retry` costs as much as a small batch
    except Exception as error:
        if not policy.is_worth_retrying(error):
            raise
        failures.append(error)

    def attempt() -> Callable[[], T]:
        if failures:
            raise failures.pop()
        try:
            result = call()
        except Exception as error:
            if policy.is_worth_retrying(error):
                raise
            return partial(_raise, error)  # bypasses `retry`, which would add a note
        return lambda: result

    return retry(attempt, policy, clock, on_retry)()


def _raise(error: Exception) -> NoReturn:
    raise error
