"""How does the command show things to a person?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.core.units import format_time

if TYPE_CHECKING:
    from penstock.core.message import Message

__all__ = ["bar", "console", "error_console", "message_line", "note"]

console = Console(highlight=False)
error_console = Console(highlight=False, stderr=True)

_PREVIEW = 48


def note(text: str) -> None:
    """Say something beside the output."""
    print(text, file=sys.stderr)  # noqa: T201


def bar(share: float, width: int = 30) -> str:
    """Draw a share of 0 to 1."""
    full = round(min(max(share, 0), 1) * width)
    return "█" * full + "░" * (width - full)


def message_line(message: Message) -> str:
    """Show one message on one line."""
    kind = f"{message.type}/{message.subtype}"
    return (
        f"{message.seq:>10}  {format_time(message.time_ns):<20}  {kind:>9}  "
        f"{message.size:>9,} B  {_preview(message.payload)}"
    )


def _preview(payload: bytes) -> str:
    head = payload[:_PREVIEW]
    more = "…" if len(payload) > _PREVIEW else ""
    try:
        text = head.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and (text or not payload):
        return text + more
    return head[: _PREVIEW // 3].hex(" ") + ("…" if len(payload) > _PREVIEW // 3 else "")
