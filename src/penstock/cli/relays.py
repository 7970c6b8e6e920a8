"""The command that runs many relays: `relay`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from penstock.cli.cp import describe
from penstock.cli.display import LOOK, Display
from penstock.cli.messages import LOST
from penstock.cli.output import note
from penstock.cli.signals import stop_on_signal
from penstock.core.units import format_size
from penstock.relay import Relays, load_relays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.relay import RelayStatus

__all__ = ["add_to"]

#: Seconds for relays to finish their current batch after Ctrl-C.
_GRACE = 10.0


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Messages")(relay)


def relay(
    file: Annotated[Path, typer.Argument(help="A YAML file of relays.")],
    progress: Annotated[
        Literal["auto", "json", "none"],
        typer.Option(help="What to show while they run: a table, JSON lines, or nothing."),
    ] = "auto",
    check: Annotated[bool, typer.Option("--check", help="Check the file only.")] = False,
) -> None:
    """Keep streams in step with others: every relay of a file, until they end or Ctrl-C.

    The exit code is 1 if one failed, and 3 if messages were lost.
    """
    wanted = load_relays(file)
    if check:
        typer.echo(f"{len(wanted)} relay{'' if len(wanted) == 1 else 's'}: {', '.join(wanted)}")
        return
    relays = Relays(wanted)
    relays.start()
    try:
        with stop_on_signal(_GRACE + 5) as stop, _Display(progress, relays.statuses) as shown:
            while not relays.are_over and not stop():
                shown.look()
                time.sleep(LOOK)
            relays.stop(_GRACE)
        statuses = relays.statuses()
        _finish(progress, statuses)
    finally:
        if not relays.stop(1.0):
            note("penstock: a relay was held up by its target, and is cut off")
            os._exit(1)  # Python would take away what its thread is using
    if any(one.state == "failed" for one in statuses):
        raise typer.Exit(1)
    if any(one.books.missing for one in statuses):
        raise typer.Exit(LOST)


def _finish(progress: str, statuses: list[RelayStatus]) -> None:
    if progress == "json":
        for one in statuses:
            typer.echo(json.dumps({"event": "end", **one.as_dict()}))
        sys.stdout.flush()
        return
    for one in statuses:
        why = f" ({one.trouble})" if one.trouble else ""
        typer.echo(f"{one.name}: {one.state}{why}: {describe(one.books)}")


class _Display(Display):
    """Shows relays while they run."""

    def __init__(self, kind: str, statuses: Callable[[], list[RelayStatus]]) -> None:
        super().__init__(kind, refresh=4)
        self._statuses = statuses
        self._rates = _Rates()

    def _news(self) -> Iterator[tuple[dict[str, Any], str]]:
        for one in self._statuses():
            if self._is_due(one.name, one.state):
                yield one.as_dict(), f"{one.name}: {one.state}: {describe(one.books)}"

    def _view(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("relay")
        table.add_column("state")
        for heading in (
            "copied", "size", "msg/s", "behind", "dropped", "held", "lost", "maybe twice", "outages"
        ):  # fmt: skip
            table.add_column(heading, justify="right")
        for one in self._statuses():
            books = one.books
            lost = f"{books.lost:,}"
            table.add_row(
                Text(one.name),  # brackets are data, not markup
                f"[yellow]{one.state}[/]" if one.trouble else one.state,
                f"{books.copied:,}",
                format_size(books.bytes),
                f"{self._rates.of(one.name, books.copied):,.0f}",
                f"{books.backlog:,}",
                f"{sum(books.dropped.values()):,}",
                f"{books.held:,}",
                f"[red]{lost}[/]" if books.lost else lost,
                f"{books.in_doubt:,}",
                f"{books.outages:,}",
            )
        return table


class _Rates:
    """Messages per second, over about the last second."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int, float]] = {}

    def of(self, name: str, count: int) -> float:
        now = time.monotonic()
        at, before, rate = self._seen.get(name, (now, count, 0.0))
        if now - at >= 1:
            rate = (count - before) / (now - at)
            at, before = now, count
        self._seen[name] = at, before, rate
        return rate
