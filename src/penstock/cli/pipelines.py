"""The commands about pipelines that run nothing for long: `plan` and `test`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.cli.console import console
from penstock.cli.options import Dot, Mermaid, Png, Svg, write_diagram
from penstock.cli.output import note
from penstock.core.redaction import shown
from penstock.pipeline import load_pipelines
from penstock.pipeline import plan as plan_of
from penstock.pipeline.graph.check import check_functions, raise_all
from penstock.pipeline.graph.plan_diagram import diagram_of, render

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.pipeline import Plan
    from penstock.pipeline.run.analysis import Analysis

__all__ = ["add_to"]

#: One core is enough for Spark to analyze a plan.
_ALONE: Final = "local[1]"
#: One core for a stream, and another for its joins.
_TWO: Final = "local[2]"
#: The most characters shown of a value.
_LONGEST: Final = 40


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Pipelines")(plan)
    app.command("test", rich_help_panel="Pipelines")(run_tests)


def plan(
    file: Annotated[Path, typer.Argument(help="A YAML file of one pipeline or several.")],
    svg: Svg = None,
    png: Png = None,
    dot: Dot = False,
    mermaid: Mermaid = False,
    analyze: Annotated[
        bool,
        typer.Option("--analyze", help="Ask Spark for the columns of everything; no query starts."),
    ] = False,
    sample: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Show the first N rows, too, from what is there."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a pipeline, draw it, and say which Spark queries it becomes. Nothing runs."""
    pipelines = load_pipelines(file)
    check_functions(pipelines)
    made = plan_of(pipelines)
    for warning in made.warnings:
        note(f"penstock: warning: {warning}")
    printed = write_diagram(diagram_of(made), svg=svg, png=png, dot=dot, mermaid=mermaid)
    found = _analyzed(made, sample) if analyze or sample else None
    if as_json:
        more = {} if found is None else found.as_dict()
        typer.echo(json.dumps({**made.as_dict(), **more}, default=str))
    elif found is not None:
        console.print(render_columns(found), soft_wrap=True)
    elif not printed:
        console.print(render(made), soft_wrap=False)
    if found is not None:
        raise_all(found.faults)


def _analyzed(made: Plan, sample: int) -> Analysis:
    from penstock.pipeline.run.analysis import analyze  # noqa: PLC0415 - loads Spark
    from penstock.pipeline.run.runner import session_for  # noqa: PLC0415

    return analyze(made, session_for(made, _ALONE), sample)


def run_tests(
    file: Annotated[Path, typer.Argument(help="A YAML file of one pipeline or several.")],
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The cases; NAME.test.yaml beside it unless given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object a line.")] = False,
) -> None:
    """Check by cases that a pipeline does what it should: rows or messages in, rows out."""
    from penstock.pipeline.run.cases import cases_beside, load_cases, run_cases  # noqa: PLC0415
    from penstock.pipeline.run.runner import session_for  # noqa: PLC0415 - loads Spark

    pipelines = load_pipelines(file)
    check_functions(pipelines)
    made = plan_of(pipelines)
    wanted = load_cases(cases_beside(file) if cases is None else cases, made)
    count = failed = 0
    for verdict in run_cases(made, wanted, session_for(made, _TWO)):
        count, failed = count + 1, failed + (not verdict.is_good)
        if as_json:
            typer.echo(json.dumps({**asdict(verdict), "is_good": verdict.is_good}))
            continue
        typer.echo(
            f"{'ok  ' if verdict.is_good else 'FAIL'} {verdict.case} ({verdict.seconds:.1f} s)"
        )
        for line in verdict.differences:
            typer.echo(f"       {shown(line)}")
    if not as_json:
        typer.echo(f"{count - failed} of {count} cases passed")
    if failed:
        raise typer.Exit(1)


def render_columns(found: Analysis) -> RenderableType:
    """Return the columns of every source, stage and sink, and the sampled rows."""
    parts: list[RenderableType] = []
    for node, columns in found.schemas.items():
        named = ", ".join(
            f"{one.name} {one.type}{'' if one.is_nullable else ' not null'}" for one in columns
        )
        parts.append(Text.assemble((str(node), "bold"), f"  {named}"))
        if node in found.samples:
            table = Table(*(one.name for one in columns), box=None, padding=(0, 2, 0, 4))
            for row in found.samples[node]:
                table.add_row(*(Text(_shown(value)) for value in row))
            parts.append(table)
    return Group(*parts)


def _shown(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        value = bytes(value[:_LONGEST]).decode(errors="replace")
    text = str(value)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in text)
