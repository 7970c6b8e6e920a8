"""What may stand in the fields of a pipeline's description: URLs, places, times, triggers?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue

from penstock.core.config import (
    Names,
    Text,
    Url,
    WrongField,
    is_function_name,
    listed,
    url_text,
)
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import InvalidOption
from penstock.core.overflow import DropReason
from penstock.core.units import format_duration, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AVAILABLE_NOW",
    "PLACES",
    "Bytes",
    "Conf",
    "Decode",
    "Delay",
    "Function",
    "LogUrl",
    "Names",
    "Offsets",
    "Restarts",
    "SparkTrigger",
    "Text",
    "Trigger",
    "Url",
    "Urls",
    "Watermark",
    "parse_interval",
    "spark_interval",
]

_SPOKEN = re.compile(r"(?P<number>[0-9][0-9.]*)\s*(?P<unit>[a-z]+)", re.IGNORECASE)
_SPOKEN_UNITS = {"millisecond": "ms", "second": "s", "minute": "m", "hour": "h", "day": "d"}
_NOW = {"availablenow", "once"}


def parse_interval(value: object) -> float:
    """Parse an interval into seconds: `1s`, `"500 ms"`, `10`, or Spark's `"10 seconds"`.

    :raises InvalidOption: it is no interval, or no whole number of milliseconds, Spark's
        resolution.
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
    """Format an interval as Spark writes it."""
    return f"{round(seconds * 1000)} milliseconds"


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a query starts its next batch."""

    #: Seconds from the start of one batch to the next; 0: as soon as the last one is done;
    #: None: process all available messages, then end.
    interval: float | None = 0.0

    @classmethod
    def parse(cls, value: object) -> Trigger:
        """Parse `available now`, `once`, or an interval.

        :raises InvalidOption: it is none of these.
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
        """Return the arguments for `DataStreamWriter.trigger`."""
        if self.interval is None:
            return {"availableNow": True}
        return {"processingTime": spark_interval(self.interval)}

    def __str__(self) -> str:
        if self.interval is None:
            return "available now"
        return format_duration(self.interval) if self.interval else "as soon as possible"


AVAILABLE_NOW = Trigger(None)


#: Kafka's special offsets for latest and earliest.
PLACES = {"earliest": -2, "latest": -1}


def _log_url(value: object) -> str:
    text = url_text(value)
    if endpoint_of(text).oldest_go_by is not DropReason.RETENTION:  # others overwrite them
        raise WrongField("should be the URL of a log", hint="as in log:/path/name")
    return text


def _watermark(value: object) -> object:
    if isinstance(value, dict) and len(value) == 1:
        return value
    raise WrongField("should be one column and a time", hint='as in {time: "10 seconds"}')


def _offsets(value: object) -> object:
    if isinstance(value, str) and value.strip().lower() in {"earliest", "latest"}:
        return value.strip().lower()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, dict) and value:
        numbers = {url: PLACES.get(str(at).strip().lower(), at) for url, at in value.items()}
        if all(type(seq) is int for seq in numbers.values()):
            return numbers
    raise WrongField(
        "should be earliest, latest, a sequence number, or a mapping of one for each url"
    )


def _function(value: object) -> object:
    if callable(value) or is_function_name(value):
        return value
    raise WrongField(
        "should be module:function", hint="the function takes a DataFrame and returns one"
    )


def _decode(value: object) -> object:
    if isinstance(value, dict) and not isinstance(value.get("format"), str):
        raise WrongField("needs the key format", hint="as in {format: json}")
    return value


def _conf(value: object) -> object:
    """Convert values to text as Spark expects it: booleans become `true` and `false`."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(setting).lower() if isinstance(setting, bool) else str(setting)
        for key, setting in value.items()
        if _is_plain(key, setting)
    }


def _is_plain(key: str, setting: object) -> bool:
    if isinstance(setting, str | int | float):
        return True
    raise WrongField(f"{key} should be text, a number, true or false")


def _with_reason(parse: Callable[[Any], Any]) -> BeforeValidator:
    def parsed(value: object) -> object:
        try:
            return parse(value)
        except InvalidOption as error:
            raise WrongField(error.reason, hint=error.hint) from None

    return BeforeValidator(parsed)


def _restart(value: object) -> object:
    """Accept `true` for the defaults and `false` for no restart."""
    return {} if value is True else None if value is False else value


def _delay(value: object) -> float:
    return parse_interval(value)


#: The URL of a log.
LogUrl = Annotated[str, BeforeValidator(_log_url)]
#: One URL or several; a path may have wildcards.
Urls = Annotated[tuple[Url, ...], BeforeValidator(listed)]
#: Where in the streams: `earliest`, `latest`, a sequence number, or one for each URL.
Offsets = Annotated[str | int | dict[str, int], BeforeValidator(_offsets)]
#: `module:function`, or in Python the function.
Function = Annotated[Any, BeforeValidator(_function)]
#: How payloads become columns; further keys depend on the format.
Decode = Annotated[dict[str, JsonValue], BeforeValidator(_decode)]
#: Spark options, as text.
Conf = Annotated[dict[str, str], BeforeValidator(_conf)]
#: Bytes, as `64k` or `10M`.
Bytes = Annotated[int, _with_reason(parse_size), Field(ge=1)]
#: Seconds, as `10 seconds` or `10s`.
Delay = Annotated[float, _with_reason(_delay)]
#: When a query is restarted: a mapping, or true or false.
Restarts = BeforeValidator(_restart)
#: An event-time column and how late its rows may be.
Watermark = Annotated[dict[str, Delay], BeforeValidator(_watermark)]
#: `available now`, or an interval.
SparkTrigger = Annotated[Trigger, _with_reason(Trigger.parse)]
