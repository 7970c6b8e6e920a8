"""The terminal, for what is drawn: tables, bars and pictures."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

from rich.console import Console

from penstock.cli.output import is_terminal

__all__ = ["console", "error_console"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise it again for the caller: rich would end the process with 1."""
        raise  # noqa: PLE0704 - the error that is handled


#: The width of what goes into a pipe or a file, where there is no edge to fit: rich takes 80.
_WIDE: Final = 160


def _width(stream: TextIO | None) -> int | None:
    return None if is_terminal(stream) or "COLUMNS" in os.environ else _WIDE


console: Final = _Console(highlight=False, width=_width(sys.stdout))
error_console: Final = Console(highlight=False, stderr=True, width=_width(sys.stderr))
