"""What does `penstock` do with its arguments, its errors and Ctrl-C?"""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

import penstock
from penstock.cli import (
    chaos,
    copying,
    dead,
    dispatch,
    doctor,
    latest,
    logs,
    messages,
    mon,
    pipelines,
    preparing,
    psi,
    queues,
    relays,
    running,
    serving,
    stream_ids,
)
from penstock.cli import map as data_map
from penstock.cli.output import drop_output, note, one_line
from penstock.cli.stopping import INTERRUPTED
from penstock.core.redaction import Redacted

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Move message streams between processes, and never lose one silently.

    A stream is named by a URL: [bold]fmq:/path/name[/bold] is a queue on this machine,
    [bold]log:/path/name[/bold] a durable log; [bold]fmqp:[/bold], [bold]flight:[/bold],
    [bold]psi:[/bold], [bold]latest:[/bold], [bold]up+mqtt:[/bold] and [bold]up+zenoh:[/bold] are
    elsewhere, or in another system. Any can be copied to any: [bold]penstock cp[/bold].
    [bold]penstock doctor[/bold] lists what is there.

    [bold]Try it:[/bold]

      penstock create 'fmq:/tmp/demo/beams?slots=10000&size=16M'

      penstock put fmq:/tmp/demo/beams --text hello --type 1

      penstock cat fmq:/tmp/demo/beams --follow

      penstock info fmq:/tmp/demo/beams
    """,
)
messages.add_to(app)
copying.add_to(app)
relays.add_to(app)
queues.add_to(app)
logs.add_to(app)
psi.add_to(app)
serving.add_to(app)
dispatch.add_to(app)
dead.add_to(app)
data_map.add_to(app)
latest.add_to(app)
mon.add_to(app)
chaos.add_to(app)
pipelines.add_to(app)
running.add_to(app)
preparing.add_to(app)
app.add_typer(stream_ids.app, name="id", rich_help_panel="Streams")
app.command(rich_help_panel="This machine")(doctor.doctor)


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


def main() -> None:
    """Run the command: errors are one line on stderr and exit code 1, usage 2, Ctrl-C 130."""
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may have any bytes
    try:
        app(args=arguments, prog_name="penstock")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        note(f"penstock: {one_line(error)}")
        _hand_over_output()
        sys.exit(1)


def _hand_over_output() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop_output()
