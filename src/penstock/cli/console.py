"""The terminal, for what is drawn: tables, bars and pictures."""

from __future__ import annotations

from typing import Final

from rich.console import Console

__all__ = ["console", "error_console"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let whoever prints tell what it means: rich would end the process with 1."""
        raise  # noqa: PLE0704 - the error that is handled


console: Final = _Console(highlight=False)
error_console: Final = Console(highlight=False, stderr=True)
