"""The terminal, for what is drawn: tables, bars and pictures."""

from __future__ import annotations

from typing import Final

from rich.console import Console

__all__ = ["console", "error_console"]

console: Final = Console(highlight=False)
error_console: Final = Console(highlight=False, stderr=True)
