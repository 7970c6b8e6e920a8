"""The command that copies a stream to another: `cp`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.losses import losses_named, name_losses
from penstock.cli.messages import LOST, Follow, From, Register, writer_to
from penstock.cli.output import error_console, note
from penstock.cli.stopping import progress_told, stop_on_signal, tell_interrupted
from penstock.core.endpoints import open_reader
from penstock.core.errors import Unsupported
from penstock.core.position import Position
from penstock.core.units import format_size
from penstock.relay import (
    Relay,
    RelayStatistics,
    RelayStatus,
    check_apart,
    fields_lost,
    relay_options,
)
from penstock.relay.patience import connection_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Reader, Writer
    from penstock.relay import RelayOptions

__all__ = ["add_to", "describe"]

#: Seconds between two lines of JSON.
_LINE_EVERY = 1.0


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Messages")(cp)


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The stream to read.")],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="The stream to write; created if missing.")
    ],
    start: From = "start",
    end: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="POSITION",
            help="The last message: end, a sequence number, or a time when it was appended.",
        ),
    ] = None,
    follow: Follow = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep there how far it came; the next time it goes on there, not at --from.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="While the target is slower: latest, queue-size:N, latency:TIME, unlimited, … "
            "Without it the source is read as fast as the target takes it.",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Payload bytes per second at most, such as 1MB/s."),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="N", help="Messages moved at a time, fewer where they are large.")
    ] = 8192,
    clock_offset: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Add this to the time of every message, as -1.5s."),
    ] = None,
    give_up: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long either side may be away: 30s, or for ever with --follow.",
        ),
    ] = None,
    drop_refused: Annotated[
        bool,
        typer.Option(
            "--drop-refused", help="Drop and count messages that the target will never take."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse if the target cannot carry every field.")
    ] = False,
    register: Register = False,
    progress: Annotated[
        Literal["auto", "json", "none"],
        typer.Option(help="What to show: a line that changes, JSON lines, or nothing."),
    ] = "auto",
) -> None:
    """Copy a stream to another, of whatever kind.

    Messages that were lost are named on stderr, and the exit code is then 3.
    """
    options = relay_options(
        source=source,
        target=target,
        start=Position.of(start),
        end=None if end is None else Position.of(end),
        follow=follow,
        state=state,
        policy=policy,
        quota=quota,
        batch=batch,
        clock_offset=clock_offset,
        give_up=give_up,
        refused="drop" if drop_refused else "stop",
        strict=strict,
    )
    with (
        open_reader(source, options.start, **connection_options(source)) as reader,
        losses_named(reader, live=follow),
        _target(options, register) as writer,
    ):
        _tell_fields_lost(reader, writer, strict)

        def held_up() -> None:
            tell_interrupted(_copied(relay.statistics()))
            name_losses(reader.statistics())

        with stop_on_signal(held_up=held_up) as stop, _progress(progress) as shown:
            take = _display(progress, shown)
            relay = Relay(reader, writer, options, should_stop=stop, on_progress=take)
            with progress_told(lambda: _copied(relay.statistics())):
                done = relay.run()
                if stop() and not follow:
                    raise KeyboardInterrupt
        lost = reader.statistics().lost
    if progress == "json":
        state_now = "stopped" if stop() else "done"
        typer.echo(_json_line("end", RelayStatus("cp", state_now, None, done)))
    else:
        typer.echo(describe(done))
    if lost or done.missing:
        raise typer.Exit(LOST)


def _target(options: RelayOptions, register: bool) -> Writer:
    check_apart(options.source, options.target)  # to open it may empty it
    return writer_to(options.target, register, **connection_options(options.target))


def _tell_fields_lost(reader: Reader, writer: Writer, strict: bool) -> None:
    lacking = fields_lost(reader, writer)
    if lacking:
        what = ", ".join(f"{field} is {fate}" for field, fate in lacking.items())
        if strict:
            raise Unsupported(
                f"{writer.url} cannot carry every field: {what}", hint="copy without --strict"
            )
        note(f"penstock: {writer.url}: {what}")


def _progress(kind: str) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=error_console,
        transient=True,
        disable=kind != "auto" or not error_console.is_terminal,
    )


def _display(kind: str, shown: Progress) -> Callable[[RelayStatistics], None] | None:
    if kind == "none":
        return None
    if kind == "json":
        said = 0.0

        def say(so_far: RelayStatistics) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= _LINE_EVERY:
                said = now
                typer.echo(_json_line("progress", RelayStatus("cp", "running", None, so_far)))

        return say
    task = shown.add_task("starting", total=None)

    def show(so_far: RelayStatistics) -> None:
        shown.update(task, description=describe(so_far), completed=so_far.copied)

    return show


def _json_line(event: str, status: RelayStatus) -> str:
    return json.dumps({"event": event, **status.as_dict()})


def describe(so_far: RelayStatistics) -> str:
    """Say what became of the messages of a relay."""
    parts = [_copied(so_far)]
    parts += [f"{n:,} dropped ({reason.value})" for reason, n in so_far.dropped.items()]
    for count, what in (
        (so_far.held, "not copied yet"),
        (so_far.in_doubt, "maybe twice"),
        (so_far.lost, "lost"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return ", ".join(parts)


def _copied(so_far: RelayStatistics) -> str:
    plural = "" if so_far.copied == 1 else "s"
    return f"{so_far.copied:,} message{plural} copied ({format_size(so_far.bytes)})"
