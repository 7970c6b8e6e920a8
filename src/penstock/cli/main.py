"""What does `penstock` do with its arguments, its errors and Ctrl-C?"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
import traceback
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from typer.core import TyperCommand, TyperGroup

import penstock
from penstock.cli.commands import FAMILIES
from penstock.cli.output import (
    drop_output,
    note,
    one_line,
    output_refused,
)
from penstock.cli.signals import GRACE, INTERRUPTED, cut_off, heard
from penstock.core.redaction import Redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

__all__ = ["CommandGroup", "app", "commands_of", "main"]


@cache
def commands_of(module: str) -> Mapping[str, Any]:
    """Import a module of this package, and return its commands."""
    app = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    import_module(f"penstock.cli.{module}").add_to(app)
    commands: Mapping[str, Any] = typer.main.get_group(app).commands
    for command in commands.values():
        command.get_params = _sparing(command.get_params)
        _unwrap_help(command)
    return commands


def _unwrap_help(command: Any) -> None:
    """Join the lines of a paragraph, so that it fits any terminal; indented lines stay."""
    command.help = _unwrapped(command.help or "")
    for each in getattr(command, "commands", {}).values():
        _unwrap_help(each)


def _unwrapped(text: str) -> str:
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _sparing(get_params: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Let parameters skip conversion of values that already have their type.

    For other values typer imports pydantic, which doubles the start time.
    """

    def sparing(ctx: Any) -> list[Any]:
        parameters = get_params(ctx)
        for each in parameters:
            if hasattr(each, "type_descriptor") and "process_value" not in vars(each):
                each.process_value = partial(_value_of, each, each.process_value)
        return parameters

    return sparing


def _value_of(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    kind, limits = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if value is None and not parameter.required:
        value = () if parameter.multiple or parameter.nargs == -1 else None
    elif value is None or not _is_right(kind, value, parameter.default):
        number = _number(value, limits.min, limits.max) if kind is int else None
        if number is None:
            return convert(ctx, value)
        value = number
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _is_right(kind: Any, value: Any, default: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(type(each) is str for each in value)
    return value is default or (kind in (str, bool) and type(value) is kind)


def _number(value: Any, least: float | None, most: float | None) -> int | None:
    """Parse a plain whole number within its limits; None: leave the value to typer."""
    if not isinstance(value, str) or re.fullmatch(r"[0-9]{1,9}", value) is None:
        return None
    number = int(value)
    is_within = (least is None or least <= number) and (most is None or number <= most)
    return number if is_within else None


class CommandGroup(TyperGroup):
    """The commands of the table, whose modules are imported when they are called."""

    def __init__(self, **attributes: Any) -> None:
        listed = {
            name: TyperCommand(
                name=name, help=text, rich_help_panel=family.heading, rich_markup_mode="rich"
            )
            for family in FAMILIES
            for name, text in family.commands.items()
        }
        super().__init__(**attributes | {"commands": listed})

    def get_params(self, ctx: Any) -> Any:
        return _sparing(super().get_params)(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)  # or it says what was meant
        family = next(family for family in FAMILIES if name in family.commands)
        return name, commands_of(family.module)[str(name)], rest


app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Move message streams between processes, and never lose one silently.

    A stream is named by a URL: [bold]fmq:/path/name[/bold] is a queue on this machine,
    which keeps its newest messages, [bold]log:/path/name[/bold] a log, which keeps all.
    [bold]flight:[/bold], [bold]fmqp:[/bold], [bold]psi:[/bold] and others are on other machines;
    [bold]parquet:[/bold], [bold]csv:[/bold], [bold]jsonl:[/bold] and others are files.
    [bold]penstock doctor[/bold] lists them all.

    [bold]Try it:[/bold]

      penstock put fmq:/tmp/demo/beams --text hello --type 1
      penstock cat fmq:/tmp/demo/beams
      seq 1 1000 | penstock put log:/tmp/demo/numbers
      penstock tail log:/tmp/demo/numbers -n 3
      penstock cp log:/tmp/demo/numbers csv:/tmp/demo/numbers.csv
      penstock ls /tmp/demo

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 messages lost, 130 Ctrl-C.
    """,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Works anywhere.")
    ] = False,
) -> None:
    del version, debug  # --version exits by itself; --debug is taken out by main()


def _is_only_logged(record: logging.LogRecord) -> bool:
    """Return False for a failed call that py4j logs: it is raised as well."""
    return record.name != "root" or "/py4j/" not in record.pathname


#: Seconds by which a handler may be ahead of the thread that watches for its signal.
_AHEAD: Final = 1.0


class _Interruption:
    """Lets Ctrl-C and SIGTERM interrupt a command, as long as it has no handlers of its own.

    A second SIGTERM ends the process at once. So does one signal after a while if a library call
    does not let Python's handlers run, as gRPC on a silent network. A signal that whoever started
    the process ignores stays ignored.
    """

    def __init__(self, *, is_remote: bool) -> None:
        self._is_remote = is_remote
        self._handler = self._interrupt
        self._before: dict[int, Any] = {}
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handler)
        if self._is_remote:  # calls for this machine return
            self._watching.enter_context(cut_off(GRACE, _tell_of_end, self._is_heard))
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        heard.note()
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        signal.default_int_handler(number, frame)

    def _is_heard(self, number: int, came_at: float) -> bool:
        is_ours = signal.getsignal(number) == self._handler
        return not is_ours or heard.at > came_at - _AHEAD


def _tell_of_end() -> None:
    note("penstock: interrupted, in the middle of a call that does not end")


def main() -> None:
    """Run the command: errors are one line on stderr and exit code 1, usage 2, Ctrl-C 130.

    SIGTERM does what Ctrl-C does; commands that run until then have handlers of their own.
    """
    _fill_closed_streams()
    arguments = sys.argv[1:]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    if debug:
        arguments = [a for a in own if a != "--debug"] + arguments[len(own) :]
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="penstock: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(Redacted())
        if not debug:
            handler.addFilter(_is_only_logged)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may have any bytes
    try:
        with _Interruption(is_remote=any("://" in each for each in own)):
            app(args=arguments, prog_name="penstock")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        error = end.__context__
        if isinstance(error, BrokenPipeError) and _only_shows(own):
            drop_output()
            sys.exit(0)  # who reads it has seen enough
        if isinstance(error, BrokenPipeError) and hasattr(error, "__notes__"):
            # It moves messages, and has ended before its time: the notes say how far it came.
            note(f"penstock: {one_line(output_refused(error))}")
        raise
    except Exception as error:  # noqa: BLE001 - told, by a line or a traceback
        note(traceback.format_exc() if debug else f"penstock: {one_line(error)}")
        _hand_over_output()
        sys.exit(1)


def _fill_closed_streams() -> None:
    """Open those of the three standard streams that are closed, to nowhere.

    Otherwise the next file would get their number, and what a library prints there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _only_shows(arguments: list[str]) -> bool:
    """Tell whether a command does nothing but print."""
    return not {"-h", "--help", "--version"}.isdisjoint(arguments) or arguments[:1] in (
        [],
        ["id"],
    )


def _hand_over_output() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop_output()
