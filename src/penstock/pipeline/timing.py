"""How do people write the times of a pipeline, and what are they in Spark's words?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidOption
from penstock.core.units import format_duration, parse_duration

__all__ = ["AVAILABLE_NOW", "Trigger", "parse_interval", "spark_interval"]

_SPOKEN = re.compile(r"(?P<number>[0-9][0-9.]*)\s*(?P<unit>[a-z]+)", re.IGNORECASE)
_SPOKEN_UNITS = {"millisecond": "ms", "second": "s", "minute": "m", "hour": "h", "day": "d"}
_NOW = {"availablenow", "once"}


def parse_interval(value: object) -> float:
    """Return the seconds meant by `1s`, `"500 ms"`, `10`, or Spark's `"10 seconds"`.

    :raises InvalidOption: it is no interval, or it is no whole number of milliseconds: Spark has
        none shorter.
    """
    text = str(value).strip()
    if (match := _SPOKEN.fullmatch(text)) is not None:
        unit = match["unit"].lower().removesuffix("s")
        text = f"{match['number']}{_SPOKEN_UNITS.get(unit, match['unit'])}"
    try:
        seconds = parse_duration(text)
    except InvalidOption as error:
        raise InvalidOption(
            "interval", value, "should be a time such as 1s, 500ms or 10 seconds"
        ) from error
    if abs(seconds * 1000 - round(seconds * 1000)) > 1e-6:  # noqa: PLR2004 - a rounding error
        raise InvalidOption("interval", value, "should be a whole number of milliseconds")
    return seconds


def spark_interval(seconds: float) -> str:
    """Return an interval in Spark's words."""
    return f"{round(seconds * 1000)} milliseconds"


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a query takes its next batch."""

    #: Seconds from the start of one batch to the next; 0 is as soon as the last one is done;
    #: None takes all that is there now, and ends.
    interval: float | None = 0.0

    @classmethod
    def parse(cls, value: object) -> Trigger:
        """Read `available now`, `once`, or an interval.

        :raises InvalidOption: it is neither.
        """
        if isinstance(value, Trigger):
            return value
        if isinstance(value, str) and re.sub(r"[\s_-]", "", value).lower() in _NOW:
            return AVAILABLE_NOW
        try:
            return cls(parse_interval(value))
        except InvalidOption as error:
            raise InvalidOption("trigger", value, error.reason, hint="or: available now") from error

    def as_spark(self) -> dict[str, Any]:
        """Return it as the arguments of `DataStreamWriter.trigger`."""
        if self.interval is None:
            return {"availableNow": True}
        return {"processingTime": spark_interval(self.interval)}

    def __str__(self) -> str:
        if self.interval is None:
            return "available now"
        return format_duration(self.interval) if self.interval else "as soon as possible"


AVAILABLE_NOW = Trigger(None)
