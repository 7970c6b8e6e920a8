"""How does PrintDataMap show a data map?

The three forms are LROSE's own, to the character, so that scripts that read them go on working.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.protocols.lrose.datamapper_wire import DataSetInfo

__all__ = [
    "Column",
    "Columns",
    "columns",
    "date",
    "lead",
    "listed",
    "plain",
    "size",
    "table",
    "xml",
]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

#: The elements of a data set in XML, in LROSE's order, and the fields they show.
_ELEMENTS: Final = (
    ("monitor_time", "check_time"),
    ("latest_time", "latest_time"),
    ("forecast_lead_time", "forecast_lead_time"),
    ("last_reg_time", "last_reg_time"),
    ("start_time", "start_time"),
    ("end_time", "end_time"),
    ("nfiles", "nfiles"),
    ("total_bytes", "total_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table besides data type, directory and host."""

    ip: bool = False
    latest: bool = False
    #: Show times as ages.
    relt: bool = False
    lreg: bool = False
    dates: bool = False
    size: bool = False
    status: bool = False


class Column(NamedTuple):
    """One column of a table."""

    title: str
    #: Formats the value of an entry.
    value: Callable[[DataSetInfo], str]
    #: Width in characters, right-aligned; 0: as wide as the values, left-aligned.
    width: int


def listed(infos: Iterable[DataSetInfo], *, later_than: int | None, now: int) -> list[DataSetInfo]:
    """Return the entries to show: all, or those with data `later_than` or more seconds old."""
    return [
        info
        for info in infos
        if later_than is None or later_than < 0 or now - info.latest_time >= later_than
    ]


