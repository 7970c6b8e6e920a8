"""What does the XML of latest_data_info look like?

The text of `_latest_data_info.xml`, of the queue's messages and of DsLdataServer (spec lrose 3.3).
LROSE looks for tags, and escapes nothing; so does this.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ldata_info import UNKNOWN, LatestInfo, guess_data_type
from penstock.protocols.lrose.ldata_text import LARGEST_FILE, leading_number, seconds_of

__all__ = ["ROOT", "decode_xml", "encode_xml", "find_number", "find_text"]

_WHAT: Final = "latest_data_info XML"
#: How the text begins.
ROOT: Final = b"<latest_data_info>"
_END: Final = b"</latest_data_info>"
_DATE: Final = ("year", "month", "day", "hour", "min", "sec")
_TEXTS: Final = (
    *("rel_data_path", "writer", "file_ext", "data_type"),
    *("user_info1", "user_info2", "displaced_dir_path"),
)


def encode_xml(info: LatestInfo, directory: str = "") -> bytes:
    """Return the text; `directory` is what an unknown kind of data is guessed from."""
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
    """Read the text; what follows its NUL, if it has one, is not part of it.

    :raises Malformed: it has no end or no time, or a field does not fit.
    """
    if len(data) > LARGEST_FILE:
        raise Malformed(_WHAT, "size", f"at most {LARGEST_FILE} bytes", len(data))
    text = data.partition(b"\0")[0]
    if _END not in text:
        raise Malformed(_WHAT, "end", _END.decode(), text[-60:])
    found: dict[str, Any] = {"latest_time": _time(text)}
    for tag in _TEXTS:
        value = find_text(text, tag)
        if value is not None:
            found[tag] = value
    if find_text(text, "is_forecast") == "true":
        found["is_forecast"] = True
        found["forecast_lead_secs"] = find_number(text, "forecast_lead_secs") or 0
    latest = find_number(text, "max_time")
    found["max_time"] = found["latest_time"] if latest is None else latest
    found["prev_mod_time"] = find_number(text, "prev_mod_time") or 0
    return LatestInfo.checked(**found)


def _time(text: bytes) -> int:
    """Return the time: of the seconds and the date the latter wins, should they disagree."""
    date = [find_number(text, tag) for tag in _DATE]
    numbers = [number for number in date if number is not None]
    if len(numbers) == len(_DATE):
        return seconds_of(numbers)
    seconds = find_number(text, "unix_time")
    if seconds is None:
        raise Malformed(_WHAT, "time", "unix_time, or year to sec", "neither")
    return seconds


def find_text(text: bytes, tag: str) -> str | None:
    """Return what stands between the first start and the first end of a tag; None: no such."""
    name = tag.encode()
    start, end = text.find(b"<%b>" % name), text.find(b"</%b>" % name)
    start += len(name) + 2
    if start < len(name) + 2 or end < start:
        return None
    return text[start:end].decode(errors="surrogateescape")


def find_number(text: bytes, tag: str) -> int | None:
    """Return the number that stands in a tag; None: there is none."""
    found = find_text(text, tag)
    return None if found is None else leading_number(found.encode(errors="surrogateescape"))
