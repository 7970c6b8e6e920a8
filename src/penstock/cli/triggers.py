"""The command that runs another for every new file: `on`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.messages import LOST
from penstock.cli.output import note
from penstock.core.units import format_duration, format_time, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from penstock.core.retry import RetryPolicy
    from penstock.registry.triggers import Happening, Trigger

__all__ = ["add_to"]

_STDERR = 2


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(name="on", rich_help_panel="Files")(on)


def on(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory that the files are written to.")
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND …", help="What to run for each; {path} is the file."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name that the place is kept under.")] = "on",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Where a new name begins: last (the newest that is there), start or end.",
        ),
    ] = "last",
    attempts: Annotated[int, typer.Option(help="How often a file is tried at most.")] = 3,
    backoff: Annotated[
        str, typer.Option(metavar="TIME", help="Wait so long after a failure; then twice as long.")
    ] = "1s",
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="End a run that takes longer than this.")
    ] = None,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="When told to stop, let a run go on for so long."),
    ] = "5s",
    idle: Annotated[
        str | None, typer.Option(metavar="TIME", help="End when nothing came for so long.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the place and the dead letters here."),
    ] = None,
    info_name: Annotated[
        str, typer.Option(help="What the files are called, behind an underscore.")
    ] = "latest_data_info",
    dead: Annotated[
        bool,
        typer.Option("--dead", help="List the files given up; with a command, try them again."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Run a command for every new file: in order, at least once, also after a crash.

    No shell is involved. Words of the command may have {path}, {rel}, {dir}, {ext}, {time},
    {unix}, {valid}, {lead}, {type}, {writer}, {user1}, {user2} and {seq}; {{ is a brace. What it
    prints goes to standard error; standard output has one line for each file.

    Examples:
      penstock on /data/radar --timeout 10m -- RadxConvert -f {path} -outdir /out
    """
    from penstock.registry.trigger_commands import Command  # noqa: PLC0415 - for this only
    from penstock.registry.triggers import Trigger  # noqa: PLC0415

    with _stopped_between_files() as is_stopping:
        work: Callable[[Any], object] = print  # a list of the dead needs none
        if command or not dead:
            work = Command(
                command or (),
                timeout=None if timeout is None else parse_duration(timeout, "timeout"),
                grace=parse_duration(grace, "grace"),
                stop=is_stopping,
                output=_STDERR,
            )
        trigger = Trigger(
            directory,
            work,
            name=name,
            start=start,
            policy=_policy(attempts, parse_duration(backoff, "backoff")),
            state=state,
            info_name=info_name,
            tell=lambda happening: _tell(happening, as_json=as_json),
        )
        if not dead:
            _follow(trigger, is_stopping, None if idle is None else parse_duration(idle, "idle"))
        elif command:
            _try_again(trigger, is_stopping)
        else:
            _list_dead(trigger, as_json=as_json)


@contextlib.contextmanager
def _stopped_between_files() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM end it after the current run; a second signal at once."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _policy(attempts: int, first: float) -> RetryPolicy:
    from penstock.core.retry import Backoff, RetryPolicy  # noqa: PLC0415

    wait = Backoff(initial=first, maximum=max(first, 60.0)) if first else Backoff(table=(0.0,))
    return RetryPolicy(retry_on=(Exception,), backoff=wait, max_attempts=attempts)


def _follow(trigger: Trigger, is_stopping: Callable[[], bool], idle: float | None) -> None:
    books = trigger.run(is_stopping, idle=idle)
    note(
        f"penstock: {books.done:,} done, {books.dead:,} dead, {books.lost:,} lost, "
        f"{books.unreadable:,} unreadable, {books.failures:,} failed attempts"
    )
    if books.lost:
        raise typer.Exit(LOST)


def _try_again(trigger: Trigger, is_stopping: Callable[[], bool]) -> None:
    done, still = trigger.retry_dead(is_stopping)
    note(f"penstock: {done:,} done, {still:,} still dead")
    if still:
        raise typer.Exit(1)


def _list_dead(trigger: Trigger, *, as_json: bool) -> None:
    for letter in trigger.dead_letters:
        new = trigger.told_by(letter)
        if as_json:
            record = {
                "seq": new.seq,
                "path": new.expected_path,
                "code": letter.code.name,
                "reason": letter.reason,
                "attempts": letter.attempts,
                "dead_ns": letter.dead_ns,
                **new.info.to_fields(),
            }
            typer.echo(json.dumps(record))
        else:
            when = format_time(letter.dead_ns // 1_000_000_000 * 1_000_000_000)
            typer.echo(
                f"{when}  {new.expected_path}  {letter.attempts} attempts  "
                f"{letter.code.name}: {letter.reason}"
            )


def _tell(happening: Happening, *, as_json: bool) -> None:
    new, error = happening.new, happening.error
    reason = None if error is None else str(error) or type(error).__name__
    if as_json:
        record: dict[str, Any] = {
            "what": happening.what,
            "seq": happening.seq,
            "path": None if new is None else new.expected_path,
            "time": None if new is None else new.info.latest_time,
            "count": happening.count,
            "seconds": round(happening.seconds, 6),
            "error": reason,
        }
        typer.echo(json.dumps(record))
    else:
        typer.echo(_line(happening, reason))
    sys.stdout.flush()


def _line(happening: Happening, reason: str | None) -> str:
    new = happening.new
    took = format_duration(happening.seconds)
    match happening.what:
        case "lost":
            return f"lost  {happening.count:,} entries: overwritten before they were read"
        case "restarted":
            return "restarted  the queue of latest_data_info was made anew"
        case "unreadable":
            return f"unreadable  entry {happening.seq}: {reason}"
    assert new is not None
    tries = "" if happening.count == 1 else f", attempt {happening.count}"
    match happening.what:
        case "failed":
            return f"failed  {new.expected_path}  {reason}; again in {took}{tries}"
        case "dead":
            return f"dead  {new.expected_path}  {reason}; given up after {happening.count}"
    return f"done  {new.expected_path}  {took}{tries}"
