"""How is a recording played back at its original speed, or at a multiple of it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import InvalidOption

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.core.clock import Clock

__all__ = ["Pacer", "parse_speed"]

#: Messages that are due within this many seconds are sent together.
_TOGETHER: Final = 0.01
_LEAST, _MOST = 1e-6, 1e6


def parse_speed(value: str | float) -> float | None:
    """Return the speed factor of `1`, `10`, `0.5` or `max`; None: as fast as possible.

    :raises InvalidOption: the value is not a speed.
    """
    if value == "max":
        return None
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if not _LEAST <= speed <= _MOST:
        raise InvalidOption("speed", value, "must be a number above 0, such as 1 or 10, or max")
    return speed


class Pacer:
    """Schedules messages by their originating times.

    The first is due at once, the others by their time after the first. Where times go back, as
    from one recording to the next, the message is due at once and becomes the new first.
    """

    def __init__(self, speed: float, clock: Clock) -> None:
        self._speed = speed
        self._clock = clock
        #: The time of the first message, and when it was sent.
        self._first: tuple[int, float] | None = None
        self._last = 0

    def postpone(self, seconds: float) -> None:
        """Shift all due times by `seconds`, after a pause."""
        if self._first is not None:
            then, went = self._first
            self._first = (then, went + seconds)

    def next(self, times: NDArray[np.int64]) -> tuple[int, float]:
        """Return how many messages to send together, and the seconds to wait before."""
        now = self._clock.monotonic()
        first = int(times[0])
        if self._first is None or first < self._last:
            self._first = (first, now)
        then, went = self._first
        due = went + (first - then) / 1e9 / self._speed
        # If late, send all messages that are due by now.
        until = then + (max(due, now) - went + _TOGETHER) * 1e9 * self._speed
        is_later = np.flatnonzero((times > until) | (np.diff(times, prepend=first) < 0))
        count = int(is_later[0]) if len(is_later) else len(times)
        count = max(count, 1)
        self._last = int(times[count - 1])
        return count, max(0.0, due - now)
