"""How does a command show its progress, and how does a key pause it?

As a table, as lines for a log file, as JSON, or not at all.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.live import Live

from penstock.cli.console import error_console
from penstock.cli.output import is_terminal
from penstock.core.interfaces import Closable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

__all__ = ["LOOK", "Display", "PauseKey"]

#: Seconds between two updates, and between two lines about the same item.
LOOK = 0.25
_LINE_EVERY = 5.0
_JSON_EVERY = 1.0


class Display(Closable):
    """Shows progress in a `with` block. Subclasses define what is shown.

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
        """Return the view for a terminal."""

    @abstractmethod
    def _news(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield what is due to be reported (see `_is_due`), as JSON and as a line."""

    def _is_due(self, name: str = "", state: str = "") -> bool:
        """Tell whether a report about `name` is due: its state has changed, or time has passed."""
        now = time.monotonic()
        known, at = self._said.get(name, ("", 0.0))
        if state == known and now - at < (_JSON_EVERY if self._kind == "json" else _LINE_EVERY):
            return False
        self._said[name] = state, now
        return True

    def look(self) -> None:
        """Print the reports that are due."""
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
            # Not earlier: it draws at once, and the subclass is not initialized before.
            self._live = Live(
                console=error_console, refresh_per_second=self._refresh, get_renderable=self._view
            )
            self._live.start()
        return self

    def close(self) -> None:
        """Draw the final view, and stop."""
        if self._live is not None:
            self._live.stop()


class PauseKey(Closable):
    """Tells whether the user has paused, in a `with` block; the space bar toggles.

    Without a terminal, or in the background, there is no pause.
    """

    def __init__(self, on_change: Callable[[bool], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._is_paused = False
        self._before: list[Any] | None = None
        self._fd = -1

    def __enter__(self) -> Self:
        if is_terminal(sys.stdin):
            fd = sys.stdin.fileno()
            if os.tcgetpgrp(fd) == os.getpgrp():
                self._fd, self._before = fd, termios.tcgetattr(fd)
                tty.setcbreak(fd)  # a key comes at once, and Ctrl-C is what it was
        return self

    @property
    def is_listening(self) -> bool:
        """Whether keys of a terminal are read."""
        return self._before is not None

    def __call__(self) -> bool:
        """Process the keys pressed since the last call; tell whether it is paused."""
        while self._before is not None and select.select([self._fd], [], [], 0)[0]:
            keys = os.read(self._fd, 64)
            if not keys:
                self.close()
                break
            if keys.count(b" ") % 2:
                self._is_paused = not self._is_paused
                self._on_change(self._is_paused)
        return self._is_paused

    def close(self) -> None:
        """Restore the settings of the terminal."""
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None
        self._is_paused = False
