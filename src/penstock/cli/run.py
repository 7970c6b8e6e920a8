"""The command that runs pipelines: `run`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.console import console, error_console
from penstock.cli.messages import LOST
from penstock.cli.output import bar, note
from penstock.cli.signals import stop_on_signal
from penstock.core.errors import InvalidOption
from penstock.core.json_lines import json_text
from penstock.pipeline import load_pipelines
from penstock.pipeline import plan as plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, Row

    from penstock.pipeline import Pipeline, Plan
    from penstock.pipeline.run import Backfill, Outcome, Progress
    from penstock.pipeline.run.reload import Changes

__all__ = ["add_to", "run_pipelines"]

#: Seconds for batches in progress to finish after Ctrl-C.
_GRACE = 45.0
#: Seconds between two lines for a log file.
_LINE_EVERY = 5.0
_LAST_PORT: Final = 65535


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Pipelines")(run)


def run(
    file: Annotated[Path, typer.Argument(help="A YAML file of one pipeline or several.")],
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Spark's master; local[*] unless the file says another."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Do all that is there now, and end.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where queries keep how far they are, so that they can go on."
        ),
    ] = None,
    progress: Annotated[
        Literal["auto", "json", "none"],
        typer.Option(help="What to show while it runs: a table, JSON lines, or nothing."),
    ] = "auto",
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Backfill: work on what came from this time on, beside the live run, and end. "
            "2026-05-01T12:00Z, 12:00, yesterday, -10m.",
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="TIME", help="Up to this time; now unless given."),
    ] = None,
    by: Annotated[
        Literal["append", "source"],
        typer.Option(help="Which time --from and --to mean: of appending, or when it happened."),
    ] = "append",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Answer GET /metrics in Prometheus' format; to this machine unless HOST is given.",
        ),
    ] = None,
    ui: Annotated[
        bool, typer.Option(help="Have Spark's pages, on this machine only; not on a cluster.")
    ] = True,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="When the file has changed and is good, begin anew with it."),
    ] = False,
) -> None:
    """Run pipelines on Spark, until they end or Ctrl-C.

    Ctrl-C finishes the batches under way. Run it again, and each query goes on where it was.
    """
    if end is not None and start is None:
        raise typer.BadParameter("give --from, too", param_hint="--to")
    if reload and (once or start is not None):
        raise typer.BadParameter("is for a run that goes on", param_hint="--reload")
    now = time.time_ns()
    changes = _changes(file) if reload else None
    _run(
        plan_of(load_pipelines(file)) if changes is None else changes.plan,
        changes,
        progress,
        metrics,
        master=master,
        checkpoint=checkpoint,
        once=once,
        ui=ui,
        # First of all: an invalid range is reported without starting Spark.
        backfill=None if start is None else _backfill(start, end or "now", by, now),
    )


def run_pipelines(
    pipelines: Sequence[Pipeline],
    master: str | None,
    checkpoint: str | None,
    progress: str,
    *,
    once: bool,
) -> None:
    """Run pipelines, show their progress, and exit with the right code."""
    _run(plan_of(pipelines), None, progress, None, master=master, checkpoint=checkpoint, once=once)


def _backfill(start: str, end: str, by: Literal["append", "source"], now_ns: int) -> Backfill:
    from penstock.pipeline.run import Backfill  # noqa: PLC0415 - loads Spark

    return Backfill.parse(start, end, by, now_ns)


def _changes(file: Path) -> Changes:
    from penstock.pipeline.run.reload import Changes  # noqa: PLC0415 - loads Spark

    return Changes(file, _say)


def _run(
    plan: Plan, changes: Changes | None, progress: str, metrics: str | None, **how: Any
) -> None:
    has_lost = False
    with ExitStack() as stack:
        measured = _measured(metrics, stack)
        stop = stack.enter_context(stop_on_signal(_GRACE))
        while True:
            for warning in plan.warnings:
                note(f"penstock: warning: {warning}")
            outcome = _run_until(plan, progress, measured, stop, changes, how)
            if outcome.lost or outcome.lost_unknown:
                has_lost = True
                if progress != "auto":  # which has said it
                    note(f"penstock: {_losses(outcome)}")
            if changes is None or not changes.is_changed or stop():
                break
            changes.begin_anew()
            plan = changes.plan
    if has_lost:
        raise typer.Exit(LOST)


def _run_until(
    plan: Plan,
    progress: str,
    measured: Callable[[Progress], None],
    stop: Callable[[], bool],
    changes: Changes | None,
    how: Mapping[str, Any],
) -> Outcome:
    """Run a plan until it ends, it is stopped, or its file has changed."""
    from penstock.pipeline.run import run as run_plan  # noqa: PLC0415 - loads Spark

    shown = _display(progress, plan)

    def take(now: Progress) -> None:
        measured(now)
        shown.take(now)

    with shown:
        outcome = run_plan(
            plan,
            on_progress=take,
            should_stop=lambda: stop() or (changes is not None and changes.are_good()),
            show=shown.rows,
            say=_say,
            **how,
        )
    shown.finish(outcome)
    return outcome


def _say(text: str) -> None:
    note(f"penstock: {text}")


def _measured(where: str | None, stack: ExitStack) -> Callable[[Progress], None]:
    """Start the metrics server if requested; return the function that updates it."""
    if where is None:
        return lambda _: None
    from penstock.pipeline.run import Metrics, MetricsServer  # noqa: PLC0415 - loads Spark

    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidOption("--metrics", where, "expected [HOST:]PORT, as in 9400")
    metrics = Metrics()
    server = stack.enter_context(MetricsServer(metrics, host or "127.0.0.1", int(port)))
    _say(f"metrics are at {server.address}")
    return metrics.take


class _Silent:
    """Shows no progress; base of the other displays."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def take(self, progress: Progress) -> None:
        """Show the progress of a query."""

    def rows(self, name: str, frame: DataFrame) -> None:
        """Show rows that a pipeline writes to the console."""
        table = Table(title=name, box=box.SIMPLE, title_justify="left")
        for column in frame.columns:
            table.add_column(Text(column))
        rows, are_all = _first_of(frame)
        for row in rows:
            table.add_row(*(Text(_plain(value)) for value in row))  # brackets are data, not markup
        if not are_all:
            table.caption = f"{len(rows)} rows; there are more"
        console.print(table)

    def finish(self, outcome: Outcome) -> None:
        """Show the result of the run."""


