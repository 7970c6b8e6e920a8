"""How does psi count time, and what is that in nanoseconds?

psi counts ticks of 100 ns from the year 1; the two highest bits of a `DateTime` are its kind
(docs/specs/psi.md 1). Penstock counts nanoseconds since 1970 UTC in 64 bits, from
1677 to 2262. Times beyond saturate, and the two ends become psi's MinValue and MaxValue. A local
time is taken as UTC, because its offset is not known.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from penstock.core.errors import InvalidOption, Malformed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_NS",
    "MAX_TICKS",
    "MIN_NS",
    "NS_PER_TICK",
    "UNIX_EPOCH_TICKS",
    "DateTime",
    "DateTimeKind",
    "TimeSpan",
    "fits_numpy",
    "ns_to_raw",
    "ns_to_ticks",
    "numpy_to_raw",
    "raw_to_ns",
    "raw_to_numpy",
    "ticks_to_ns",
]

NS_PER_TICK: Final = 100
_TICKS_PER_SECOND: Final = 10_000_000
UNIX_EPOCH_TICKS: Final = 621_355_968_000_000_000
#: `DateTime.MaxValue`; MinValue is 0.
MAX_TICKS: Final = 3_155_378_975_999_999_999
#: psi's MinValue and MaxValue in nanoseconds.
MIN_NS: Final = -(2**63)
MAX_NS: Final = 2**63 - 1

_TICKS_MASK: Final = 0x3FFF_FFFF_FFFF_FFFF
_KIND_SHIFT: Final = 62
_UTC: Final = 1 << _KIND_SHIFT
#: The first and the last tick whose nanoseconds fit in 64 bits.
_FIRST_TICKS: Final = UNIX_EPOCH_TICKS - 2**63 // NS_PER_TICK
_LAST_TICKS: Final = UNIX_EPOCH_TICKS + MAX_NS // NS_PER_TICK
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_INT64: Final = range(-(2**63), 2**63)


class DateTimeKind(IntEnum):
    """The clock of a `DateTime`: its two highest bits."""

    UNSPECIFIED = 0
    UTC = 1
    LOCAL = 2
    #: Local, in the repeated hour at the end of daylight saving time.
    LOCAL_AMBIGUOUS = 3


#: The suffix of a time for display; the offset of a local time is not known.
_ZONES: Final = {
    DateTimeKind.UNSPECIFIED: "",
    DateTimeKind.UTC: "Z",
    DateTimeKind.LOCAL: " local",
    DateTimeKind.LOCAL_AMBIGUOUS: " local",
}


def ticks_to_ns(ticks: int) -> int:
    """Return nanoseconds since 1970 UTC, saturated to `MIN_NS` and `MAX_NS`."""
    if _FIRST_TICKS <= ticks <= _LAST_TICKS:
        return (ticks - UNIX_EPOCH_TICKS) * NS_PER_TICK
    return MIN_NS if ticks < _FIRST_TICKS else MAX_NS


def ns_to_ticks(time_ns: int) -> int:
    """Return the tick of a time; `MIN_NS` and `MAX_NS` become MinValue and MaxValue."""
    ticks = time_ns // NS_PER_TICK + UNIX_EPOCH_TICKS
    if ticks < _FIRST_TICKS:
        return 0
    return MAX_TICKS if ticks > _LAST_TICKS or time_ns >= MAX_NS else ticks


def raw_to_ns(raw: int) -> int:
    """Return the nanoseconds of a raw `DateTime` of any kind.

    :raises Malformed: it is after MaxValue.
    """
    ticks = raw & _TICKS_MASK
    if ticks > MAX_TICKS:
        raise Malformed("psi DateTime", "ticks", f"0 to {MAX_TICKS}", ticks)
    return ticks_to_ns(ticks)


def ns_to_raw(time_ns: int, kind: DateTimeKind = DateTimeKind.UTC) -> int:
    """Return a raw `DateTime`. MinValue and MaxValue have no kind."""
    ticks = time_ns // NS_PER_TICK + UNIX_EPOCH_TICKS
    if _FIRST_TICKS <= ticks <= _LAST_TICKS and time_ns < MAX_NS:
        return ticks | (_UTC if kind is DateTimeKind.UTC else kind << _KIND_SHIFT)
    return ns_to_ticks(time_ns)


def fits_numpy(raw: NDArray[np.uint64]) -> bool:
    """Tell whether `datetime64[ns]` can represent these times: UTC, from 1677 to 2262."""
    first, last = np.uint64(_FIRST_TICKS | _UTC), np.uint64(_LAST_TICKS | _UTC)
    return bool(((raw >= first) & (raw <= last)).all())


def raw_to_numpy(raw: NDArray[np.uint64]) -> NDArray[np.datetime64]:
    """Return many times, saturated to 64 bits of nanoseconds."""
    ticks = (raw & np.uint64(_TICKS_MASK)).astype(np.int64)
    kept = np.clip(ticks, _FIRST_TICKS, _LAST_TICKS)
    times = (kept - UNIX_EPOCH_TICKS) * NS_PER_TICK
    # The smallest number of 64 bits is numpy's "not a time".
    times[ticks < _FIRST_TICKS] = MIN_NS + 1
    times[ticks > _LAST_TICKS] = MAX_NS
    return times.view("datetime64[ns]")


def numpy_to_raw(times: NDArray[np.datetime64]) -> NDArray[np.uint64]:
    """Return many times raw, in UTC; "not a time" becomes MinValue.

    :raises InvalidOption: they are no times, or not in the years 1677 to 2262.
    """
    if times.dtype.kind != "M":
        raise InvalidOption("times", times.dtype, "must be datetime64")
    ns = times.astype("datetime64[ns]")
    if not np.array_equal(ns.astype(times.dtype), times, equal_nan=True):
        raise InvalidOption("times", times.dtype, "must lie in the years 1677 to 2262")
    numbers = ns.view(np.int64)
    raw = (numbers // NS_PER_TICK + UNIX_EPOCH_TICKS).astype(np.uint64) | np.uint64(_UTC)
    raw[numbers <= MIN_NS + 1] = 0
    raw[numbers == MAX_NS] = MAX_TICKS
    return raw


class DateTime(NamedTuple):
    """A time exactly as .NET has it."""

    #: 100 ns each, from the year 1.
    ticks: int
    kind: DateTimeKind = DateTimeKind.UTC

    @property
    def raw(self) -> int:
        """The raw 64 bits, as on the wire."""
        return self.ticks | self.kind << _KIND_SHIFT

    @property
    def time_ns(self) -> int:
        """Nanoseconds since 1970 UTC, saturated to 64 bits."""
        return ticks_to_ns(self.ticks)

    @property
    def datetime(self) -> datetime:
        """The time in UTC, rounded down to microseconds."""
        return _EPOCH + timedelta(microseconds=(self.ticks - UNIX_EPOCH_TICKS) // 10)

    @property
    def text(self) -> str:
        """ISO 8601 to the tick, with Z for UTC, and without a zone if it is not known."""
        seconds, fraction = divmod(self.ticks, _TICKS_PER_SECOND)
        text = (datetime(1, 1, 1) + timedelta(seconds=seconds)).isoformat()  # noqa: DTZ001
        if fraction:
            text += f".{fraction:07}".rstrip("0")
        return text + _ZONES[self.kind]

    @classmethod
    def from_raw(cls, raw: int) -> Self:
        """Decode the raw 64 bits.

        :raises Malformed: it is after MaxValue.
        """
        ticks = raw & _TICKS_MASK
        if ticks > MAX_TICKS:
            raise Malformed("psi DateTime", "ticks", f"0 to {MAX_TICKS}", ticks)
        return cls(ticks, DateTimeKind(raw >> _KIND_SHIFT))

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the time of nanoseconds, a `datetime` or a numpy time.

        A `datetime` without a zone has no kind; any other is converted to UTC.

        :raises InvalidOption: the value is no time, or not in the years 1 to 9999.
        """
        match value:
            case cls():
                time = value
            case bool() | np.timedelta64():
                raise InvalidOption("time", value, "must be a time")
            case int() | np.integer():
                time = cls.from_raw(ns_to_raw(int(value)))
            case datetime():
                kind = DateTimeKind.UTC if value.tzinfo else DateTimeKind.UNSPECIFIED
                moment = value if value.tzinfo else value.replace(tzinfo=UTC)
                microseconds = (moment - _EPOCH) // timedelta(microseconds=1)
                time = cls(UNIX_EPOCH_TICKS + microseconds * 10, kind)
            case np.datetime64():
                time = cls.from_raw(int(numpy_to_raw(np.array([value]))[0]))
            case _:
                raise InvalidOption("time", value, "must be nanoseconds, a datetime or datetime64")
        if not 0 <= time.ticks <= MAX_TICKS:
            raise InvalidOption("time", value, "must lie in the years 1 to 9999")
        return time


