"""How does one thread wait for all readers of a process, however many queues they read?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.batch import Batch, batch_from_messages
from penstock.core.errors import PenstockError, Unsupported
from penstock.core.grouped import Grouped
from penstock.core.interfaces import FIRST_PAUSE, LONGEST_SLEEP, WaitGroup, between_looks
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.core.statistics import ReaderStatistics

__all__ = ["Source", "Wait", "call_in", "watcher"]

log = logging.getLogger(__name__)

#: While nothing comes, look this often (seconds) at each queue that has to be polled.
_LONGEST_PAUSE = 0.02
#: Pause so long (seconds) when a queue has something, and others are reading it just now, or its
#: reader passed over it.
_IN_USE = 0.001


class Source:
    """A reader, and what was taken from it and not delivered yet. Safe to share between threads.

    What the watcher takes is held here, and the one who waits is only told to fetch it. So a
    read can be cancelled at any moment, and there is nothing to lose.
    """

    def __init__(self, reader: Reader) -> None:
        #: To be waited for. Everything else goes through here.
        self.reader = reader
        #: Whoever touches the reader or what is held has this. Nobody waits for messages with
        #: it, so it is never held longer than one look at the queue takes.
        self._lock = threading.Lock()
        self._held: deque[Message] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        # Held messages that were given up by a seek: the reader counted them as delivered.
        self._given_up = 0
        self._given_up_bytes = 0

    def take_many(self, n: int) -> list[Message]:
        """Return up to `n` messages that are there now."""
        with self._lock:
            return self._take_held(n) or self.reader.read_many(n, 0)

    def take_batch(self, n: int) -> Batch:
        """Return up to `n` messages that are there now, as the reader makes a batch of them."""
        with self._lock:
            held = self._take_held(n)
            return batch_from_messages(held) if held else self.reader.read_batch(n, 0)

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
                self._held.extend(self.reader.read_many(limit, 0))
        except BaseException as error:  # noqa: BLE001 - it belongs to the one who waits
            self._failure = error
        finally:
            found = bool(self._held) or self._failure is not None
            self._lock.release()
        return found

    def look_around(self) -> bool:
        """Let the reader notice what nobody would wake it for; tell if that is an error."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._is_closed:
                self.reader._idle()  # noqa: SLF001 - for whoever waits for readers
        except BaseException as error:  # noqa: BLE001 - it belongs to the one who waits
            self._failure = error
        finally:
            failed = self._failure is not None
            self._lock.release()
        return failed

    def settle(self, call: Callable[[Grouped], None]) -> None:
        """Acknowledge messages of a group, or give them back.

        :raises Unsupported: the reader is no member of a group.
        """
        with self._lock:
            if not isinstance(self.reader, Grouped):
                raise Unsupported(
                    f"{self.reader.url} has no messages to acknowledge", hint="open it with group="
                )
            call(self.reader)

    def seek(self, position: PositionLike) -> None:
        with self._lock:
            self.reader.seek(position)
            self._give_up_held()

    def _give_up_held(self) -> None:
        self._given_up += len(self._held)
        self._given_up_bytes += sum(message.size for message in self._held)
        self._held.clear()
        self._failure = None

    def statistics(self) -> ReaderStatistics:
        """Return the reader's books; what is held is not delivered yet."""
        with self._lock:
            books = self.reader.statistics()
            held = len(self._held)
            held_bytes = sum(message.size for message in self._held)
            return books._replace(
                messages=books.messages - held - self._given_up,
                bytes=books.bytes - held_bytes - self._given_up_bytes,
                next_seq=self._held[0].seq if held else books.next_seq,
                backlog=books.backlog + held,
            )

    def close(self, failure: BaseException | None = None) -> None:
        """Close the reader. The watcher finds it closed, and so do those who wait.

        What is held comes again to a reader that keeps its position, and after a failure
        also what was delivered since the last read.
        """
        with self._lock:
            if self._held and failure is None:
                with contextlib.suppress(PenstockError):
                    self.reader.seek(self._held[0].seq)
            self._is_closed = True
            kind = None if failure is None else type(failure)
            self.reader.__exit__(kind, failure, None)
            self._give_up_held()


