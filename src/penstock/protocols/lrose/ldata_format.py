"""Which fields does latest_data_info have, and how are they encoded: ASCII, XML, queue message?

The fields of one entry, as in LROSE's `LdataInfo`, and what its getters return for those that are
not set (docs/specs/lrose.md 3.3).
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from penstock.core.errors import InvalidOption, Malformed

__all__ = [
    "LARGEST_FILE",
    "NONE",
    "ROOT",
    "UNKNOWN",
    "LatestInfo",
    "catalog_line",
    "decode_ascii",
    "decode_body",
    "decode_xml",
    "encode_ascii",
    "encode_body",
    "encode_xml",
    "find_number",
    "find_text",
    "guess_data_type",
    "xml_in_body",
]

# --- an entry -----------------------------------------------------------------------------------

#: Texts for "not set": in user_info1, user_info2 and file_ext; and in the others.
NONE: Final = "none"
UNKNOWN: Final = "unknown"

_SECOND: Final = 1_000_000_000
_INT32: Final = range(-(2**31), 2**31)
#: The range of the calendar: the years 1 to 9999.
_EARLIEST: Final = -62135596800
_LATEST: Final = 253402300799
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

#: LROSE's file names have this many bytes at most.
_LONGEST: Final = 1024
#: Not allowed in texts that are written: the formats are lines, and tags without escapes. LROSE's
#: programs write anything, and read it.
_UNFIT: Final = re.compile(r"[\x00-\x1f\x7f]|</?[a-z_][a-z_0-9]*>")

#: In the order in which LROSE looks for them. A comma is missing there, between nc and raw.
_GUESSES: Final = (
    *("grib", "mdv", "md", "ncraw", "sim"),
    *("simulate", "spdb", "titan", "www", "www_content"),
)


def guess_data_type(directory: str) -> str:
    """Return the kind of data that a directory's name implies, as LROSE does; or empty."""
    return next((guess for guess in _GUESSES if f"{guess}/" in directory), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestInfo:
    """One entry: a new file, or a time for which data exist.

    :raises InvalidOption: a field is not valid in the formats; see `as_read`.
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
    #: Directory of the files, if it is not that of latest_data_info; else empty.
    displaced_dir_path: str = ""
    #: The program that wrote the file.
    writer: str = UNKNOWN
    #: The latest of all times that the writer has given so far.
    max_time: int = 0
    #: In a chain of programs: when the writer read its own input; otherwise 0.
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
        """When the data is valid, seconds since 1970 UTC; of a forecast: base time plus lead."""
        return self.latest_time + (self.forecast_lead_secs if self.is_forecast else 0)

    @property
    def time_ns(self) -> int:
        """The valid time, nanoseconds since 1970 UTC, clamped to 64 bits."""
        return max(-(2**63), min(self.valid_time * _SECOND, 2**63 - 1))

    @property
    def calendar(self) -> dt.datetime:
        """`latest_time`, as a date and a time in UTC."""
        return _EPOCH + dt.timedelta(seconds=self.latest_time)

    @property
    def writer_name(self) -> str:
        """The program that wrote it; old programs store that in `user_info1`."""
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
        """Return the entry for fields by name, as from JSON, with any texts that the XML can carry.

        :raises Malformed: a field is unknown, missing, of a wrong type, or would be read from the
            XML as something else.
        """
        unknown = found.keys() - _KINDS.keys()
        if unknown:
            raise Malformed(_WHAT, "a field", f"one of {', '.join(_KINDS)}", min(unknown))
        if "latest_time" not in found:
            raise Malformed(_WHAT, "latest_time", "seconds since 1970", "none")
        for name, value in found.items():
            # A bool is an int in Python; a lead of `true` seconds is an error.
            if type(value) is not _KINDS[name]:
                raise Malformed(_WHAT, name, _KINDS[name].__name__, repr(value)[:60])
        info = cls.as_read(**found)
        _check_xml(info)
        return info

    @classmethod
    def checked(cls, **found: Any) -> Self:
        """Return the entry for fields from outside.

        :raises Malformed: a field is not valid.
        """
        try:
            return cls(**found)
        except InvalidOption as error:
            raise Malformed(_WHAT, error.option, error.reason, repr(error.value)[:60]) from None

    @classmethod
    def as_read(cls, **found: Any) -> Self:
        """Return the entry for fields as LROSE would read them: with any texts.

        :raises Malformed: a number is not valid.
        """
        texts = {name: found.pop(name) for name in _TEXTS if name in found}
        info = cls.checked(**found)
        for name, text in texts.items():
            object.__setattr__(info, name, text)
        return info


_WHAT: Final = "latest_data_info"
_KINDS: Final[dict[str, type]] = {
    field.name: {"int": int, "str": str, "bool": bool}[str(field.type)]
    for field in fields(LatestInfo)
}
_TEXTS: Final = tuple(name for name, kind in _KINDS.items() if kind is str)


# --- the ASCII file and the catalog -------------------------------------------------------------
# The five or six lines of `_latest_data_info` (docs/specs/lrose.md 3.2), and the one line for each
# file in `ldata_file_catalog` (docs/specs/lrose.md 3.1).

_ASCII: Final = "_latest_data_info"
#: Most bytes of such a file, with every text of the maximum length.
LARGEST_FILE: Final = 1 << 16
#: A number as C's `scanf` reads it, ignoring what follows. The digits are bounded, so that a
#: hostile number costs nothing.
_NUMBER: Final = re.compile(rb"\s*([+-]?[0-9]{1,18})")
#: The lines that every file has: time, ending, two texts, and whether it is a forecast.
_LINES: Final = 5


def encode_ascii(info: LatestInfo) -> bytes:
    """Encode the ASCII file."""
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
    """Decode the ASCII file. It lacks the path, the writer, the kind of data and `max_time`.

    LROSE cuts lines at 63 bytes and takes the rest for the next line; this does not.

    :raises Malformed: it is not such a file.
    """
    if len(data) > LARGEST_FILE:
        raise Malformed(_ASCII, "size", f"at most {LARGEST_FILE} bytes", len(data))
    # The last line need not have an end; a line that is missing has no number either.
    lines = [*data.split(b"\n"), b""]
    if len(lines) <= _LINES:
        raise Malformed(_ASCII, "lines", f"at least {_LINES}", len(lines) - 1)
    latest = _number(lines[0], "time")
    if latest == -1:
        latest = _calendar(lines[0])
    ext, first, second = (line.decode(errors="surrogateescape") for line in lines[1:4])
    is_forecast = _number(lines[4], "forecast flag") != 0
    return LatestInfo.as_read(
        latest_time=latest,
        file_ext=ext,
        user_info1=first,
        user_info2=second,
        is_forecast=is_forecast,
        forecast_lead_secs=_number(lines[_LINES], "lead time") if is_forecast else 0,
    )


def _leading_number(text: bytes) -> int | None:
    """Return the number at the start of a text; None: there is none."""
    match = _NUMBER.match(text)
    return None if match is None else int(match[1])


def _number(line: bytes, where: str) -> int:
    number = _leading_number(line)
    if number is None:
        raise Malformed(_ASCII, where, "a number", line[:60])
    return number


def _calendar(line: bytes) -> int:
    """Return the time from the date, when the first number marks it as the only source."""
    numbers = line.split()[1:7]
    return _seconds_of([_number(number, "date") for number in numbers])


def _seconds_of(date: list[int]) -> int:
    """Return the seconds since 1970 of year, month, day, hour, minute and second.

    What is out of range is carried over, as by LROSE: month 13, February 30, 24:00:00.

    :raises Malformed: it is outside of the years 1 to 9999.
    """
    try:
        year, month, day, hour, minute, second = date
        years, month = divmod(month - 1, 12)
        moment = dt.datetime(year + years, month + 1, 1, tzinfo=dt.UTC)
        moment += dt.timedelta(days=day - 1, hours=hour, minutes=minute, seconds=second)
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


# --- XML ----------------------------------------------------------------------------------------
# The text of `_latest_data_info.xml`, of the queue's messages and of DsLdataServer
# (docs/specs/lrose.md 3.3). LROSE looks for tags, and escapes nothing; so does this.

_XML: Final = "latest_data_info XML"
#: How the text begins.
ROOT: Final = b"<latest_data_info>"
_END: Final = b"</latest_data_info>"
_DATE: Final = ("year", "month", "day", "hour", "min", "sec")
_XML_TEXTS: Final = (
    *("rel_data_path", "writer", "file_ext", "data_type"),
    *("user_info1", "user_info2", "displaced_dir_path"),
)


def encode_xml(info: LatestInfo, directory: str = "") -> bytes:
    """Encode the XML; an unknown kind of data is guessed from `directory`."""
    at = info.calendar
    kind = guess_data_type(directory) if info.data_type == UNKNOWN else info.data_type
    tags: list[tuple[str, object]] = [
        ("unix_time", info.latest_time),
        ("year", f"{at.year:04d}"),
        ("month", f"{at.month:02d}"),
        ("day", f"{at.day:02d}"),
        ("hour", f"{at.hour:02d}"),
        ("min", f"{at.minute:02d}"),
        ("sec", f"{at.second:02d}"),
        ("rel_data_path", info.rel_data_path),
        ("file_ext", info.file_ext),
        ("data_type", kind),
        ("user_info1", info.user_info1),
        ("user_info2", info.user_info2),
        ("is_forecast", "true" if info.is_forecast else "false"),
        ("forecast_lead_secs", info.forecast_lead_secs),
    ]
    if info.displaced_dir_path:
        tags.append(("displaced_dir_path", info.displaced_dir_path))
    tags += [
        ("writer", info.writer),
        ("max_time", info.max_time),
        ("prev_mod_time", info.prev_mod_time),
    ]
    inner = "".join(f"  <{tag}>{value}</{tag}>\n" for tag, value in tags)
    return b"%b\n%b%b\n" % (ROOT, inner.encode(errors="surrogateescape"), _END)


def decode_xml(data: bytes) -> LatestInfo:
    """Decode the XML; bytes after a NUL are ignored.

    :raises Malformed: its end or its time is missing, or a field is not valid.
    """
    if len(data) > LARGEST_FILE:
        raise Malformed(_XML, "size", f"at most {LARGEST_FILE} bytes", len(data))
    text = data.partition(b"\0")[0]
    if _END not in text:
        raise Malformed(_XML, "end", _END.decode(), text[-60:])
    found: dict[str, Any] = {"latest_time": _time(text)}
    for tag in _XML_TEXTS:
        value = find_text(text, tag)
        if value is not None:
            found[tag] = value
    if find_text(text, "is_forecast") == "true":
        found["is_forecast"] = True
        found["forecast_lead_secs"] = find_number(text, "forecast_lead_secs") or 0
    latest = find_number(text, "max_time")
    found["max_time"] = found["latest_time"] if latest is None else latest
    found["prev_mod_time"] = find_number(text, "prev_mod_time") or 0
    return LatestInfo.as_read(**found)


def _check_xml(info: LatestInfo) -> None:
    """Check that the XML, which has no escapes, is read as the same entry.

    :raises Malformed: it is read as another.
    """
    try:
        again = decode_xml(encode_xml(info))
    except UnicodeEncodeError as error:
        raise Malformed(_WHAT, "text", "bytes, or UTF-8", ascii(error.object[:60])) from None
    guessed = info.data_type == UNKNOWN  # from the directory
    left_out = {"data_type": guessed, "forecast_lead_secs": not info.is_forecast}
    for name in _KINDS:
        said, read = getattr(info, name), getattr(again, name)
        if read != said and not left_out.get(name):
            raise Malformed(_WHAT, name, f"read from XML as {said!r:.60}", repr(read)[:60])


def _time(text: bytes) -> int:
    """Return the time; if seconds and date disagree, that of the date."""
    date = [find_number(text, tag) for tag in _DATE]
    numbers = [number for number in date if number is not None]
    if len(numbers) == len(_DATE):
        return _seconds_of(numbers)
    seconds = find_number(text, "unix_time")
    if seconds is None:
        raise Malformed(_XML, "time", "unix_time, or year to sec", "neither")
    return seconds


def find_text(text: bytes, tag: str) -> str | None:
    """Return the text between the first start and the first end of a tag, or None."""
    name = tag.encode()
    start, end = text.find(b"<%b>" % name), text.find(b"</%b>" % name)
    start += len(name) + 2
    if start < len(name) + 2 or end < start:
        return None
    return text[start:end].decode(errors="surrogateescape")


def find_number(text: bytes, tag: str) -> int | None:
    """Return the number in a tag, or None."""
    found = find_text(text, tag)
    return None if found is None else _leading_number(found.encode(errors="surrogateescape"))


# --- messages of the queue ----------------------------------------------------------------------
# The old struct, if the ASCII form is on, and the XML, if that is on (docs/specs/lrose.md 3.4).

_BODY: Final = "latest_data_info message"
#: latest_time, n_fcasts, file_ext, user_info1, user_info2.
_STRUCT: Final = struct.Struct(">Ii64s64s64s")
_LEAD: Final = struct.Struct(">i")
_LONGEST_TEXT: Final = 63


def encode_body(
    info: LatestInfo, directory: str = "", *, ascii_on: bool = True, xml_on: bool = True
) -> bytes:
    """Encode the message; an unknown kind of data is guessed from `directory`.

    :raises InvalidOption: both forms are off.
    """
    if not ascii_on and not xml_on:
        raise InvalidOption("use_xml", False, "the queue carries the ASCII or the XML form")
    body = b""
    if ascii_on:
        texts = (info.file_ext, info.user_info1, info.user_info2)
        # The time has 32 bits here; the XML has all of it.
        body = _STRUCT.pack(
            info.latest_time & 0xFFFFFFFF,
            int(info.is_forecast),
            *(text.encode(errors="surrogateescape")[:_LONGEST_TEXT] for text in texts),
        )
        if info.is_forecast:
            body += _LEAD.pack(info.forecast_lead_secs)
    if xml_on:
        body += encode_xml(info, directory) + b"\0"
    return body


def xml_in_body(body: bytes) -> bytes | None:
    """Return the XML in a message, without its NUL; None: there is only the struct."""
    for at in (0, _STRUCT.size, _STRUCT.size + _LEAD.size):
        if body.startswith(ROOT, at):
            return body[at:].partition(b"\0")[0]
    return None


def decode_body(body: bytes) -> LatestInfo:
    """Decode a message: the XML if it has one, or else the struct.

    :raises Malformed: it is neither.
    """
    xml = xml_in_body(body)
    if xml is not None:
        return decode_xml(xml)
    if len(body) < _STRUCT.size:
        raise Malformed(_BODY, "size", f"at least {_STRUCT.size} bytes", len(body))
    latest, forecasts, *texts = _STRUCT.unpack_from(body)
    ext, first, second = (
        text.partition(b"\0")[0].decode(errors="surrogateescape") for text in texts
    )
    lead = 0
    if forecasts:
        if len(body) < _STRUCT.size + _LEAD.size:
            raise Malformed(_BODY, "size", f"{_STRUCT.size + _LEAD.size} bytes", len(body))
        (lead,) = _LEAD.unpack_from(body, _STRUCT.size)
    # LROSE reads it as signed, which ends in 2038; what is below 0 was never meant.
    return LatestInfo.as_read(
        latest_time=latest,
        max_time=latest,
        file_ext=ext,
        user_info1=first,
        user_info2=second,
        is_forecast=bool(forecasts),
        forecast_lead_secs=lead,
    )