class TimeSpan(NamedTuple):
    """A duration exactly as .NET has it."""

    #: 100 ns each.
    ticks: int

    @property
    def ns(self) -> int:
        """Nanoseconds, saturated to 64 bits."""
        return max(MIN_NS, min(MAX_NS, self.ticks * NS_PER_TICK))

    @property
    def timedelta(self) -> timedelta:
        """The duration, rounded down to microseconds."""
        return timedelta(microseconds=self.ticks // 10)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the duration of nanoseconds, a `timedelta` or a numpy duration.

        :raises InvalidOption: the value is no duration, or does not fit in 64 bits.
        """
        match value:
            case cls():
                span = value
            case bool():
                raise InvalidOption("duration", value, "must be a duration")
            case timedelta():
                span = cls(value // timedelta(microseconds=1) * 10)
            case np.timedelta64():
                if np.isnat(value):
                    raise InvalidOption("duration", value, "must be a duration")
                span = cls(int(value.astype("timedelta64[ns]").astype(np.int64)) // NS_PER_TICK)
            case int() | np.integer():
                span = cls(int(value) // NS_PER_TICK)
            case _:
                raise InvalidOption("duration", value, "must be nanoseconds or a timedelta")
        if span.ticks not in _INT64:
            raise InvalidOption("duration", value, "must fit in 64 bits of 100 ns each")
        return span
