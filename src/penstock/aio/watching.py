"""How does one thread wait for all readers of a process, however many queues they read?"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.batch import Batch, batch_from_messages
from penstock.core.interfaces import FIRST_PAUSE

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics

__all__ = ["Source", "Wait", "call_in", "watcher"]

#: While nothing comes, look at each queue this often (seconds).
_LONGEST_PAUSE = 0.02


class Source:
    """A reader, and what was taken from it and not delivered yet. Safe to share between threads.

    What the watcher takes is held here, and the one who waits is only told to fetch it. So a
    read can be cancelled at any moment, and there is nothing to lose.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        #: Whoever touches the reader or what is held has this. Nobody waits for messages with
        #: it, so it is never held longer than one look at the queue takes.
        self._lock = threading.Lock()
        self._held: deque[Message] = deque()
        self._failure: BaseException | None = None
        # Held messages that were given up by a seek: the reader counted them as delivered.
        self._given_up = 0
        self._given_up_bytes = 0

    def take_many(self, n: int) -> list[Message]:
        """Return up to `n` messages that are there now."""
        with self._lock:
            return self._take_held(n) or self._reader.read_many(n, 0)

    def take_batch(self, n: int) -> Batch:
        """Return up to `n` messages that are there now, as the reader makes a batch of them."""
        with self._lock:
            held = self._take_held(n)
            return batch_from_messages(held) if held else self._reader.read_batch(n, 0)

    def _take_held(self, n: int) -> list[Message]:
        if not self._held and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return [self._held.popleft() for _ in range(min(n, len(self._held)))]

    def look(self, limit: int) -> bool:
        """Hold what is there now, up to `limit` messages or an error; tell if there is any."""
        if not self._lock.acquire(blocking=False):
            return False  # it is in use: other queues need not wait for that
        try:
            if not self._held and self._failure is None:
                self._held.extend(self._reader.read_many(limit, 0))
        except BaseException as error:  # noqa: BLE001 - it belongs to the one who waits
            self._failure = error
        finally:
            found = bool(self._held) or self._failure is not None
            self._lock.release()
        return found

    def seek(self, position: PositionLike) -> None:
        with self._lock:
            self._reader.seek(position)
            self._give_up_held()

    def _give_up_held(self) -> None:
        self._given_up += len(self._held)
        self._given_up_bytes += sum(message.size for message in self._held)
        self._held.clear()
        self._failure = None

    def statistics(self) -> ReaderStatistics:
        """Return the reader's books; what is held is not delivered yet."""
        with self._lock:
            books = self._reader.statistics()
            held = len(self._held)
            held_bytes = sum(message.size for message in self._held)
            return books._replace(
                messages=books.messages - held - self._given_up,
                bytes=books.bytes - held_bytes - self._given_up_bytes,
                next_seq=self._held[0].seq if held else books.next_seq,
                backlog=books.backlog + held,
            )

    def close(self) -> None:
        """Close the reader. The watcher finds it closed, and so do those who wait."""
        with self._lock:
            self._reader.close()
            self._give_up_held()


class Wait:
    """A task that waits for messages of a source."""

    def __init__(self, source: Source, limit: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self._source = source
        self._limit = limit

    def wake(self) -> None:
        """End the wait; called in its event loop."""
        if not self.over.done():
            self.over.set_result(None)

    def look(self) -> bool:
        """Look whether there is something to wake the task for; True when the wait is over.

        Called by the watcher, also once after the task went away.
        """
        if self.loop.is_closed():
            return True
        if not self._source.look(self._limit):
            return False
        call_in(self.loop, self.wake)
        return True


class _Watcher:
    """The one thread that waits for all readers: it looks at each, and pauses, in turns."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with nothing: a forked process has neither the thread nor those who wait."""
        self._changed = threading.Condition()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None
        self._pause = FIRST_PAUSE

    def add(self, wait: Wait) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="penstock-aio", daemon=True)
                thread.start()
                self._thread = thread
            self._waits.add(wait)
            self._pause = FIRST_PAUSE
            self._changed.notify()

    def remove(self, wait: Wait) -> None:
        with self._changed:
            self._waits.discard(wait)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._pause)
                # It stays for one back-off, some 40 ms: starting a thread for each read is slow.
                if not self._waits and self._pause >= _LONGEST_PAUSE:
                    self._thread = None
                    return
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)
                waits = self._waits.copy()
            over = [wait for wait in waits if wait.look()]
            if over:
                with self._changed:
                    self._waits.difference_update(over)
                    self._pause = FIRST_PAUSE


watcher = _Watcher()
os.register_at_fork(after_in_child=watcher.reset)


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back in an event loop of another thread, unless it was closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
