"""What do all clients of a server of queues share?"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.protocols.lrose.fmq_paths import QueueRoot
from penstock.protocols.lrose.fmq_registering import Registrations
from penstock.protocols.lrose.fmq_wide import WideWriters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.protocols.lrose.fmq_server import FmqServerOptions

__all__ = ["Shared"]


class Shared:
    """What all clients of a server share. Safe to share between threads."""

    def __init__(self, options: FmqServerOptions) -> None:
        self.options = options
        self.root = QueueRoot(options.root, shared_memory=options.shared_memory)
        self.wide_writers = WideWriters()
        self.registrations = Registrations()
        #: Held while a wide queue is opened.
        self.opening = threading.Lock()
        #: Those who wait for messages, by the path of their queue.
        self._waiting: defaultdict[str, set[threading.Event]] = defaultdict(set)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self, path: str) -> Iterator[threading.Event]:
        """Give what is set whenever a client has appended to a queue."""
        event = threading.Event()
        with self._lock:
            self._waiting[path].add(event)
        try:
            yield event
        finally:
            with self._lock:
                self._waiting[path].discard(event)
                if not self._waiting[path]:
                    del self._waiting[path]

    def wake(self, path: str) -> None:
        """Have those look who wait for messages of a queue."""
        if self._waiting:
            with self._lock:
                for event in self._waiting.get(path, ()):
                    event.set()

    def close(self) -> None:
        self.registrations.close()
