"""The commands about pipelines: `plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import console, note
from penstock.core.errors import StorageError
from penstock.pipeline import load_pipelines
from penstock.pipeline import plan as plan_of
from penstock.pipeline.drawing import to_svg, write_png
from penstock.pipeline.drawing.text import render

if TYPE_CHECKING:
    from penstock.pipeline import Plan

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Pipelines")(plan)


def plan(
    file: Annotated[Path, typer.Argument(help="A YAML file of one pipeline or several.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="OUT", help="Draw it into an SVG file.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="OUT", help="Draw it into a PNG file (with matplotlib)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a pipeline, draw it, and say which Spark queries it becomes. Nothing runs."""
    made = plan_of(load_pipelines(file))
    for warning in made.warnings:
        note(f"penstock: warning: {warning}")
    for path, draw in ((svg, _draw_svg), (png, write_png)):
        if path is not None:
            try:
                draw(made, path)
            except OSError as error:
                raise StorageError("writing", str(path), error) from error
    if as_json:
        typer.echo(json.dumps(made.as_dict(), default=str))
    else:
        console.print(render(made), soft_wrap=False)


def _draw_svg(made: Plan, path: Path) -> None:
    path.write_text(to_svg(made), encoding="utf-8")
