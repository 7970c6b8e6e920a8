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
    from penstock.protocols.psi.store_set import Store

__all__ = ["BackPressure", "Follower"]

#: While writers wait, look this often (seconds) for clients that have stopped.
_LOOK: Final = 0.02


class Follower(Protocol):
    """Who reads from the store."""

    #: Number in the store's queue of the next message to read; None before it is known.
    next_seq: int | None
    #: When it got on last, by the monotonic clock.
    progress_at: float


class BackPressure:
    """The gate of one exporter, or reader, at its store."""

    def __init__(
        self, store: Store, max_lag: int, max_lag_bytes: int | None, patience: float
    ) -> None:
        self._store = store
        self._max_lag = max_lag
        self._max_lag_bytes = max_lag_bytes
        self._patience = patience
        self._senders: set[Follower] = set()
        self._moved = threading.Condition()
        #: Messages that may be appended before it has to be looked again.
        self._credit = 0
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

    def wait(self, messages: int) -> None:
        """Let a writer wait while somebody is too far behind."""
        self._credit -= messages
        if self._credit >= 0 or not self._senders:
            return
        with self._moved:
            began = time.monotonic()
            while not self._is_open:
                allowed = self._allowed()
                room = allowed - self._worst_lag()
                # One that is larger than all that is allowed goes when nobody is behind.
                if room >= min(messages, allowed):
                    self._credit = max(0, room - messages)
                    break
                self._moved.wait(_LOOK)
            self.waited += time.monotonic() - began

    def _allowed(self) -> int:
        most = self._max_lag
        if self._max_lag_bytes is not None:
            streams = self._store.streams()
            count = sum(stream.messages for stream in streams)
            size = sum(stream.bytes for stream in streams)
            if count:
                most = min(most, self._max_lag_bytes // max(1, size // count))
        return max(1, most)

    def _worst_lag(self) -> int:
        end = self._store.newest_seq() + 1
        now = time.monotonic()
        return max(
            (
                end - sender.next_seq
                for sender in self._senders
                if sender.next_seq is not None and now - sender.progress_at < self._patience
            ),
            default=0,
        )

    def open(self) -> None:
        """Hold nobody up any more."""
        with self._moved:
            self._is_open = True
            self._moved.notify_all()
