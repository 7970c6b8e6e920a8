"""What do the ASCII file and the catalog of latest_data_info look like?

The five or six lines of `_latest_data_info` (spec lrose 3.2), and the one line for each file in
`ldata_file_catalog` (spec lrose 3.1).
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ldata_info import LatestInfo, guess_data_type

__all__ = [
    "LARGEST_FILE",
    "catalog_line",
    "decode_ascii",
    "encode_ascii",
    "leading_number",
    "seconds_of",
]

_WHAT: Final = "_latest_data_info"
#: What a file of this kind can have at most, with every text as long as allowed.
LARGEST_FILE: Final = 1 << 16
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
#: A number as C's `scanf` takes it: what follows is left alone. The digits are bounded so that a
#: hostile number costs nothing.
_NUMBER: Final = re.compile(rb"\s*([+-]?[0-9]{1,18})")
#: The lines that every file has: time, ending, two texts, and whether it is a forecast.
_LINES: Final = 5


def encode_ascii(info: LatestInfo) -> bytes:
    """Return the content of the ASCII file."""
    at = info.calendar
    lines = [
        f"{info.latest_time} {at.year} {at.month} {at.day} {at.hour} {at.minute} {at.second} ",
        info.file_ext,
        info.first_info,
        info.second_info,
        "1" if info.is_forecast else "0",
    ]
    if info.is_forecast:
        lines.append(str(info.forecast_lead_secs))
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def decode_ascii(data: bytes) -> LatestInfo:
    """Read the ASCII file. It does not say the path, the writer, the kind of data or `max_time`.

    LROSE cuts lines at 63 bytes and takes the rest for the next one; here a line is a line.

    :raises Malformed: it is not such a file.
    """
    if len(data) > LARGEST_FILE:
        raise Malformed(_WHAT, "size", f"at most {LARGEST_FILE} bytes", len(data))
    # The last line need not have an end; a line that is missing has no number either.
    lines = [*data.split(b"\n"), b""]
    if len(lines) <= _LINES:
        raise Malformed(_WHAT, "lines", f"at least {_LINES}", len(lines) - 1)
    latest = _number(lines[0], "time")
    if latest == -1:
        latest = _calendar(lines[0])
    ext, first, second = (line.decode(errors="surrogateescape") for line in lines[1:4])
    is_forecast = _number(lines[4], "forecast flag") != 0
    return LatestInfo.checked(
        latest_time=latest,
        file_ext=ext,
        user_info1=first,
        user_info2=second,
        is_forecast=is_forecast,
        forecast_lead_secs=_number(lines[_LINES], "lead time") if is_forecast else 0,
    )


def leading_number(text: bytes) -> int | None:
    """Return the number that a text begins with; None: it does not."""
    match = _NUMBER.match(text)
    return None if match is None else int(match[1])


def _number(line: bytes, where: str) -> int:
    number = leading_number(line)
    if number is None:
        raise Malformed(_WHAT, where, "a number", line[:60])
    return number


def _calendar(line: bytes) -> int:
    """Take the time from the date: the first number said that only this is known."""
    numbers = line.split()[1:7]
    return seconds_of([_number(number, "date") for number in numbers])


def seconds_of(date: list[int]) -> int:
    """Return the seconds since 1970 of year, month, day, hour, minute and second.

    :raises Malformed: there is no such date.
    """
    try:
        year, month, day, hour, minute, second = date
        moment = dt.datetime(year, month, day, tzinfo=dt.UTC)
        # C's conversions carry over what is out of range in a time of day: 24:00:00, 60 seconds.
        moment += dt.timedelta(hours=hour, minutes=minute, seconds=second)
    except (ValueError, OverflowError):
        raise Malformed("latest_data_info", "date", "a date and a time", date) from None
    return (moment - _EPOCH) // dt.timedelta(seconds=1)


def catalog_line(info: LatestInfo, directory: str) -> bytes:
    """Return the line for the day's `ldata_file_catalog`."""
    at = info.calendar
    kind = info.data_type if info.data_type != "unknown" else guess_data_type(directory)
    tags: list[tuple[str, object]] = [
        ("utime", info.latest_time),
        ("time", f"{at.year:04d}-{at:%m-%dT%H:%M:%S}"),
        ("max_time", info.max_time),
    ]
    if info.is_forecast:
        tags.append(("lead_secs", info.forecast_lead_secs))
    tags.append(("rpath", info.rel_data_path))
    tags += [(tag, value) for tag, value in (("ext", info.file_ext), ("dtype", kind)) if value]
    line = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags)
    return line.encode(errors="surrogateescape") + b"\n"
