"""When do the writers of a store wait for its readers?

A ring overwrites its oldest messages. While a reader that makes progress lags too far, all writers
of the store wait. They do not wait for a reader without progress: it loses messages, and sees that
by their sequence numbers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from penstock.protocols.psi.store.catalog import StoreStreams

__all__ = ["BackPressure", "Follower", "Gate"]

#: Seconds between checks for readers without progress.
_LOOK: Final = 0.02
#: Checks of the lag while as many messages are appended as a reader may lag.
_LOOKS: Final = 4
#: Decay of the largest message size, at each check.
_FORGET: Final = 0.99


class Follower(Protocol):
    """A reader of the store."""

    #: The number of its next message in the store's queue.
    next_seq: int
    #: When it last made progress, by the monotonic clock.
    progress_at: float


class BackPressure:
    """The gate of one exporter, or one `psi://` reader, at its store."""

    def __init__(
        self, store: StoreStreams, max_lag: int, max_lag_bytes: int | None, patience: float
    ) -> None:
        self._store = store
        self._max_lag = max_lag
        self._max_lag_bytes = max_lag_bytes
        self._patience = patience
        self._senders: set[Follower] = set()
        self._moved = threading.Condition()
        #: Messages that may be appended before the next check.
        self._credit = 0
        #: Bytes of the largest recent message; it decays.
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
        """Wake the writers: a reader made progress."""
        with self._moved:
            self._moved.notify_all()

    def wait(self, messages: int, size: int) -> None:
        """Block a writer while a reader lags too far."""
        if size > self._largest * messages:
            self._largest = size / max(1, messages)
            self._credit = 0  # it was computed for smaller ones
        self._credit -= messages
        if self._credit >= 0 or not self._senders:
            return
        with self._moved:
            began = time.monotonic()
            while not self._is_open:
                allowed = self._allowed()
                room = allowed - self._worst_lag()
                # A batch larger than the allowed lag passes when no reader lags.
                if room >= min(messages, allowed):
                    self._credit = max(0, min(room - messages, allowed // _LOOKS))
                    self._largest *= _FORGET
                    break
                self._moved.wait(_LOOK)
            self.waited += time.monotonic() - began

    def _allowed(self) -> int:
        """Return the messages that a reader may lag, taken as large as the largest recent one."""
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
        """Let all writers pass from now on."""
        with self._moved:
            self._is_open = True
            self._moved.notify_all()


class Gate(Protocol):
    """Blocks the writers of a store, such as an exporter that cannot keep up."""

    def wait(self, messages: int, size: int) -> None:
        """Wait until `messages` messages of `size` bytes in total may be appended."""
        ...
