"""The command that makes Spark start more quickly: `prepare`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from penstock.cli.console import console, error_console
from penstock.core.units import format_size
from penstock.pipeline.run import java

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Pipelines")(prepare)


def prepare(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what was kept for the Spark that is here.")
    ] = False,
) -> None:
    """Let Spark start in about half the time on this machine.

    Spark runs once, for half a minute, and Java keeps the classes that it has loaded: about 180 MB
    in ~/.cache/penstock (or below XDG_CACHE_HOME). Do it again after an update of Java or PySpark.
    """
    if remove:
        if (file := java.remove()) is None:
            console.print("there is nothing to remove")
        else:
            console.print(f"removed {file}", soft_wrap=True, markup=False)
        return
    began = time.monotonic()
    with error_console.status("running Spark once …"):
        file = java.prepare()
    size = format_size(file.stat().st_size)
    seconds = time.monotonic() - began
    console.print(f"prepared in {seconds:.0f} s: {file} ({size})", soft_wrap=True, markup=False)
