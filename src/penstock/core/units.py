"""How do people write sizes, durations and times, and what do they mean?"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from penstock.core.errors import InvalidOption

__all__ = [
    "format_duration",
    "format_size",
    "format_time",
    "parse_duration",
    "parse_moment",
    "parse_patience",
    "parse_size",
    "parse_time",
]

_INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_NS_PER_SECOND = 1_000_000_000

# The longest duration whose nanoseconds fit in 64 bits, and the longest a lock can wait.
_LONGEST_SECONDS = _INT64_MAX // _NS_PER_SECOND

_SIZE_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}

_DURATION_UNITS = {
    "": Fraction(1),
    "ns": Fraction(1, 1_000_000_000),
    "us": Fraction(1, 1_000_000),
    "µs": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1_000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3_600),
    "d": Fraction(86_400),
}

# The digits are bounded so that a hostile number is refused cheaply.
_QUANTITY = re.compile(r"(-?[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zµ]*)", re.IGNORECASE)

_TIME = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[T ](?P<minute>[0-9]{2}:[0-9]{2})"
    r"(?P<second>:[0-9]{2})?(?(second)(?:\.(?P<fraction>[0-9]{1,9}))?)"
    r"(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?)?",
)

_CLOCK = re.compile(
    r"(?:(?P<day>today|yesterday)[T ]?)?"
    r"(?P<clock>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?)?",
    re.IGNORECASE,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_size(value: str | int) -> int:
    """Return the bytes meant by `4096`, `"4096"`, `"64k"`, `"10M"`, `"1.5GiB"` or `"2 TB"`.

    `K M G T` and `KiB MiB GiB TiB` are powers of 1024, `KB MB GB TB` are powers of 1000, in
    upper or lower case. A fraction of a byte is cut off.

    :raises InvalidOption: the value is not a size, is negative or does not fit in 64 bits
    """
    # Numbers are parsed as text, which refuses True, NaN and 1.5 without special cases.
    match = _QUANTITY.fullmatch(str(value).strip())
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise InvalidOption("size", value, "expected a size such as 4096, 64k, 10M or 1.5GiB")
    size = Fraction(match[1]) * factor
    if not 0 <= size <= _INT64_MAX:
        raise InvalidOption("size", value, f"must be from 0 to {_INT64_MAX} bytes")
    return int(size)


def parse_duration(value: str | float, option: str = "duration") -> float:
    """Return the seconds meant by `5`, `"1.5s"`, `"250us"`, `"10ms"`, `"2m"`, `"1h"` or `"1d"`.

    A bare number is in seconds. Units are in lower case: `M` could be a month or a mega.

    :param option: what an error names

    :raises InvalidOption: the value is not a duration, is negative or above 292 years
    """
    seconds: float | Fraction
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip())
        unit = _DURATION_UNITS.get(match[2]) if match else None
        if match is None or unit is None:
            raise InvalidOption(option, value, "expected a duration such as 5s, 10ms or 2h")
        seconds = Fraction(match[1]) * unit
    elif isinstance(value, bool):
        raise InvalidOption(option, value, "expected a duration such as 5s, 10ms or 2h")
    else:
        seconds = value
    if not 0 <= seconds <= _LONGEST_SECONDS:  # written so that NaN is refused too
        raise InvalidOption(option, value, f"must be from 0 to {_LONGEST_SECONDS} seconds")
    return float(seconds)


def parse_patience(value: str | float) -> float:
    """Return the seconds meant by a duration, or by `true`: for ever, and `false`: none.

    :raises InvalidOption: the value is neither
    """
    seconds = {"true": math.inf, "false": 0.0}.get(str(value).lower())
    return parse_duration(value) if seconds is None else seconds


def format_size(size: int) -> str:
    """Return `size` bytes for people: `512 B`, `10.0 MiB`."""
    if size < 1024:  # noqa: PLR2004 - the base itself
        return f"{size} B"
    scaled = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        scaled /= 1024
        if round(scaled, 1) < 1024:  # noqa: PLR2004 - rounded, so that none reads 1024.0 KiB
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1024:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration for people, in one unit and three digits: `1.5 s`, `250 us`, `2 h`."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds == 0:
        return "0 s"
    for unit, in_seconds, limit in (
        ("ns", 1e-9, 1000),
        ("us", 1e-6, 1000),
        ("ms", 1e-3, 1000),
        ("s", 1, 60),
        ("m", 60, 60),
        ("h", 3_600, 24),
    ):
        text = _three_digits(seconds / in_seconds)
        if float(text) < limit:  # the rounded number, so that none reads 1000 ms
            return f"{text} {unit}"
    return f"{_three_digits(seconds / 86_400)} d"


def _three_digits(number: float) -> str:
    """Return `number` with three significant digits, or all of its whole ones."""
    decimals = max(0, 3 - len(str(int(number))))
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def format_time(time_ns: int) -> str:
    """Return ISO 8601 in UTC with as many decimals as it needs: `2026-11-15T08:55:22.1924398Z`.

    :raises InvalidOption: `time_ns` does not fit in 64 bits
    """
    if not _INT64_MIN <= time_ns <= _INT64_MAX:
        raise InvalidOption("time", time_ns, "must fit in 64 bits (the years 1677 to 2262)")
    seconds, nanoseconds = divmod(time_ns, _NS_PER_SECOND)
    moment = _EPOCH + timedelta(seconds=seconds)
    fraction = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def parse_time(text: str) -> int:
    """Return the nanoseconds since 1970 UTC meant by an ISO 8601 time, exactly.

    `2026-11-15`, `2026-11-15T08:55` and `2026-11-15 08:55:22.192439812+01:00` are times. Without
    `Z` or an offset the time is in UTC, never in the machine's own zone.

    :raises InvalidOption: the text is not such a time, or lies outside the years 1677 to 2262
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise InvalidOption(
            "time", text, "expected ISO 8601 with at most 9 decimals: 2026-11-15T08:55:22.5Z"
        )
    try:
        moment = datetime.fromisoformat(
            f"{match['date']}T{match['minute'] or '00:00'}{match['second'] or ':00'}"
            f"{match['zone'] or 'Z'}"
        )
    except ValueError as error:
        raise InvalidOption("time", text, str(error)) from None
    whole = (moment - _EPOCH) // timedelta(seconds=1)
    time_ns = whole * _NS_PER_SECOND + int((match["fraction"] or "").ljust(9, "0"))
    if not _INT64_MIN <= time_ns <= _INT64_MAX:
        raise InvalidOption("time", text, "must lie in the years 1677 to 2262")
    return time_ns


def parse_moment(text: str, now_ns: int) -> int:
    """Return the nanoseconds since 1970 UTC meant by an absolute or relative time.

    Besides the forms of `parse_time`: `-10m` and `-1.5h` before now, `now`, `today`, `yesterday`,
    `12:00`, `yesterday 12:00:30`. Days begin at midnight in UTC.

    :raises InvalidOption: the text is no such time, or lies outside the years 1677 to 2262
    """
    word = text.strip()
    if word.lower() == "now":
        return now_ns
    if word.startswith("-") and word[-1:].isalpha():  # without a unit it might be a number
        return now_ns - round(parse_duration(word[1:]) * _NS_PER_SECOND)
    match = _CLOCK.fullmatch(word)
    if match is None or not word:
        return parse_time(word)
    day = _EPOCH + timedelta(seconds=now_ns // _NS_PER_SECOND)
    if (match["day"] or "").lower() == "yesterday":
        day -= timedelta(days=1)
    return parse_time(f"{day:%Y-%m-%d}T{(match['clock'] or '00:00').zfill(5)}")