class _Json(_Silent):
    """A line of JSON for every batch."""

    def take(self, progress: Progress) -> None:
        typer.echo(json.dumps({"event": "progress", **progress.as_dict()}))

    def rows(self, name: str, frame: DataFrame) -> None:
        rows, are_all = _first_of(frame)
        for row in rows:
            fields = {"event": "row", "sink": name, "row": row.asDict(recursive=True)}
            typer.echo(json_text(fields, default=_plain))
        if not are_all:
            typer.echo(json.dumps({"event": "more_rows", "sink": name, "shown": len(rows)}))

    def finish(self, outcome: Outcome) -> None:
        typer.echo(
            json.dumps(
                {
                    "event": "end",
                    "rows": outcome.rows,
                    "lost": outcome.lost,
                    "lost_unknown": outcome.lost_unknown,
                    "skipped": outcome.skipped,
                    "stopped": outcome.was_stopped,
                }
            )
        )


class _Lines(_Silent):
    """A line every few seconds, for a log file."""

    def __init__(self, plan: Plan) -> None:
        self._said: dict[str, float] = {query.name: 0.0 for query in plan.queries}
        self._states: dict[str, str] = {}

    def take(self, progress: Progress) -> None:
        now = time.monotonic()
        is_news = self._states.get(progress.query) != progress.state
        if is_news or now - self._said[progress.query] >= _LINE_EVERY:
            self._states[progress.query] = progress.state
            self._said[progress.query] = now
            error_console.print(" ".join(_cells(progress)), soft_wrap=True, markup=False)

    def finish(self, outcome: Outcome) -> None:
        error_console.print(_summary(outcome))


class _Live(_Lines):
    """A live table of the queries."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._now: dict[str, Progress] = {}
        self._began = time.monotonic()
        self._live = Live(
            console=error_console, refresh_per_second=4, get_renderable=self._table, transient=False
        )

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def take(self, progress: Progress) -> None:
        self._now[progress.query] = progress

    def _table(self) -> Table:
        seconds = int(time.monotonic() - self._began)
        title = f"{seconds // 60}:{seconds % 60:02d}" + ("" if self._now else "  starting Spark …")
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("query")
        table.add_column("state")
        for heading in ("batches", "rows", "rows/s", "batch", "behind", "lost", "skipped"):
            table.add_column(heading, justify="right")
        table.add_column("")
        most = max((one.rows_per_second for one in self._now.values()), default=0.0) or 1.0
        for one in self._now.values():
            lost = f"{one.lost_in_all:,}"
            table.add_row(
                Text(one.query),  # brackets are data, not markup
                one.state,
                f"{one.batches:,}",
                f"{one.rows:,}",
                f"{one.rows_per_second:,.0f}",
                f"{one.batch_seconds:.2f} s",
                f"{one.behind:,}",
                f"[red]{lost}[/]" if one.lost_in_all else lost,
                f"{one.skipped_in_all:,}",
                bar(one.rows_per_second / most, 12),
            )
        return table


def _display(progress: str, plan: Plan) -> _Silent:
    shown: dict[str, Callable[[], _Silent]] = {"json": _Json, "none": _Silent}
    if progress in shown:
        return shown[progress]()
    return _Live(plan) if error_console.is_terminal else _Lines(plan)


def _cells(one: Progress) -> list[str]:
    return [
        f"{one.query}: {one.state},",
        f"{one.batches:,} batches,",
        f"{one.rows:,} rows,",
        f"{one.rows_per_second:,.0f} rows/s,",
        f"{one.batch_seconds:.2f} s a batch,",
        f"{one.behind:,} behind,",
        f"{one.lost_in_all:,} lost,",
        f"{one.skipped_in_all:,} skipped",
    ]


def _summary(outcome: Outcome) -> str:
    ended = "stopped" if outcome.was_stopped else "done"
    skipped = f", {outcome.skipped:,} not decoded and left out" if outcome.skipped else ""
    return f"{ended}: {outcome.rows:,} rows, {_losses(outcome)}{skipped}"


def _losses(outcome: Outcome) -> str:
    count = outcome.lost
    lost = f"{count:,} message{'' if count == 1 else 's'} lost" if count else "nothing lost"
    if not outcome.lost_unknown:
        return lost
    times = "once" if outcome.lost_unknown == 1 else f"{outcome.lost_unknown} times"
    return f"{lost if count else 'messages lost'}; {times} a queue was created anew, and nobody \
knows how many went with it"


def _first_of(frame: DataFrame) -> tuple[list[Row], bool]:
    """Return the rows to show, and whether these are all."""
    from penstock.pipeline.run import SHOWN  # noqa: PLC0415 - loads Spark

    rows = frame.collect()
    return rows[:SHOWN], len(rows) <= SHOWN


def _plain(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
