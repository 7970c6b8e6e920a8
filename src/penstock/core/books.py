"""How does a writer keep its own books?"""

from __future__ import annotations

from penstock.core.errors import Closed
from penstock.core.interfaces import Writer
from penstock.core.statistics import WriterStatistics

__all__ = ["BookedWriter"]


class BookedWriter(Writer):
    """A writer that counts what it does itself, in the terms of `WriterStatistics`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._is_closed = False
        self._messages = 0
        self._bytes = 0
        self._refused = 0
        self._headers_dropped = 0
        self._waited = 0.0
        self._last_seq: int | None = None

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            messages=self._messages,
            bytes=self._bytes,
            refused=self._refused,
            headers_dropped=self._headers_dropped,
            waited=self._waited,
            last_seq=self._last_seq,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
