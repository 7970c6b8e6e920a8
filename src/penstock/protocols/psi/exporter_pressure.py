"""When do the writers of a store wait for those who send its messages?

A ring forgets its oldest messages. So while a client that makes progress is far behind, all writers
of the store wait, also those that do not know that it is remoted. One that takes nothing for some
time is waited for no more: it loses messages, and is told so by their numbers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from penstock.protocols.psi.store_streams import StoreStreams

__all__ = ["BackPressure", "Follower"]

#: While writers wait, look this often (seconds) for clients that have stopped.
_LOOK: Final = 0.02
#: How often it is looked, while as many messages are written as somebody may be behind.
_LOOKS: Final = 4
#: With each look, so much of the size of the largest message is remembered.
_FORGET: Final = 0.99


class Follower(Protocol):
    """Who reads from the store."""

    #: Number in the store's queue of the next message to read.
    next_seq: int
    #: When it got on last, by the monotonic clock.
    progress_at: float


class BackPressure:
    """The gate of one exporter, or reader, at its store."""

    def __init__(
        self, store: StoreStreams, max_lag: int, max_lag_bytes: int | None, patience: float
    ) -> None:
        self._store = store
        self._max_lag = max_lag
        self._max_lag_bytes = max_lag_bytes
        self._patience = patience
        self._senders: set[Follower] = set()
        self._moved = threading.Condition()
        #: Messages that may be appended before it has to be looked again.
        self._credit = 0
        #: Bytes of the largest messages, by and by forgotten.
        self._largest = 1.0
        self._is_open = False
        #: Seconds that writers have waited.
        self.waited = 0.0

    def add(self, sender: Follower) -> None:
        with self._moved:
            self._senders.add(sender)
            self._credit = 0

    def discard(self, sender: Follower) -> None:
        with self._moved:
            self._senders.discard(sender)
            self._moved.notify_all()

    def progress(self) -> None:
        """Note that a sender got on."""
        with self._moved:
            self._moved.notify_all()

    def wait(self, messages: int, size: int) -> None:
        """Let a writer wait while somebody is too far behind."""
        if size > self._largest * messages:
            self._largest = size / max(1, messages)
            self._credit = 0  # it was given for smaller ones
        self._credit -= messages
        if self._credit >= 0 or not self._senders:
            return
        with self._moved:
            began = time.monotonic()
            while not self._is_open:
                allowed = self._allowed()
                room = allowed - self._worst_lag()
                # More than all that is allowed goes when nobody is behind.
                if room >= min(messages, allowed):
                    self._credit = max(0, min(room - messages, allowed // _LOOKS))
                    self._largest *= _FORGET
                    break
                self._moved.wait(_LOOK)
            self.waited += time.monotonic() - began

    def _allowed(self) -> int:
        """Return the messages that somebody may be behind: of the size of recent large ones."""
        if self._max_lag_bytes is None:
            return self._max_lag
        return max(1, min(self._max_lag, int(self._max_lag_bytes / max(1.0, self._largest))))

    def _worst_lag(self) -> int:
        end = self._store.newest_seq() + 1
        now = time.monotonic()
        return max(
            (
                end - sender.next_seq
                for sender in self._senders
                if now - sender.progress_at < self._patience
            ),
            default=0,
        )

    def open(self) -> None:
        """Hold nobody up any more."""
        with self._moved:
            self._is_open = True
            self._moved.notify_all()
