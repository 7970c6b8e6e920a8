"""How does one call wait for many queues, without looking at each of them again and again?"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from penstock.core.capabilities import Grouped
from penstock.core.errors import Closed, PenstockError
from penstock.core.interfaces import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_SLEEP,
    Closable,
    WaitGroup,
    between_looks,
)
from penstock.core.worker import Worker
from penstock.queue.wide import _ring

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.interfaces import Reader
    from penstock.queue.wide.reader import WideReader

__all__ = ["RingWaitGroup", "Waiter", "wait_any"]

log = logging.getLogger(__name__)

#: Most readers of a thread: Linux takes 128 futexes at once, and one is the bell.
_AT_ONCE: Final = 127
#: Readers that stay with the waiting thread when the others are moved to helpers.
_KEPT: Final = 64


def wait_any(readers: Iterable[Reader], timeout: float | None = None) -> list[Reader]:
    """Wait until a reader has messages, and return all readers that have.

    The list is empty after `timeout` seconds, or without readers. Read them with a timeout of 0: a
    reader's filter may skip its messages. A reader whose next read raises an error is returned as
    well. Wide queues need no polling, whatever their number; others are polled.

    To wait repeatedly for many readers, keep a `Waiter`.
    """
    every = list(readers)
    if not every:
        return []
    with Waiter() as waiter:
        return waiter.wait(every, timeout)


class Waiter(Closable):
    """Waits for many readers, as `wait_any` does, until another thread interrupts it.

    Not thread-safe, except for `interrupt`. A forked process creates its own.
    """

    def __init__(self) -> None:
        self._group = RingWaitGroup()
        self._asleep: set[Reader] = set()
        self._interrupted = False

    def wait(self, readers: Iterable[Reader], timeout: float | None = None) -> list[Reader]:
        """Return the readers that have messages; empty after `timeout`, or if interrupted."""
        every = list(readers)
        for reader in every:
            if isinstance(reader, Grouped):
                continue  # it acknowledges by explicit calls only
            with suppress(Closed):  # it is returned, and its read raises the error
                reader.acknowledge()  # this call follows the last read
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        look_around = now + between_looks(len(every))
        for reader in every:  # for callers that wait repeatedly with short timeouts
            if reader.wait_group is RingWaitGroup and not _has_news(reader):
                with suppress(PenstockError):  # its next read raises it
                    cast("WideReader", reader)._look_if_due(between_looks(len(every)))  # noqa: SLF001
        pause = FIRST_PAUSE
        while True:
            ready = [reader for reader in every if _has_news(reader)]
            if ready or now >= deadline or self._interrupted:
                self._interrupted = False
                return ready
            if now >= look_around:
                look_around = now + between_looks(len(every))
                if stuck := [reader for reader in every if not _can_go_on(reader)]:
                    return stuck
            limit = min(deadline - now, LONGEST_SLEEP)
            if self._sleep_for(every) < len(every):
                limit = min(limit, pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            self._group.sleep(limit)
            now = time.monotonic()

    def _sleep_for(self, readers: list[Reader]) -> int:
        """Set the readers that the group sleeps for; return their count. Others are polled."""
        wanted = {reader for reader in readers if reader.wait_group is RingWaitGroup}
        for reader in self._asleep - wanted:
            self._group.discard(reader)
        for reader in wanted - self._asleep:
            self._group.add(reader)
        self._asleep = wanted
        return len(wanted)

    def interrupt(self) -> None:
        """End the current wait, or else the next one. Thread-safe."""
        self._interrupted = True
        self._group.wake()

    def close(self) -> None:
        """Stop the helper threads, if there are any."""
        self._group.close()


def _can_go_on(reader: Reader) -> bool:
    """Let a reader check for changes that wake nobody; False: its next read raises an error."""
    try:
        reader._idle()  # noqa: SLF001 - meant for waiters
    except PenstockError:
        return False
    return True


def _has_news(reader: Reader) -> bool:
    """Tell whether a read would return messages, or raise."""
    if reader.wait_group is RingWaitGroup:
        return _is_ready(cast("WideReader", reader))
    try:
        return reader._has_news()  # noqa: SLF001 - meant for waiters
    except PenstockError:
        return True


def _is_ready(reader: WideReader) -> bool:
    try:
        has_more = reader._head > reader._next  # noqa: SLF001 - its other half
        return has_more or reader._is_closed or reader._goes_on()  # noqa: SLF001
    except AttributeError:
        return True  # another thread is closing it


class RingWaitGroup(WaitGroup):
    """Sleeps for readers of wide queues, on all of their futexes at once.

    Linux lets a thread sleep on 128 futexes. Of more readers, those silent for longest are moved to
    helper threads, which do not wake for the others. So the cost of a message does not depend on
    the number of silent queues.
    """

    def __init__(self) -> None:
        self._bell = _Bell()
        # Readers that this thread sleeps for, the latest active last.
        self._near: dict[WideReader, None] = {}
        # Readers moved to a helper.
        self._far: dict[WideReader, _Helper] = {}
        self._helpers: list[_Helper] = []
        # Readers that a helper found ready.
        self._found: deque[WideReader] = deque()

    def add(self, reader: Reader) -> None:
        self._near[cast("WideReader", reader)] = None

    def discard(self, reader: Reader) -> None:
        ring = cast("WideReader", reader)
        self._near.pop(ring, None)
        helper = self._far.pop(ring, None)
        if helper is not None:
            helper.readers.discard(ring)

    def sleep(self, timeout: float) -> list[WideReader]:
        if len(self._near) > _AT_ONCE:
            self._leave_to_helpers(list(self._near)[:-_KEPT])
        self._bell.sleep(tuple(self._near), timeout)
        while self._found:
            found = self._found.popleft()
            if self._far.pop(found, None) is not None:
                self._near[found] = None
        return [reader for reader in self._near if _is_ready(reader)]

    def _leave_to_helpers(self, readers: list[WideReader]) -> None:
        while readers:
            helper = next((h for h in self._helpers if len(h.readers) < _AT_ONCE), None)
            if helper is None:
                helper = _Helper(self._found, self._bell)
                self._helpers.append(helper)
            room = _AT_ONCE - len(helper.readers)
            # Only now: those for which no thread could be started would wait for ever.
            for reader in readers[:room]:
                del self._near[reader]
                self._far[reader] = helper
            helper.add(readers[:room])
            del readers[:room]

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        for helper in self._helpers:
            helper.stop()
        for helper in self._helpers:
            helper.join()
        self._near.clear()
        self._far.clear()
        self._helpers.clear()


class _Bell:
    """A futex to interrupt a sleep. It stays set until the next sleep ends."""

    def __init__(self) -> None:
        self._word = bytearray(4)

    def ring(self) -> None:
        _ring.wake(self._word, 0)

    def sleep(self, readers: tuple[WideReader, ...], timeout: float) -> None:
        """Sleep until it rings, a reader may have messages, or `timeout` seconds passed."""
        try:
            _ring.wait_for_any(readers, self._word, timeout)
        except ValueError:
            pass  # a reader was closed: report it
        except OSError:
            # A reader closed at this moment, or no support by the system: poll.
            time.sleep(min(timeout, LONGEST_PAUSE))
        finally:
            self._word[:] = bytes(4)


class _Helper:
    """A thread that sleeps for some readers; it reports those that are ready, and rings."""

    def __init__(self, found: deque[WideReader], bell: _Bell) -> None:
        #: The readers that it sleeps for; those reported are removed.
        self.readers: set[WideReader] = set()
        self._found = found
        self._bell = bell
        self._own_bell = _Bell()
        self._worker = Worker(
            "penstock-wait", self._run, log=log, restart=True, rouse=self._own_bell.ring
        ).start()

    def add(self, readers: Iterable[WideReader]) -> None:
        self.readers.update(readers)
        self._own_bell.ring()

    def stop(self) -> None:
        self._worker.ask_to_stop()

    def join(self) -> None:
        self._worker.join()

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self._own_bell.sleep(tuple(self.readers), LONGEST_SLEEP)
            found = [reader for reader in tuple(self.readers) if _is_ready(reader)]
            if found:
                self.readers.difference_update(found)
                self._found.extend(found)
                self._bell.ring()
