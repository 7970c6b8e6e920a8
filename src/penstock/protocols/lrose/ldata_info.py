"""What does latest_data_info say of a file?

The fields of one entry, as LROSE's `LdataInfo` holds them, and what its getters make of those that
nobody set (spec lrose 3.3).
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from penstock.core.errors import InvalidOption, Malformed

__all__ = ["NONE", "UNKNOWN", "LatestInfo", "guess_data_type"]

#: What stands for "nobody said so": in user_info1, user_info2 and file_ext; and in the rest.
NONE: Final = "none"
UNKNOWN: Final = "unknown"

_SECOND: Final = 1_000_000_000
_INT32: Final = range(-(2**31), 2**31)
#: What the calendar can say: the years 1 to 9999.
_EARLIEST: Final = -62135596800
_LATEST: Final = 253402300799
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

#: LROSE's file names have this many bytes at most.
_LONGEST: Final = 1024
#: The formats are lines, and tags without an escape: these would be read as something else.
_UNFIT: Final = re.compile(r"[\x00-\x1f\x7f]|</?[a-z_][a-z_0-9]*>")

#: In the order in which LROSE looks for them. A comma is missing there, between nc and raw.
_GUESSES: Final = (
    *("grib", "mdv", "md", "ncraw", "sim"),
    *("simulate", "spdb", "titan", "www", "www_content"),
)


def guess_data_type(directory: str) -> str:
    """Return the kind of data that a directory's name tells of, as LROSE does; or nothing."""
    return next((guess for guess in _GUESSES if f"{guess}/" in directory), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestInfo:
    """One entry: a file that somebody wrote, or a moment for which there is data.

    :raises InvalidOption: a field does not fit the formats.
    """

    #: Seconds since 1970 UTC: when it is valid; for a forecast, when it was made.
    latest_time: int
    #: The file, below its directory.
    rel_data_path: str = UNKNOWN
    #: The end of the file's name, without the dot.
    file_ext: str = NONE
    #: The kind of data, as in the DataMapper: mdv, spdb, …
    data_type: str = UNKNOWN
    user_info1: str = NONE
    user_info2: str = NONE
    is_forecast: bool = False
    #: Seconds between the making of a forecast and the time it is for.
    forecast_lead_secs: int = 0
    #: Where the files are, when they are not beside latest_data_info; else empty.
    displaced_dir_path: str = ""
    #: The program that wrote the file.
    writer: str = UNKNOWN
    #: The latest of all times that the writer has given so far.
    max_time: int = 0
    #: When the reader of a chain of programs had read its own input; 0 for all others.
    prev_mod_time: int = 0

    def __post_init__(self) -> None:
        for name in ("latest_time", "max_time", "prev_mod_time"):
            value = getattr(self, name)
            if not _EARLIEST <= value <= _LATEST:
                raise InvalidOption(name, value, "must lie in the years 1 to 9999")
        if self.forecast_lead_secs not in _INT32:
            raise InvalidOption("forecast_lead_secs", self.forecast_lead_secs, "must fit 32 bits")
        for name in _TEXTS:
            text: str = getattr(self, name)
            if len(text) > _LONGEST:
                raise InvalidOption(name, text[:60] + "…", f"is longer than {_LONGEST} characters")
            if unfit := _UNFIT.search(text):
                raise InvalidOption(
                    name, text, f"LROSE's files have no place for {unfit[0]!r} in a text"
                )

    @property
    def valid_time(self) -> int:
        """When the data is valid, seconds since 1970 UTC: the making and the lead of a forecast."""
        return self.latest_time + (self.forecast_lead_secs if self.is_forecast else 0)

    @property
    def time_ns(self) -> int:
        """The valid time, nanoseconds since 1970 UTC; of times beyond 64 bits the nearest."""
        return max(-(2**63), min(self.valid_time * _SECOND, 2**63 - 1))

    @property
    def calendar(self) -> dt.datetime:
        """`latest_time`, as a date and a time in UTC."""
        return _EPOCH + dt.timedelta(seconds=self.latest_time)

    @property
    def writer_name(self) -> str:
        """Who wrote it; old programs say so in `user_info1`."""
        use_first = self.writer == UNKNOWN and self.user_info1 != NONE
        return self.user_info1 if use_first else self.writer

    @property
    def first_info(self) -> str:
        """What old programs expect in `user_info1`."""
        use_writer = self.user_info1 == NONE and self.writer != UNKNOWN
        return self.writer if use_writer else self.user_info1

    @property
    def second_info(self) -> str:
        """What old programs expect in `user_info2`."""
        use_path = self.user_info2 == NONE and self.rel_data_path != UNKNOWN
        return self.rel_data_path if use_path else self.user_info2

    def to_fields(self) -> dict[str, Any]:
        """Return all fields by name, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_fields(cls, found: dict[str, Any]) -> Self:
        """Make an entry of fields by name, as from JSON.

        :raises Malformed: a field is unknown, missing, or not of its kind.
        """
        unknown = found.keys() - _KINDS.keys()
        if unknown:
            raise Malformed(_WHAT, "a field", f"one of {', '.join(_KINDS)}", min(unknown))
        if "latest_time" not in found:
            raise Malformed(_WHAT, "latest_time", "seconds since 1970", "none")
        for name, value in found.items():
            # A bool is an int to Python, and a lead of "true" seconds is not what was meant.
            if type(value) is not _KINDS[name]:
                raise Malformed(_WHAT, name, _KINDS[name].__name__, repr(value)[:60])
        return cls.checked(**found)

    @classmethod
    def checked(cls, **found: Any) -> Self:
        """Make an entry of what came from outside.

        :raises Malformed: a field does not fit.
        """
        try:
            return cls(**found)
        except InvalidOption as error:
            raise Malformed(_WHAT, error.option, error.reason, repr(error.value)[:60]) from None


_WHAT: Final = "latest_data_info"
_KINDS: Final[dict[str, type]] = {
    field.name: {"int": int, "str": str, "bool": bool}[str(field.type)]
    for field in fields(LatestInfo)
}
_TEXTS: Final = tuple(name for name, kind in _KINDS.items() if kind is str)
