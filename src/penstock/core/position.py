"""Where in a stream does a reader start?"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from penstock.core.errors import PositionError
from penstock.core.units import format_time, parse_moment

__all__ = ["Position", "PositionLike", "check_seek"]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Position:
    """A position to read from: `START`, `END`, `LAST`, a sequence number or a time.

    The next read returns the message *at* the position: the oldest for `START`, the newest
    one for `LAST`, the next one to be appended for `END`, the one with that number for a sequence,
    the first one appended at or after that time for a time.
    """

    anchor: Literal["start", "end", "last", "seq", "time"]
    #: The sequence number, or the nanoseconds since 1970 UTC; 0 for the named places.
    value: int = 0

    START: ClassVar[Position]
    END: ClassVar[Position]
    LAST: ClassVar[Position]

    @classmethod
    def sequence(cls, seq: int) -> Position:
        """Return the position of the message with this sequence number.

        :raises PositionError: the number is negative or does not fit in 64 bits.
        """
        if seq < 0:
            raise PositionError(f"a sequence number is not negative, found {seq}")
        if seq not in _INT64:
            raise PositionError(f"a sequence number fits in 64 bits, found {seq}")
        return cls("seq", seq)

    @classmethod
    def time(cls, moment: int | dt.datetime) -> Position:
        """Return the position of the first message appended at or after a time.

        :raises PositionError: the datetime has no time zone, or the time lies outside the
            years 1677 to 2262.
        """
        if isinstance(moment, int):
            time_ns = moment
        elif moment.utcoffset() is None:
            raise PositionError(
                f"{moment.isoformat()} has no time zone", hint="use datetime(..., tzinfo=UTC)"
            )
        else:
            time_ns = (moment - _EPOCH) // _MICROSECOND * 1000
        if time_ns not in _INT64:
            raise PositionError(f"{moment} lies outside the years 1677 to 2262")
        return cls("time", time_ns)

    @classmethod
    def of(cls, place: PositionLike) -> Position:
        """Convert a Position, a sequence number, a datetime or text to a Position.

        :raises PositionError: the text is none of `start`, `end`, `last`, a number or a time.
        """
        if isinstance(place, Position):
            return place
        if isinstance(place, dt.datetime):
            return cls.time(place)
        if isinstance(place, str):
            return cls._from_text(place)
        return cls.sequence(place)

    @classmethod
    def _from_text(cls, text: str) -> Position:
        word = text.strip()
        named = {"start": cls.START, "end": cls.END, "last": cls.LAST}.get(word.lower())
        if named is not None:
            return named
        try:
            if word.isascii() and word.isdigit():
                return cls.sequence(int(word))
            return cls.time(parse_moment(word, time.time_ns()))
        except PositionError:
            raise
        except ValueError:
            raise PositionError(
                f"{text!r} is not a position",
                hint="use start, end, last, a sequence number, or a time like "
                "2026-05-01T12:00:00Z, 12:00 or -10m",
            ) from None

    def __str__(self) -> str:
        if self.anchor == "seq":
            return f"seq {self.value}"
        if self.anchor == "time":
            return format_time(self.value)
        return self.anchor


Position.START = Position("start")
Position.END = Position("end")
Position.LAST = Position("last")

#: Types that `seek` and `start=` accept.
PositionLike: TypeAlias = Position | int | dt.datetime | str


def check_seek(url: str, seq: int, oldest: int, end: int) -> int:
    """Return the number if a reader may seek there; `end` is the number of the next message.

    A number below the oldest is valid: the removed messages are counted as lost. A number beyond
    the end is not: future messages would be lost without a count.

    :raises PositionError: the number is negative, or beyond the end.
    """
    if 0 <= seq <= end:
        return seq
    held = f"{oldest} to {end - 1}" if oldest < end else "none"
    raise PositionError(
        f"{url} has no message {seq} yet: it has {held}, and the next is {end}"
        if seq > end
        else f"a sequence number is not negative, found {seq}",
        seq=seq,
        oldest=oldest,
        end=end,
        hint="seek('end') waits for the next one",
    )
