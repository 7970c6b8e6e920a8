"""The commands about graphs of workers: `graph run`, `graph check`, `graph draw`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from penstock.cli.console import console, error_console
from penstock.cli.messages import LOST
from penstock.cli.options import Dot, Mermaid, Png, Svg, write_diagram
from penstock.cli.output import note
from penstock.cli.signals import Ending
from penstock.core.errors import InvalidOption
from penstock.core.redaction import shown
from penstock.core.units import parse_duration
from penstock.core.worker_graph import load_graph

if TYPE_CHECKING:
    from penstock.core.worker_graph import WorkerGraph
    from penstock.workers.graph_run import GraphRun, GraphStatistics

__all__ = ["add_to"]

File = Annotated[Path, typer.Argument(help="A YAML file of a graph.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Run workers in any language between queues.")
    sub.command("run")(graph_run)
    sub.command("check")(graph_check)
    sub.command("draw")(graph_draw)
    app.add_typer(sub, name="graph", rich_help_panel="Pipelines")


def graph_run(
    file: File,
    engine: Annotated[
        Literal["workers", "spark"],
        typer.Option(help="Processes between queues, or a pipeline on Spark."),
    ] = "workers",
    once: Annotated[
        bool, typer.Option("--once", help="End when no message is left to work on.")
    ] = False,
    status: Annotated[
        str | None, typer.Option(metavar="TIME", help="Say every so often what happens.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder of the queues.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object a line.")] = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="Spark's master, with --engine spark.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where Spark's queries keep how far they are.")
    ] = None,
) -> None:
    """Run a graph, until Ctrl-C or SIGTERM: its queues, and its workers, restarted when they die.

    Ctrl-C lets each worker finish the message that it is at. What waits in queues stays there, on
    the disk, and the next run goes on with it. The exit code is 3 if messages were lost.
    """
    if engine == "spark":
        from penstock.cli.run import run_pipelines  # noqa: PLC0415 - loads Spark's planner
        from penstock.pipeline import load_pipelines  # noqa: PLC0415

        progress = "json" if as_json else "auto"
        run_pipelines(load_pipelines(file), master, checkpoint, progress, once=once)
        return
    from penstock.workers.graph_run import GraphRun  # noqa: PLC0415 - loads servers

    every = None if status is None else _seconds(status)
    graph = _checked(file)
    with (
        Ending() as ending,
        GraphRun(graph, state=state, on_output=lambda name, line: note(f"{name}: {line}")) as run,
    ):
        _say_start(run, as_json=as_json)
        shown_status = _Status(run, every, as_json=as_json)

        def is_over() -> bool:
            shown_status.tell_if_due()
            run.check()
            return once and run.is_done()

        ending.wait(is_over)
    books = run.statistics()
    if as_json:
        typer.echo(json.dumps({"event": "end", **_as_dict(books)}))
    else:
        console.print(_vertices(books))
        console.print(_edges(books))
    if books.lost:
        note(f"penstock: {books.lost:,} messages lost")
        raise typer.Exit(LOST)


def graph_check(file: File) -> None:
    """Check a graph. Nothing is opened, imported or started."""
    graph = _checked(file)
    typer.echo(
        f"{graph.name}: {len(graph.vertices)} vertices with "
        f"{sum(vertex.workers for vertex in graph.vertices.values())} workers, "
        f"{len(graph.edges)} edges"
    )


def graph_draw(
    file: File,
    text: Annotated[
        bool, typer.Option("--text", help="Print it as a tree, also beside a picture.")
    ] = False,
    svg: Svg = None,
    png: Png = None,
    dot: Dot = False,
    mermaid: Mermaid = False,
) -> None:
    """Draw a graph: in the terminal, as SVG or PNG, for Graphviz or Mermaid. Nothing runs."""
    from penstock.workers.graph_diagram import diagram_of, render  # noqa: PLC0415

    graph = _checked(file)
    printed = write_diagram(diagram_of(graph), svg=svg, png=png, dot=dot, mermaid=mermaid)
    if text or not (printed or svg or png):
        console.print(render(graph), soft_wrap=False)


def _checked(file: Path) -> WorkerGraph:
    from penstock.workers.edges import check_edges  # noqa: PLC0415 - loads servers

    graph = load_graph(file)
    check_edges(graph)
    for warning in graph.warnings():
        note(f"penstock: warning: {warning}")
    return graph


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except InvalidOption as error:
        raise InvalidOption("--status", text, error.reason, hint=error.hint) from None


def _say_start(run: GraphRun, *, as_json: bool) -> None:
    places = {name: shown(edge.place) for name, edge in run.statistics().edges.items()}
    if as_json:
        typer.echo(json.dumps({"event": "start", "graph": run.graph.name, "edges": places}))
    else:
        typer.echo(f"running {run.graph.name}")
        for name, place in places.items():
            typer.echo(f"  {name}: {place}")
    sys.stdout.flush()


class _Status:
    """Reports the state of a graph periodically."""

    def __init__(self, run: GraphRun, every: float | None, *, as_json: bool) -> None:
        self._run = run
        self._every = every
        self._as_json = as_json
        self._told = time.monotonic()

    def tell_if_due(self) -> None:
        now = time.monotonic()
        if self._every is None or now - self._told < self._every:
            return
        self._told = now
        books = self._run.statistics()
        if self._as_json:
            typer.echo(json.dumps({"event": "status", **_as_dict(books)}))
            sys.stdout.flush()
            return
        vertices = ", ".join(
            f"{name} {vertex.running}/{vertex.workers}"
            + ("" if vertex.work is None else f" {vertex.work.done:,} done")
            for name, vertex in books.vertices.items()
        )
        edges = ", ".join(
            f"{name} {edge.held:,}" for name, edge in books.edges.items() if edge.held is not None
        )
        error_console.print(f"{vertices}; waiting: {edges}", soft_wrap=True, markup=False)


def _vertices(books: GraphStatistics) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("vertex")
    for heading in ("workers", "restarts", "taken", "done", "failed", "given"):
        table.add_column(heading, justify="right")
    for name, vertex in books.vertices.items():
        work = vertex.work
        counts = (
            ("", "", "", "")
            if work is None
            else (work.taken, work.done, work.failed, sum(work.given.values()))
        )
        table.add_row(
            Text(name),
            str(vertex.workers),
            f"{vertex.restarts:,}",
            *(count if isinstance(count, str) else f"{count:,}" for count in counts),
        )
    return table


def _edges(books: GraphStatistics) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("edge")
    names = ("recovered", "put", "done", "held", "redelivered", "dead", "lost")
    for heading in names:
        table.add_column(heading, justify="right")
    table.add_column("faults")
    for name, edge in books.edges.items():
        counts = [getattr(edge, field) for field in names]
        faults = ""
        if edge.faults is not None:
            both = (edge.faults.up, edge.faults.down)
            dropped, arrived = sum(d.dropped for d in both), sum(d.arrived for d in both)
            faults = f"{dropped:,} of {arrived:,} {edge.faults.unit} dropped"
        table.add_row(
            Text(name), *("" if count is None else f"{count:,}" for count in counts), faults
        )
    return table


def _as_dict(books: GraphStatistics) -> dict[str, Any]:
    return {
        "vertices": {
            name: vertex._asdict()
            | {"work": None if vertex.work is None else vertex.work._asdict()}
            for name, vertex in books.vertices.items()
        },
        "edges": {
            name: edge._asdict()
            | {
                "place": shown(edge.place),
                "faults": None if edge.faults is None else edge.faults.as_dict(),
            }
            for name, edge in books.edges.items()
        },
        "lost": books.lost,
    }
