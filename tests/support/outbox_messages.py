"""What tests put into an outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.dispatch.outbox import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.dispatch.outbox import Item

__all__ = ["message", "messages", "texts"]


def message(text: str, priority: int = 1, source: int = 0, expires_at_ms: int = 0) -> Entry:
    return Entry(priority, 0, expires_at_ms, source, 1, text.encode())


def messages(count: int, priority: int = 1, first: int = 0) -> list[Entry]:
    return [message(str(first + i), priority) for i in range(count)]


def texts(items: Iterable[Item]) -> list[str]:
    return [item.raw.decode() for item in items]
