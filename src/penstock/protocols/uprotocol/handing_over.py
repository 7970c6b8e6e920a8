"""How does a batch that a leg brings wait until whoever reads it says that it is done?"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.uprotocol.message import UMessage

__all__ = ["HandOver"]


class HandOver:
    """Between the thread of a leg and the thread that reads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[bytes | UMessage] = deque()
        self._brought = self._taken = self._done = 0
        self._is_closed = False

    def ingest(self, messages: Sequence[bytes | UMessage]) -> None:
        """Bring messages, and return when all of them are done.

        :raises Closed: they never will be.
        """
        with self._changed:
            self._waiting.extend(messages)
            self._brought += len(messages)
            until = self._brought
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= until or self._is_closed)
            if self._done < until:
                raise Closed("the reader was closed before it was done")

    def take(self, limit: int, timeout: float) -> list[bytes | UMessage]:
        """Take what is there; wait for the first of them."""
        with self._changed:
            if timeout:
                self._changed.wait_for(lambda: self._waiting, timeout)
            found = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            self._taken += len(found)
            return found

    def acknowledge(self) -> None:
        """Say that all that was taken is done."""
        with self._changed:
            if self._done != self._taken:
                self._done = self._taken
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
