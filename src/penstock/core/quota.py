"""How many bytes may pass in a second, and how long must the next ones wait?"""

from __future__ import annotations

import math
import threading
from typing import Final, Protocol

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption
from penstock.core.units import parse_duration, parse_size

__all__ = ["PsiQuota", "Quota", "TokenBucket", "parse_quota"]

_NS_PER_SECOND: Final = 1_000_000_000
#: Bytes sent at once are limited to this many seconds, for a prompt stop and an even rate.
_SHARE: Final = 0.05
_HINT: Final = "write 1MB/s, 1MB/s:5s (with the window that is smoothed over), or psi:1MB/s"


class Quota(Protocol):
    """A limit of bytes per second. Thread-safe: sharers keep the limit together."""

    #: The most bytes to pass to `delay` at once; a single message may be larger.
    at_once: int

    def delay(self, size: int, time_ns: int) -> float:
        """Account for `size` bytes; return the seconds to wait before sending them.

        `time_ns` is the originating time of the message.
        """
        ...


class TokenBucket:
    """A token bucket: limits the rate, with bursts of up to `window` seconds of it.

    The bucket starts empty, so that the rate holds from the first byte on. Unused capacity of
    the last `window` seconds may be used at once.

    :raises InvalidOption: a number is out of its range.
    """

    def __init__(self, rate: float, window: float = 1.0, clock: Clock = SYSTEM_CLOCK) -> None:
        _check(rate, window)
        self.rate = rate
        self.window = window
        self.at_once = max(1, int(rate * _SHARE))
        self._clock = clock
        self._lock = threading.Lock()
        self._saved = 0.0
        self._filled_at = clock.monotonic()

    def delay(self, size: int, time_ns: int = 0) -> float:
        del time_ns
        with self._lock:
            now = self._clock.monotonic()
            earned = (now - self._filled_at) * self.rate
            self._filled_at = now
            self._saved = min(self._saved + earned, self.rate * self.window) - size
            # Below zero: the next caller waits for these bytes, too.
            return max(0.0, -self._saved / self.rate)

    def __str__(self) -> str:
        return f"{self.rate:,.0f} B/s"


class PsiQuota:
    """psi's own formula, with its faults, for programs that depend on its timing.

    (docs/specs/psi.md 4)

    It uses stream time, sleeps by an average that starts at 0, rarely keeps the rate, and turns
    itself off for good when two messages have the same time.
    """

    #: It looks at each message.
    at_once = 1

    def __init__(self, rate: float, window: float = 5.0) -> None:
        _check(rate, window)
        self.rate = rate
        self.window = window
        self._lock = threading.Lock()
        self._average = 0.0
        self._previous_ns: int | None = None

    def delay(self, size: int, time_ns: int) -> float:
        """Return the seconds to sleep. `size` is 24 + the length of the stored block."""
        with self._lock:
            previous, self._previous_ns = self._previous_ns, time_ns
            if previous is None:
                return 0.0
            elapsed = (time_ns - previous) / _NS_PER_SECOND
            now = size / elapsed if elapsed else math.inf
            share = elapsed / self.window
            self._average = now * share + self._average * (1 - share)
            # In the original NaN becomes a negative integer: no sleep, from then on.
            if not now > self.rate or math.isnan(self._average):
                return 0.0
            return max(0, int((self._average / self.rate - elapsed) * 1000)) / 1000

    def __str__(self) -> str:
        return f"psi:{self.rate:,.0f} B/s"


def parse_quota(text: str, clock: Clock = SYSTEM_CLOCK) -> TokenBucket | PsiQuota:
    """Return the quota meant by `1MB/s`, `1MB/s:5s` or `psi:1MB/s:5s`; the last is the window.

    :raises InvalidOption: the text is no quota.
    """
    plain = text.strip()
    is_psi = plain.lower().startswith("psi:")
    rate, colon, window = plain[4 if is_psi else 0 :].partition(":")
    try:
        size = parse_size(rate.strip().removesuffix("/s"))
        seconds = parse_duration(window.strip()) if colon else None
        if is_psi:
            return PsiQuota(size) if seconds is None else PsiQuota(size, seconds)
        return TokenBucket(size, 1.0 if seconds is None else seconds, clock)
    except InvalidOption as error:
        raise InvalidOption("quota", text, error.reason, hint=_HINT) from None


def _check(rate: float, window: float) -> None:
    # Written so that NaN and infinity are refused too.
    if not 0 < rate < math.inf:
        raise InvalidOption("rate", rate, "must be above 0 bytes per second")
    if not 0 < window < math.inf:
        raise InvalidOption("window", window, "must be above 0 seconds")
