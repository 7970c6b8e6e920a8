"""What time is it, and who decides when it moves?"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "ManualClock", "SystemClock"]

_NS_PER_SECOND = 1_000_000_000


class Clock(Protocol):
    """The only source of time for code that waits, retries or expires."""

    def now_ns(self) -> int:
        """Return the wall clock: nanoseconds since 1970 UTC. It may jump, even backwards."""
        ...

    def monotonic(self) -> float:
        """Return seconds since a fixed moment. Never goes back: measure durations with it."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait on this thread.

        :raises ValueError: `seconds` is negative or not a number
        """
        ...

    async def sleep_async(self, seconds: float) -> None:
        """Wait in this task, while others run.

        :raises ValueError: `seconds` is negative or not a number
        """
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        _refuse_negative(seconds)  # asyncio treats a negative wait as 0
        await _sleep(seconds)


class ManualClock:
    """A clock that moves only by `advance` or by a sleep.

    Sleeping returns at once and moves the clock by the time slept, so that hours of back-off
    take no time in a test. Safe to share between threads.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self._lock = threading.Lock()
        self._start_ns = now_ns
        self._elapsed_ns = 0

    def now_ns(self) -> int:
        return self._start_ns + self._elapsed_ns

    def monotonic(self) -> float:
        return self._elapsed_ns / _NS_PER_SECOND

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.advance(seconds)
        await _sleep(0)  # a sleep always yields to other tasks

    def advance(self, seconds: float) -> None:
        """Move the clock forward, to the nearest nanosecond.

        :raises ValueError: `seconds` is negative or not a number
        """
        _refuse_negative(seconds)
        with self._lock:
            self._elapsed_ns += round(seconds * _NS_PER_SECOND)


def _refuse_negative(seconds: float) -> None:
    if not seconds >= 0:  # written so that NaN is refused too
        raise ValueError(f"cannot sleep for {seconds} seconds")


#: The default clock.
SYSTEM_CLOCK: Clock = SystemClock()


async def _sleep(seconds: float) -> None:
    import asyncio  # noqa: PLC0415 - most programs have no tasks

    await asyncio.sleep(seconds)
