"""How does a writer wait for the reader of a blocking queue? Spec lrose 1.10."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.core.errors import WriteTimeout
from penstock.queue.classic.layout import Status, id_distance
from penstock.queue.classic.slots import live_span

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReaderWait", "Warn", "warn_if_buffer_wraps_first", "warn_if_reader_is_unknown"]

#: Takes a subject, of which a writer speaks once, and what there is to say.
Warn: TypeAlias = "Callable[[str, str], None]"

#: A blocking writer looks for its reader this often; LROSE does every 200 ms.
_FIRST_PAUSE: Final = 0.000_1
_LONGEST_PAUSE: Final = 0.005
#: After so many seconds without a sign of a reader, say so.
_NOBODY_READS: Final = 5.0


class ReaderWait:
    """One wait for the reader of a blocking queue."""

    def __init__(self, url: str, timeout: float | None, warn: Warn) -> None:
        self._url = url
        self._timeout = timeout
        self._warn = warn
        self._began = time.monotonic()
        self._pauses = 0

    def pause(self) -> float:
        """Pause once, and return for how long.

        What the reader did meanwhile shows when the message is tried again.

        :raises WriteTimeout: it stayed away all the time allowed.
        """
        waited = time.monotonic() - self._began
        if self._timeout is not None and waited >= self._timeout:
            raise WriteTimeout(
                f"{self._url} is full and its reader has not moved for {waited:.1f} s",
                hint="start the reader, or write without blocking=true",
            )
        if waited > _NOBODY_READS:
            self._warn("nobody", "is full, blocking, and nobody reads it; still waiting")
        began = time.monotonic()
        time.sleep(min(_FIRST_PAUSE * 2.0**self._pauses, _LONGEST_PAUSE))
        self._pauses = min(self._pauses + 1, 32)
        return time.monotonic() - began


def warn_if_buffer_wraps_first(status: Status, warn: Warn) -> None:
    """Say that LROSE's own writers would not block here."""
    if live_span(status) < status.nslots:
        warn(
            "wraps",
            "blocks on its buffer, not on its slots; LROSE's own writers would overwrite "
            "messages here: create it with fewer slots or a larger size",
        )


def warn_if_reader_is_unknown(status: Status, warn: Warn) -> None:
    """Say that nobody knows yet which messages the reader of the queue still needs."""
    behind = id_distance(status.youngest_id, status.last_id_read)
    if live_span(status) and not 0 <= behind < live_span(status):
        warn(
            "unknown",
            "was not blocking until now: messages that are in it already may be overwritten "
            "before its reader, which has not said yet where it is, comes to them",
        )
