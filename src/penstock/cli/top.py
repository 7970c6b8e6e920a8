"""The command that shows all streams on a screen, as they change: `top`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from penstock.cli.output import is_terminal
from penstock.core.errors import Unsupported
from penstock.core.units import parse_duration

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(rich_help_panel="Streams")(top)


def top(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR|PATTERN|URL]...", help="As of ls. Without any: this folder and below."
        ),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", "-R", help="Also in the folders below.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often to look.")] = "1s",
    decode: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="What payloads are, as of cat: 'struct:<dHH', …"),
    ] = None,
) -> None:
    """Show streams on a screen as they change: rates, lag, loss, who writes and reads.

    Enter shows the last messages of a stream, s sorts by another column, q ends.

    Examples:
      penstock top /data -r
    """
    if find_spec("textual") is None:
        raise Unsupported("top needs textual", hint="pip install 'penstock[top]'")
    from penstock.cli.top_screen import StreamsApp  # noqa: PLC0415 - an extra

    app = StreamsApp(
        places or ["."],
        recursive=recursive or not places,
        every=max(0.1, parse_duration(every, "every")),
        decode=decode,
    )
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise Unsupported("top needs a terminal", hint="penstock ls prints the same, once")
    app.run()
