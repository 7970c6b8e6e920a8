"""The commands about a queue itself: `create`, `info`, `fmq check` and `fmq repair`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from penstock.cli.console import console
from penstock.cli.messages import Url
from penstock.cli.output import bar, note, standard_output
from penstock.core import endpoints
from penstock.core.units import format_duration, format_size, format_time
from penstock.core.url import URL
from penstock.queue import endpoint as fmq

if TYPE_CHECKING:
    from penstock.core.interfaces import StreamInfo

__all__ = ["add_to"]

#: Options that users expect `create` to store, but that a queue does not keep.
_OF_EACH_WRITER = {
    "classic": ("blocking", "compress"),
    "wide": ("hold", "policy", "timeout", "keep", "sync"),
}


#: Details of a stream shown as tables.
_TABLES = {"readers", "cursors", "groups"}
#: Details in bytes, and in seconds.
_SIZES = {"bytes_on_disk", "retain"}
_DURATIONS = {"retain_age"}
#: Details that name something and count nothing.
_IDENTIFIERS = {"epoch", "process"}
_TITLES = {"bytes_on_disk": "on disk", "retain": "keeps at most", "retain_age": "keeps for"}


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Streams")(create)
    app.command(rich_help_panel="Streams")(info)
    sub = typer.Typer(no_args_is_help=True, help="Check and repair Fast Message Queues.")
    sub.command()(check)
    sub.command()(repair)
    app.add_typer(sub, name="fmq", rich_help_panel="Streams")


def create(
    url: Url,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace one that is there, and all that is in it.")
    ] = False,
) -> None:
    """Create a queue or a log.

    Options go into the URL, and sizes are written as 10M or 1G. layout=classic makes a queue for
    LROSE's programs; a name like shmem_10002 makes that one in shared memory, with that key.

    Examples:
      penstock create 'fmq:/data/beams?slots=10000&size=64M'
      penstock create 'log:/data/archive?segment=256M&compress=zstd'
    """
    endpoints.create(url, replace=replace)
    made = endpoints.describe(url)
    size = f"{made.slots:,} slots, {format_size(made.buffer_size)}"
    if "segments" in made.details:
        size = f"in segments of {size}"  # nothing is overwritten
    typer.echo(f"created {made.url.partition('?')[0]}: {made.layout}, in {_place(made)}, {size}")
    options = _OF_EACH_WRITER.get(made.layout, ())
    given = [option for option in options if option in URL.parse(url).options]
    if given:
        note(f"penstock: not kept in the queue, give it to each writer: {', '.join(given)}")


def info(
    url: Url,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a stream holds: its shape, oldest and youngest message, how full it is.

    Examples:
      penstock info fmq:/data/beams
      penstock info log:/data/archive --json
    """
    found = endpoints.describe(url)
    with standard_output():
        if as_json:
            typer.echo(json.dumps(found.as_dict()))
            return
        console.print(_info_table(found))
        if readers := found.details.get("readers") or found.details.get("cursors"):
            console.print(_readers_table(readers, found))
        if groups := found.details.get("groups"):
            console.print(_groups_table(groups))


def _place(found: StreamInfo) -> str:
    return "a file" if found.storage == "file" else found.storage


def _blocking(found: StreamInfo) -> str:
    if not found.blocking:
        return "no"
    names = [reader["name"] for reader in found.details.get("readers", ()) if reader["name"]]
    if not names:
        return "yes: the writer waits for its reader"
    return escape(f"by name: a writer with hold=NAME waits for {', '.join(names)}")


def _info_table(found: StreamInfo) -> Table:
    table = Table(show_header=False, box=None, title=escape(found.url), title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("layout", f"{found.layout}, in {_place(found)}")
    if "segments" in found.details:  # it grows, and is never full
        table.add_row("size", format_size(found.bytes))
    elif found.slots:  # not every protocol tells
        slots = bar(found.count / found.slots)
        table.add_row("slots", f"{slots} {found.count:,} of {found.slots:,}")
    if found.buffer_size and "segments" not in found.details:
        buffer = bar(found.bytes / found.buffer_size)
        held = f"{format_size(found.bytes)} of {format_size(found.buffer_size)}"
        table.add_row("buffer", f"{buffer} {held}")
    table.add_row("messages", _range(found))
    table.add_row("appended", _times(found))
    table.add_row("blocking", _blocking(found))
    for name, value in found.details.items():
        if value not in (None, [], {}) and name not in _TABLES:
            table.add_row(_title(name), escape(_shown(name, value)), style="dim")
    return table


def _title(name: str) -> str:
    plain = name.removesuffix("_ns").removesuffix("_pid").replace("_", " ")
    return _TITLES.get(name, plain)


def _shown(name: str, value: object) -> str:
    """Format a detail of a stream."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_ns"):
            return format_time(value)
        case int() if name in _SIZES:
            return format_size(value)
        case int() | float() if name in _DURATIONS:
            return format_duration(value)
        case int() if name.endswith("_pid"):
            return f"process {value}"
        case int() if name not in _IDENTIFIERS:
            return f"{value:,}"
        case list() | tuple():
            return ", ".join(str(item) for item in value)
    return str(value)


def _groups_table(groups: list[dict[str, Any]]) -> Table:
    table = Table(box=None, title="groups", title_justify="left")
    counts = ("lag", "leased", "waiting", "acked", "redelivered", "dead", "lost")
    for title in ("name", "members", *counts):
        table.add_column(title, justify="left" if title == "name" else "right")
    for group in groups:
        if damage := group.get("damage"):
            table.add_row(escape(group["name"]), escape(damage))
            continue
        members = sum(member["alive"] for member in group["members"])
        numbers = (f"{group[count]:,}" for count in counts)
        table.add_row(escape(group["name"]), f"{members}", *numbers)
    return table


def _readers_table(readers: list[dict[str, Any]], found: StreamInfo) -> Table:
    table = Table(box=None, title="readers", title_justify="left")
    for title in ("name", "process", "next", "behind", ""):
        table.add_column(title, justify="right" if title in {"next", "behind"} else "left")
    for reader in readers:
        process = f"{reader['pid']}" if reader["alive"] else "gone"
        table.add_row(
            escape(reader["name"] or "-"),
            process,
            f"{reader['next_seq']}",
            f"{reader['behind']:,}",
            bar(reader["behind"] / max(1, found.slots), 15),
            style=None if reader["alive"] else "dim",
        )
    return table


def _range(found: StreamInfo) -> str:
    if found.youngest_seq is None:
        return f"{found.count:,}" if found.count else "none"
    return f"{found.count:,}, seq {found.oldest_seq} to {found.youngest_seq}"


def _times(found: StreamInfo) -> str:
    if found.oldest_time_ns is None or found.youngest_time_ns is None:
        return "-"
    span = format_duration((found.youngest_time_ns - found.oldest_time_ns) / 1e9)
    return f"{format_time(found.oldest_time_ns)} to {format_time(found.youngest_time_ns)} ({span})"


def check(url: Url) -> None:
    """Check a queue byte for byte, and say the first thing that is wrong."""
    count = fmq.check(url)
    typer.echo(f"{url.partition('?')[0]} is whole: {count:,} messages")


def repair(url: Url) -> None:
    """Keep what can be read of a damaged queue, and make it usable again.

    The queue as it was found is kept in two files beside it. Stop its writers first.
    """
    done = fmq.repair(url)
    typer.echo(
        f"{done.kept:,} messages kept, {done.dropped:,} could not be read; "
        f"the queue as it was: {done.backup[0]}, {done.backup[1]}"
    )
