"""The commands about a log: `log ls`, `log trim` and `log verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.cli.console import console, error_console
from penstock.cli.output import note, standard_output
from penstock.core.position import Position
from penstock.core.units import format_size, format_time, parse_duration, parse_size
from penstock.queue.log import endpoint as log
from penstock.queue.log.retention import Limits

if TYPE_CHECKING:
    from penstock.queue.log.info import Listed
    from penstock.queue.log.retention import Trimmed

__all__ = ["add_to"]

#: The most faults listed one by one.
_NAMED = 20

Url = Annotated[str, typer.Argument(metavar="URL", help="The log, such as log:/path/name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Look at, trim and check durable logs.")
    for command in (ls, trim, verify):
        sub.command()(command)
    app.add_typer(sub, name="log", rich_help_panel="Streams")


# --- ls -------------------------------------------------------------------------------------


def ls(url: Url, as_json: AsJson = False) -> None:
    """List the segments of a log: their messages, when they came, and their size on the disk."""
    segments = log.segments(url)
    if as_json:
        typer.echo(json.dumps([_fields(listed) for listed in segments]))
        return
    table = Table(box=None)
    for name, right in (
        ("segment", False),
        ("messages", True),
        ("numbers", False),
        ("first appended", False),
        ("last appended", False),
        ("on disk", True),
        ("state", False),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for listed in segments:
        table.add_row(*_row(listed))
    messages = sum(one.segment.count for one in segments if one.segment is not None)
    size = format_size(sum(one.disk for one in segments))
    with standard_output():
        console.print(table)
        typer.echo(
            f"{_counted(len(segments), 'segment')}, {_counted(messages, 'message')}, "
            f"{size} on the disk"
        )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _row(listed: Listed) -> tuple[str, ...]:
    segment = listed.segment
    name = str(listed.first)
    if segment is None:
        return name, "?", f"{listed.first} …", "?", "?", format_size(listed.disk), "damaged"
    numbers = f"{segment.tail} to {segment.head - 1}" if segment.count else "none"
    return (
        name,
        f"{segment.count:,}",
        numbers,
        _second(segment.oldest_ns),
        _second(segment.newest_ns),
        format_size(segment.disk),
        listed.state,
    )


def _second(time_ns: int | None) -> str:
    """Format a time to the second."""
    return "-" if time_ns is None else format_time(time_ns // 1_000_000_000 * 1_000_000_000)


def _fields(listed: Listed) -> dict[str, Any]:
    segment = listed.segment
    fields = {
        "path": str(listed.path),
        "first_seq": listed.first,
        "state": listed.state,
        "bytes_on_disk": listed.disk,
    }
    if segment is None:
        return fields | {"damage": str(listed.damage)}
    return fields | {
        "oldest_seq": segment.tail if segment.count else None,
        "youngest_seq": segment.head - 1 if segment.count else None,
        "count": segment.count,
        "oldest_time_ns": segment.oldest_ns,
        "youngest_time_ns": segment.newest_ns,
        "bytes": segment.used,
    }


# --- trim -----------------------------------------------------------------------------------


def trim(
    url: Url,
    retain: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep so much on the disk, such as 10G.")
    ] = None,
    retain_age: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Keep what is newer, such as 7d.")
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="SEQ|TIME", help="Remove what comes before this message or time."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the oldest segments of a log, and free their disk space.

    Without an option, by the log's own retention. Whole segments go; the newest one stays, and so
    does what a held cursor has not passed. Writers and readers may go on meanwhile.
    """
    limits = None
    if retain is not None or retain_age is not None or before is not None:
        limits = Limits(
            None if retain is None else parse_size(retain),
            None if retain_age is None else parse_duration(retain_age, "retain_age"),
            *_before(before),
        )
    done = log.trim_log(url, limits)
    if as_json:
        typer.echo(json.dumps(done._asdict()))
        return
    typer.echo(_summary(done))
    if done.held_by is not None:
        note(f"penstock: more would have gone, but the cursor {done.held_by} has not passed it")


def _before(text: str | None) -> tuple[int | None, int | None]:
    """Parse a sequence number or a time."""
    if text is None:
        return None, None
    place = Position.of(text)
    if place.anchor == "seq":
        return place.value, None
    if place.anchor == "time":
        return None, place.value
    raise typer.BadParameter("give a sequence number, or a time like 2026-05-01T12:00:00Z")


def _summary(done: Trimmed) -> str:
    return (
        f"{_counted(done.segments, 'segment')} removed: {_counted(done.messages, 'message')}, "
        f"{format_size(done.bytes)}; {format_size(done.left)} left on the disk"
    )


# --- verify ---------------------------------------------------------------------------------


def verify(url: Url, as_json: AsJson = False) -> None:
    """Check every message of a log; exit code 1 and the first bad ones by name if any is not whole.

    The log may be written to meanwhile.
    """
    total = sum(one.segment.used for one in log.segments(url) if one.segment is not None)
    messages = segments = 0
    faults: list[dict[str, Any]] = []
    with _progress() as progress:
        task = progress.add_task("checking", total=total)
        for checked in log.check(url):
            segments += 1
            messages += checked.messages
            progress.update(task, advance=checked.bytes, description=checked.path.name)
            faults += [
                {"segment": checked.first, "path": str(checked.path), "fault": fault}
                for fault in checked.faults
            ]
    if as_json:
        typer.echo(json.dumps({"segments": segments, "messages": messages, "faults": faults}))
    else:
        for fault in faults[:_NAMED]:
            note(f"penstock: {fault['path']}: {fault['fault']}")
        if more := len(faults[_NAMED:]):
            note(f"penstock: and {more:,} more")
        found = _counted(len(faults), "fault") if faults else "all whole"
        typer.echo(f"{_counted(segments, 'segment')}, {_counted(messages, 'message')}: {found}")
    if faults:
        raise typer.Exit(1)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=error_console,
        transient=True,
        disable=not error_console.is_terminal,
    )
