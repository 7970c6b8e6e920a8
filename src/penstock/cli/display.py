"""How is something shown while it runs: as a table, lines for a log file, JSON, or not at all?"""

from __future__ import annotations

import json
import sys
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.live import Live

from penstock.cli.output import error_console
from penstock.core.closing import Closable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

__all__ = ["LOOK", "Display"]

#: Seconds between two looks, and between two lines about the same thing.
LOOK = 0.25
_LINE_EVERY = 5.0
_JSON_EVERY = 1.0


class Display(Closable):
    """Shows something while it runs, in a `with`. What is shown, a class derived from this says.

    :param kind: `auto` (a table on a terminal, otherwise lines), `json` or `none`
    :param refresh: how many times a second the table is drawn
    """

    def __init__(self, kind: str, *, refresh: float) -> None:
        self._kind = kind
        self._said: dict[str, tuple[str, float]] = {}
        self._refresh = refresh
        self._live: Live | None = None

    @abstractmethod
    def _view(self) -> RenderableType:
        """Draw it for a terminal."""

    @abstractmethod
    def _news(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield what is to be said now (see `_is_due`): as JSON, and as a line."""

    def _is_due(self, name: str = "", state: str = "") -> bool:
        """Tell whether to say something of this again: its state is another, or it is time to."""
        now = time.monotonic()
        known, at = self._said.get(name, ("", 0.0))
        if state == known and now - at < (_JSON_EVERY if self._kind == "json" else _LINE_EVERY):
            return False
        self._said[name] = state, now
        return True

    def look(self) -> None:
        """Show what is new, if it is time to."""
        if self._live is not None or self._kind == "none":
            return
        for fields, line in self._news():
            if self._kind == "json":
                typer.echo(json.dumps({"event": "progress", **fields}))
                sys.stdout.flush()
            else:
                error_console.print(line, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        if self._kind == "auto" and error_console.is_terminal:
            # Not sooner: as soon as it is made it draws, and what derives from this is made later.
            self._live = Live(
                console=error_console, refresh_per_second=self._refresh, get_renderable=self._view
            )
            self._live.start()
        return self

    def close(self) -> None:
        """Draw it for the last time."""
        if self._live is not None:
            self._live.stop()