class Wait:
    """A task that waits for messages of a source."""

    def __init__(self, source: Source, limit: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self.reader = source.reader
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

    def look_around(self) -> bool:
        """Look for what nobody would wake the watcher for; True when the wait is over."""
        if self.loop.is_closed():
            return True
        if not self._source.look_around():
            return False
        call_in(self.loop, self.wake)
        return True


class _InTurns(WaitGroup):
    """Sleeps for nobody: what has to be polled is looked at between."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def add(self, reader: Reader) -> None: ...

    def discard(self, reader: Reader) -> None: ...

    def sleep(self, timeout: float) -> list[Reader]:
        self._woken.wait(timeout)
        self._woken.clear()
        return []

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None: ...


class _Watcher:
    """The one thread that waits for all readers.

    Those that have a `WaitGroup` are slept for. As long as there are others as well, it looks at
    those in turns, and pauses.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with nothing: a forked process has neither the thread nor those who wait."""
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        # Those that came or went since the thread looked last.
        self._changed: list[Wait] = []
        self._worker: Worker | None = None
        self._group: WaitGroup = _InTurns()
        self._pause = FIRST_PAUSE
        # The thread's own: those it sleeps for, and those it polls.
        self._asleep: dict[Reader, Wait] = {}
        self._polled: set[Wait] = set()
        self._looked_around = 0.0

    def add(self, wait: Wait) -> None:
        with self._lock:
            if self._worker is None:
                self._worker = Worker("penstock-aio", self._run, log=log, restart=True).start()
            self._waits.add(wait)
            self._changed.append(wait)
            self._pause = FIRST_PAUSE
            self._group.wake()

    def remove(self, wait: Wait) -> None:
        with self._lock:
            if wait in self._waits:
                self._waits.remove(wait)
                self._changed.append(wait)
                if not self._waits:
                    self._group.wake()  # it need not stay

    def look_again(self) -> None:
        """Look at all readers now: something was done to one of them."""
        with self._lock:
            self._group.wake()

    def _run(self, _: Worker) -> None:
        while True:
            with self._lock:
                changed, self._changed = self._changed, []
                for wait in changed:
                    if wait in self._waits:
                        self._admit(wait)
                    else:
                        self._dismiss(wait)
                # It stays for one back-off, some 40 ms: starting a thread for each read is slow.
                if not self._waits and self._pause >= _LONGEST_PAUSE:
                    self._worker = None
                    self._use(_InTurns())
                    return
                pause, self._pause = self._pause, min(self._pause * 2, _LONGEST_PAUSE)
            over = self._round(pause)
            if over:
                with self._lock:
                    self._waits.difference_update(over)
                    self._pause = FIRST_PAUSE
                for wait in over:
                    self._dismiss(wait)

    def _admit(self, wait: Wait) -> None:
        reader, kind = wait.reader, wait.reader.wait_group
        if kind is not None and not self._asleep:
            self._use(kind())
        # There is a second wait for one reader when an event loop ended in the midst of the first.
        if kind is type(self._group) and reader not in self._asleep:
            self._asleep[reader] = wait
            self._group.add(reader)
        else:
            self._polled.add(wait)

    def _dismiss(self, wait: Wait) -> None:
        self._polled.discard(wait)
        if self._asleep.get(wait.reader) is wait:
            del self._asleep[wait.reader]
            self._group.discard(wait.reader)

    def _use(self, group: WaitGroup) -> None:
        if type(group) is not type(self._group):
            self._group.close()
            self._group = group

    def _round(self, pause: float) -> list[Wait]:
        """Sleep until there may be something for somebody; return the waits that are over."""
        only_asleep = self._asleep and not self._polled
        ready = self._group.sleep(LONGEST_SLEEP if only_asleep else pause)
        told = [self._asleep[reader] for reader in ready]
        over = [wait for wait in (*told, *self._polled) if wait.look()]
        if told and not over:
            time.sleep(_IN_USE)
        now = time.monotonic()
        if now - self._looked_around > between_looks(len(self._asleep) + len(self._polled)):
            self._looked_around = now
            waits = (*self._asleep.values(), *self._polled)
            over += [wait for wait in waits if wait.look_around()]
        return over


watcher = _Watcher()
os.register_at_fork(after_in_child=watcher.reset)


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back in an event loop of another thread, unless it was closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
