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
from penstock.core.capabilities import Grouped
from penstock.core.errors import PenstockError, Unsupported
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

#: While idle, poll each queue without wake-ups this often (seconds).
_LONGEST_PAUSE = 0.02
#: Pause this long (seconds) when a queue has messages that another task is reading now, or that
#: its reader skipped.
_IN_USE = 0.001


class Source:
    """A reader, and the messages taken from it but not delivered yet. Thread-safe.

    Messages taken by the watcher are held here, and the waiting task is woken to fetch them. So a
    read can be cancelled at any moment without losing messages.
    """

    def __init__(self, reader: Reader) -> None:
        #: For waiting only. All other calls go through this class.
        self.reader = reader
        #: Guards the reader and the held messages. Never held while waiting for messages, so never
        #: longer than one check of the queue.
        self._lock = threading.Lock()
        self._held: deque[Message] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        # Held messages discarded by a seek: the reader counted them as delivered.
        self._given_up = 0
        self._given_up_bytes = 0

    def take_many(self, n: int) -> list[Message]:
        """Return up to `n` available messages."""
        with self._lock:
            return self._take_held(n) or self.reader.read_many(n, 0)

    def take_batch(self, n: int) -> Batch:
        """Return up to `n` available messages as one Arrow batch."""
        with self._lock:
            held = self._take_held(n)
            return batch_from_messages(held) if held else self.reader.read_batch(n, 0)

    def _take_held(self, n: int) -> list[Message]:
        if not self._held and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return [self._held.popleft() for _ in range(min(n, len(self._held)))]

    def look(self, limit: int) -> bool:
        """Take and hold up to `limit` available messages, or an error; tell if there is any."""
        if not self._lock.acquire(blocking=False):
            return False  # in use: other queues must not wait for it
        try:
            if not self._held and self._failure is None:
                self._held.extend(self.reader.read_many(limit, 0))
        except BaseException as error:  # noqa: BLE001 - raised in the waiting task
            self._failure = error
        finally:
            found = bool(self._held) or self._failure is not None
            self._lock.release()
        return found

    def look_around(self) -> bool:
        """Let the reader check for changes that do not wake it; tell if that is an error."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._is_closed:
                self.reader._idle()  # noqa: SLF001 - meant for code that waits for readers
        except BaseException as error:  # noqa: BLE001 - raised in the waiting task
            self._failure = error
        finally:
            failed = self._failure is not None
            self._lock.release()
        return failed

    def settle(self, call: Callable[[Grouped], None]) -> None:
        """Acknowledge messages of a group, or return them.

        :raises Unsupported: the reader is not a member of a group.
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
        """Return the reader's statistics; held messages do not count as delivered."""
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
        """Close the reader. The watcher and waiting tasks then find it closed.

        A reader with a named position gets the held messages again, and after a failure also
        those of the last read.
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
        """Check for messages or an error, and wake the task; True when the wait is over.

        Called by the watcher, also once after the task has left.
        """
        if self.loop.is_closed():
            return True
        if not self._source.look(self._limit):
            return False
        call_in(self.loop, self.wake)
        return True

    def look_around(self) -> bool:
        """Check for changes that do not wake the watcher; True when the wait is over."""
        if self.loop.is_closed():
            return True
        if not self._source.look_around():
            return False
        call_in(self.loop, self.wake)
        return True


class _InTurns(WaitGroup):
    """A group without wake-ups, for readers that must be polled."""

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

    It sleeps in the `WaitGroup` of readers that have one. Others are polled, with pauses.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all state: a forked process has neither the thread nor the waiting tasks."""
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        # Waits added or removed since the thread's last round.
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
                    self._group.wake()  # the thread may end

    def look_again(self) -> None:
        """Check all readers now: one of them was changed."""
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
        # A reader has a second wait if an event loop ended during the first.
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
        """Sleep until a reader may have messages; return the waits that are over."""
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
    """Call back in the event loop of another thread, unless it is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
