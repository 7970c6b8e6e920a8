"""How does a test stop the watcher with a message in its hands?"""

from __future__ import annotations

import threading
from collections import deque

from penstock.core.errors import Closed
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.position import PositionLike
from penstock.core.statistics import ReaderStatistics
from support.tasks import WATCHER

__all__ = ["GatedReader", "a_message"]


def a_message(seq: int) -> Message:
    return Message(seq, 0, 0, 0, 0, None, None, b"%d" % seq)


class GatedReader(Reader):
    """A fault on demand: what the watcher has taken stays in its hands until the gate opens."""

    def __init__(self, url: str = "gated:") -> None:
        super().__init__(url)
        self.there: deque[Message] = deque()
        self.error: Exception | None = None
        self.taken = threading.Event()
        self.gate = threading.Event()
        self.delivered = 0
        self.is_closed = False
        self._users = 0

    def _take(self, limit: int) -> list[Message]:
        self._users += 1
        assert self._users == 1, "two threads at once"
        try:
            if self.is_closed:
                raise Closed("gated: was closed")
            messages = [self.there.popleft() for _ in range(min(limit, len(self.there)))]
            self.delivered += len(messages)
            error, self.error = self.error, None
            if (messages or error) and threading.current_thread().name == WATCHER:
                self.taken.set()
                assert self.gate.wait(10)
            if error is not None:
                raise error
            return messages
        finally:
            self._users -= 1

    def seek(self, position: PositionLike) -> None:
        del position
        assert self._users == 0

    def statistics(self) -> ReaderStatistics:
        size = self.delivered  # one byte each
        return ReaderStatistics(self.delivered, size, 0, 0, 0, self.delivered, len(self.there), ())

    def close(self) -> None:
        self.is_closed = True