def _clean(text: str) -> str:
    """Escape unprintable characters: registered text could hold terminal sequences."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _number(each) for each in text)


def _number(character: str) -> str:
    # A byte that is not UTF-8 is a surrogate in the text; the byte is its last 8 bits.
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


# --- for programs ---------------------------------------------------------------------------


def plain(infos: Sequence[DataSetInfo], shown: Iterable[DataSetInfo] | None = None) -> str:
    """Return the count of all entries, and a line for each one shown (default: all)."""
    lines = [str(len(infos))]
    lines += [
        f"{_clean(info.datatype)} {_clean(info.dir)} {_clean(info.hostname)} "
        f"{_clean(info.ipaddr)} {info.latest_time} "
        f"{info.forecast_lead_time} {info.last_reg_time} {info.start_time} {info.end_time} "
        f"{info.nfiles:g} {info.total_bytes:g}"
        for info in (infos if shown is None else shown)
    ]
    return "\n".join(lines) + "\n"


def xml(infos: Iterable[DataSetInfo], hostname: str) -> str:
    """Return the map of a host as XML.

    The host of every data set is the queried one, as in LROSE.
    """
    host = _escaped(hostname)
    lines = [f'<monitored hostname="{host}">']
    for info in infos:
        lines.append(
            f'  <dataset hostname="{host}" datatype="{_escaped(info.datatype)}" '
            f'dir="{_escaped(info.dir)}">'
        )
        for element, field in _ELEMENTS:
            lines.append(f"    <{element}>{getattr(info, field):{_NUMBER[field]}}</{element}>")
        lines.append("  </dataset>")
    lines.append("</monitored>")
    return "\n".join(lines) + "\n"


#: Floats show as C++ shows them.
_NUMBER: Final = {field: "g" if field in {"nfiles", "total_bytes"} else "d"
                  for _, field in _ELEMENTS}  # fmt: skip


def _escaped(text: str) -> str:
    # LROSE does not escape them, which no XML parser accepts.
    text = _clean(text)
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{name};")
    return text


# --- for people -----------------------------------------------------------------------------


def columns(wanted: Columns, infos: Sequence[DataSetInfo]) -> list[Column]:
    """Return the columns of a table; that of leads only if an entry is a forecast."""
    found = [
        Column("DataType", lambda info: _clean(info.datatype), 0),
        Column("Dir", lambda info: _clean(info.dir), 0),
        Column("HostName", lambda info: _clean(info.hostname), 0),
    ]
    if wanted.ip:
        found.append(Column("IpAddr", lambda info: _clean(info.ipaddr), 0))
    if wanted.latest:
        title = "Latest" if wanted.relt else "Latest time"
        found.append(_time_column(title, "latest_time", wanted))
        if any(info.forecast_lead_time > 0 for info in infos):
            found.append(Column("FcastLead", lambda info: lead(info.forecast_lead_time), 11))
    if wanted.lreg:
        title = "Last reg" if wanted.relt else "Last reg time"
        found.append(_time_column(title, "last_reg_time", wanted))
    if wanted.dates:
        found.append(Column("Start date", lambda info: date(info.start_time), 12))
        found.append(Column("End date", lambda info: date(info.end_time), 12))
    if wanted.size:
        found.append(Column("nFiles", lambda info: size(info.nfiles), 8))
        found.append(Column("nBytes", lambda info: size(info.total_bytes), 8))
    if wanted.status:
        found.append(Column("Status", lambda info: _clean(info.status), 0))
    return found


def _time_column(title: str, field: str, wanted: Columns) -> Column:
    if wanted.relt:
        return Column(title, lambda info: _ago(getattr(info, field), info.check_time), 11)
    return Column(title, lambda info: _moment(getattr(info, field)), 22)


def table(
    infos: Sequence[DataSetInfo],
    shown: Sequence[DataSetInfo],
    wanted: Columns,
    hosts: str,
    now: int,
) -> str:
    """Return the table that PrintDataMap prints; `hosts` as queried, relays included."""
    host = hosts.rpartition(":")[2]
    relay = f"Relay host list: '{hosts}'" if host != hosts else None
    at = f"{_utc(infos[0].check_time if infos else now):%Y/%m/%d %H:%M:%S}"
    if not infos:
        lines = [f"==== No data sets on host '{host}' at time {at} ===="]
        lines += [f"     {relay}"] if relay else []
        return "\n".join(lines) + "\n"
    lines = ["", f"=========== Data on host '{host}' at time {at} =========="]
    lines += [f"            {relay}"] if relay else []
    lines.append("")
    chosen = columns(wanted, infos)
    rows = [
        [column.title for column in chosen],
        ["=" * len(column.title) for column in chosen],
        *([column.value(info) for column in chosen] for info in shown),
    ]
    widths = [
        column.width or max(len(column.title), *(len(column.value(info)) for info in infos))
        for column in chosen
    ]
    lines += [_row(row, chosen, widths) for row in rows]
    if wanted.size:
        lines += _totals(shown, chosen, widths)
    return "\n".join([*lines, "", ""])


def _row(row: Sequence[str], chosen: Sequence[Column], widths: Sequence[int]) -> str:
    cells = []
    for number, (text, column, width) in enumerate(zip(row, chosen, widths, strict=True)):
        if column.width:
            cells.append(f"{text or ' ':>{width}}")
        elif column.title == "Status":
            cells.append(f"  {text}")
        else:
            cells.append(f"{'  ' if number else ''}{text:<{width}}")
    return "".join(cells)


def _totals(
    shown: Sequence[DataSetInfo], chosen: Sequence[Column], widths: Sequence[int]
) -> list[str]:
    files = sum(info.nfiles for info in shown)
    bytes = sum(info.total_bytes for info in shown)
    if files <= 0 and bytes <= 0:
        return []
    before_status = [
        (column, width)
        for column, width in zip(chosen, widths, strict=True)
        if column.title != "Status"
    ]
    total = sum(width for _, width in before_status)
    total += 2 * (sum(not column.width for column, _ in before_status) - 1)
    return [
        f"{'======  ======':>{total}}",
        f"{size(files) or ' ':>{total - 8}}{size(bytes) or ' ':>8}",
    ]


def _utc(seconds: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=seconds)


def _moment(seconds: int) -> str:
    return "" if seconds in {-1, 0} else f"{_utc(seconds):%Y/%m/%d-%H:%M:%S}"


def date(seconds: int) -> str:
    """Format a date; empty for an unknown time."""
    return "" if seconds <= 0 else f"{_utc(seconds):%Y/%m/%d}"


def lead(seconds: int) -> str:
    """Format a forecast lead; empty for what is not a forecast."""
    return "" if seconds < 0 else "+" + _clock_time(seconds)


def _ago(seconds: int, now: int) -> str:
    if seconds <= 0:
        return ""
    sign = "" if seconds == now else "-" if seconds < now else "+"
    return sign + _clock_time(abs(now - seconds))


def _clock_time(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def size(number: float) -> str:
    """Format a number in a few characters: `12`, `1.2K`, `345M`; empty below 1."""
    if number < 1:
        return ""
    if number < 1e3:  # noqa: PLR2004 - the unit itself
        return f"{number:g}"
    for unit, one in (("K", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < 10 * one:
            return f"{number / one:.1f}{unit}"
        if number < 1000 * one:
            return f"{number / one:.0f}{unit}"
    return f"{number / 1e12:.1f}T" if number < 10e12 else f"{number / 1e12:.0f}T"  # noqa: PLR2004
