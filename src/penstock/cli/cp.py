"""The command that copies a stream to another: `cp`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.cat import By, open_at, position_of
from penstock.cli.messages import (
    LOST,
    Follow,
    From,
    Register,
    is_there,
    lacks_messages,
    progress_told,
    tell_interrupted,
    tell_range,
    writer_to,
)
from penstock.cli.output import is_terminal, losses_named, name_losses, note
from penstock.cli.signals import stop_on_signal
from penstock.core.capabilities import AllOrNone, AppendOnce
from penstock.core.errors import InvalidOption, Unsupported
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
from penstock.relay.feed import books_within
from penstock.relay.outages import connection_options, side

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.progress import Progress

    from penstock.core.interfaces import Reader, Writer
    from penstock.relay import RelayOptions

__all__ = ["add_to", "describe"]

#: Seconds between two lines of JSON.
_LINE_EVERY = 1.0
#: Shown while a playback is paused.
_PAUSED = ", paused: the space bar goes on"


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
            help="The last message, which is copied, too: end, a sequence number, or a time.",
        ),
    ] = None,
    by: By = "append",
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
    speed: Annotated[
        str,
        typer.Option(
            metavar="1|10|max",
            help="Play back as fast as it was recorded, by the messages' times, or so many times "
            "as fast.",
        ),
    ] = "max",
    loop: Annotated[
        bool, typer.Option("--loop", help="Begin again at --from when it is over, until Ctrl-C.")
    ] = False,
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
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Columns of payloads in a parquet:, arrow:, csv:, jsonl: or mcap: file, as of "
            "cat: 'struct:<dHH', 'json:id BIGINT', …",
        ),
    ] = None,
    register: Register = False,
    progress: Annotated[
        Literal["auto", "json", "none"],
        typer.Option(help="What to show: a line that changes, JSON lines, or nothing."),
    ] = "auto",
) -> None:
    """Copy a stream to another, of whatever kind.

    Messages that were lost are named on stderr, and the exit code is then 3. On a terminal, the
    space bar pauses what is played with --speed, and lets it go on.

    Examples:
      penstock cp fmq:/data/beams log:/data/archive --follow --state ./state
      penstock cp log:/data/archive fmq:/tmp/replay --from -10m --speed 10
      penstock cp log:/data/archive parquet:/tmp/archive.parquet
    """
    if loop and (follow or state is not None):
        raise typer.BadParameter("--loop begins again, and goes with neither --follow nor --state")
    place = position_of(start)
    options = relay_options(
        source=source,
        target=target,
        start=place if isinstance(place, Position) else Position.START,
        end=None if end is None else Position.of(end),
        by=by,
        follow=follow,
        state=state,
        policy=policy,
        quota=quota,
        speed=speed,
        batch=batch,
        clock_offset=clock_offset,
        give_up=give_up,
        refused="drop" if drop_refused else "stop",
        strict=strict,
    )
    is_new, is_resumed = not is_there(target), state is not None and state.exists()
    if is_resumed and start != "start":
        note(f"penstock: {state} says where to go on, and not --from")
    # Messages are stored in append order: other times are searched from the start.
    first = Position.START if by != "append" and options.start.anchor == "time" else place
    with (
        open_at(source, first, **connection_options(source)) as reader,
        losses_named(lambda: books_within(reader, options.end), live=follow),
        _target(options, register, decode) as writer,
    ):
        _tell_fields_lost(reader, writer, strict)
        begins = reader.statistics().next_seq
        played = _Playback(reader, writer, options)

        def so_far() -> str:
            """Say what is there if it ends early: nothing of a file."""
            done = played.statistics()
            is_kept = not isinstance(writer, AllOrNone)
            return _copied(done if is_kept else done._replace(copied=0, bytes=0))

        def held_up() -> None:
            tell_interrupted(so_far())
            name_losses(books_within(reader, options.end))

        with stop_on_signal(held_up=held_up) as stop, _progress(progress) as shown:
            take = _display(progress, shown)
            with (
                progress_told(so_far),
                _pause_key(shown, enabled=options.speed is not None) as is_paused,
            ):
                while played.run(stop, is_paused, take) and loop and not stop():
                    reader.seek(Position.START if begins is None else begins)
                if stop() and not follow and not loop:
                    raise KeyboardInterrupt
        lost = books_within(reader, options.end).lost
    done = played.statistics()  # with what nobody took, which is known when the target is closed
    if progress == "json":
        state_now = "stopped" if stop() else "done"
        typer.echo(_json_line("end", RelayStatus("cp", state_now, None, done)))
    else:
        typer.echo(describe(done))
    if not done.copied and not follow and not is_resumed and (start != "start" or end is not None):
        tell_range(source, f"from {start}" + (f" to {end}" if end else ""))
    # A live queue is for readers that keep up with it, and a file is whole or not there.
    is_live = follow or loop or options.speed is not None
    is_checked = is_new and not is_live and not isinstance(writer, AllOrNone)
    if lost or done.missing or (is_checked and lacks_messages(target, _stored(target, done))):
        raise typer.Exit(LOST)


def _stored(target: str, done: RelayStatistics) -> int:
    """Return how many messages of a stream the copied ones are; 0: that is not known."""
    return done.copied if isinstance(side(target), AppendOnce) else 0


class _Playback:
    """Copies a stream once or in a loop, and keeps the counters of all rounds."""

    def __init__(self, reader: Reader, writer: Writer, options: RelayOptions) -> None:
        self._reader, self._writer, self._options = reader, writer, options
        self._relay: Relay | None = None
        self._earlier = RelayStatistics(0, 0, 0, {}, 0, 0, 0, 0, 0)

    def run(
        self,
        should_stop: Callable[[], bool],
        is_paused: Callable[[], bool],
        show: Callable[[RelayStatistics], None] | None,
    ) -> bool:
        """Copy the stream; tell whether there were any messages."""
        self._earlier, self._relay = self.statistics(), None
        self._relay = Relay(
            self._reader,
            self._writer,
            self._options,
            should_stop=should_stop,
            on_progress=None if show is None else lambda _: show(self.statistics()),
            is_paused=is_paused,
        )
        return self._relay.run().read > 0

    def statistics(self) -> RelayStatistics:
        if self._relay is None:
            return self._earlier
        done = self._relay.statistics()
        # Not the sum of the rounds: the target counts what nobody took since it was opened.
        return done.plus(self._earlier)._replace(untaken=done.untaken)


def _pause_key(
    shown: Progress | None, *, enabled: bool
) -> AbstractContextManager[Callable[[], bool]]:
    """Let the space bar pause a playback, and show that in the progress line."""
    if not enabled:
        return nullcontext(lambda: False)
    from penstock.cli.display import PauseKey  # noqa: PLC0415 - most are not played

    def say(is_paused: bool) -> None:
        if shown is None:
            return
        for task in shown.tasks:
            said = str(task.description).removesuffix(_PAUSED)
            shown.update(task.id, description=said + (_PAUSED if is_paused else ""))

    return PauseKey(say)


def _target(options: RelayOptions, register: bool, decode: str | None) -> Writer:
    check_apart(options.source, options.target)  # to open it may empty it
    more = {} if decode is None else {"decode": decode}
    try:
        return writer_to(options.target, register, **connection_options(options.target), **more)
    except InvalidOption as error:
        if error.option == "decode" and error.reason.endswith("has no such option"):
            error.hint = "--decode goes with parquet:, arrow:, csv:, jsonl: and mcap:"
        raise


def _tell_fields_lost(reader: Reader, writer: Writer, strict: bool) -> None:
    lacking = fields_lost(reader, writer)
    if lacking:
        what = ", ".join(f"{field} is {fate}" for field, fate in lacking.items())
        if strict:
            raise Unsupported(
                f"{writer.url} cannot carry every field: {what}", hint="copy without --strict"
            )
        note(f"penstock: {writer.url}: {what}")


def _progress(kind: str) -> AbstractContextManager[Progress | None]:
    """Return the line that changes; None if there is nowhere to show it."""
    if kind != "auto" or not is_terminal(sys.stderr):
        return nullcontext()
    from rich.progress import (  # noqa: PLC0415 - as needed
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from penstock.cli.console import error_console  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=error_console, transient=True)


def _display(kind: str, shown: Progress | None) -> Callable[[RelayStatistics], None] | None:
    if kind == "json":
        said = 0.0

        def say(so_far: RelayStatistics) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= _LINE_EVERY:
                said = now
                typer.echo(_json_line("progress", RelayStatus("cp", "running", None, so_far)))

        return say
    if shown is None:
        return None
    task = shown.add_task("starting", total=None)

    def show(so_far: RelayStatistics) -> None:
        shown.update(task, description=describe(so_far), completed=so_far.copied)

    return show


def _json_line(event: str, status: RelayStatus) -> str:
    return json.dumps({"event": event, **status.as_dict()})


def describe(so_far: RelayStatistics) -> str:
    """Describe the counters of a relay: copied, dropped and lost messages."""
    parts = [_copied(so_far)]
    parts += [f"{n:,} dropped ({reason.value})" for reason, n in so_far.dropped.items()]
    for count, what in (
        (so_far.held, "not copied yet"),
        (so_far.in_doubt, "maybe twice"),
        (so_far.lost, "lost"),
        (so_far.untaken, "taken by nobody"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return ", ".join(parts)


def _copied(so_far: RelayStatistics) -> str:
    plural = "" if so_far.copied == 1 else "s"
    return f"{so_far.copied:,} message{plural} copied ({format_size(so_far.bytes)})"
