"""How does one call wait for many queues, without looking at each of them again and again?"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from penstock.core.closing import Closable
from penstock.core.errors import Closed, PenstockError
from penstock.core.grouped import Grouped
from penstock.core.interfaces import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_SLEEP,
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

#: Readers that a thread can sleep for: Linux takes 128 words at once, and one is the bell's.
_AT_ONCE: Final = 127
#: Of too many readers, so many stay with the thread that waits. The others go to helpers.
_KEPT: Final = 64


def wait_any(readers: Iterable[Reader], timeout: float | None = None) -> list[Reader]:
    """Wait until one of these readers has something to read, and return those that have.

    None are returned when the time is over, or when none are given. Read them with a timeout of 0:
    what is there may be left out by a reader's filter. One whose next read raises an error is
    returned as well. Wide queues are slept for, whatever their number; others are polled.

    To wait for many readers again and again, keep a `Waiter`.
    """
    every = list(readers)
    if not every:
        return []
    with Waiter() as waiter:
        return waiter.wait(every, timeout)


class Waiter(Closable):
    """Waits for many readers, as `wait_any` does, until another thread interrupts it.

    For one thread, but for `interrupt`. A forked process makes its own.
    """

    def __init__(self) -> None:
        self._group = RingWaitGroup()
        self._asleep: set[Reader] = set()
        self._interrupted = False

    def wait(self, readers: Iterable[Reader], timeout: float | None = None) -> list[Reader]:
        """Return the readers that have something to read; none when time is over or interrupted."""
        every = list(readers)
        for reader in every:
            if isinstance(reader, Grouped):
                continue  # what it has is acknowledged by its own call
            with suppress(Closed):  # it is returned, and says so when it is read
                reader.acknowledge()  # this is the call after the last read
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        look_around = now + between_looks(len(every))
        for reader in every:  # which may be waited for again and again, each time for a moment
            if reader.wait_group is RingWaitGroup and not _has_news(reader):
                with suppress(PenstockError):  # its next read says so
                    cast("WideReader", reader)._look_if_due(between_looks(len(every)))  # noqa: SLF001
        pause = FIRST_PAUSE
        while True:
            ready = [reader for reader in every if _has_news(reader)]
            if ready or now >= deadline or self._interrupted:
                self._interrupted = False
                return ready
            if now >= look_around:
                look_around = now + between_looks(len(every))
                for reader in every:
                    reader._idle()  # noqa: SLF001 - for whoever waits for readers
            limit = min(deadline - now, LONGEST_SLEEP)
            if self._sleep_for(every) < len(every):
                limit = min(limit, pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            self._group.sleep(limit)
            now = time.monotonic()

    def _sleep_for(self, readers: list[Reader]) -> int:
        """Tell the group whom to wait for; return how many those are: others are to be polled."""
        wanted = {reader for reader in readers if reader.wait_group is RingWaitGroup}
        for reader in self._asleep - wanted:
            self._group.discard(reader)
        for reader in wanted - self._asleep:
            self._group.add(reader)
        self._asleep = wanted
        return len(wanted)

    def interrupt(self) -> None:
        """End the wait under way, or else the next one. Any thread may call this."""
        self._interrupted = True
        self._group.wake()

    def close(self) -> None:
        """End its threads, where many readers needed some."""
        self._group.close()


def _has_news(reader: Reader) -> bool:
    """Tell whether a read would return something, or raise."""
    if reader.wait_group is RingWaitGroup:
        return _is_ready(cast("WideReader", reader))
    try:
        reader.newest_seq()  # which has a look at the queue
        return reader.statistics().backlog > 0
    except PenstockError:
        return True


def _is_ready(reader: WideReader) -> bool:
    try:
        has_more = reader._head > reader._next  # noqa: SLF001 - its other half
        return has_more or reader._is_closed or reader._goes_on()  # noqa: SLF001
    except AttributeError:
        return True  # another thread closes it this moment


class RingWaitGroup(WaitGroup):
    """Sleeps for readers of wide queues, on all of their futexes at once.

    Linux lets a thread sleep on 128. Of more readers, those that were silent for longest are left
    to helpers, who need not wake up for the others. So a message costs the same however many
    queues are silent.
    """

    def __init__(self) -> None:
        self._bell = _Bell()
        # Those that this thread sleeps for; the last one came last.
        self._near: dict[WideReader, None] = {}
        # Those that were left to a helper.
        self._far: dict[WideReader, _Helper] = {}
        self._helpers: list[_Helper] = []
        # Those that a helper has found to be ready.
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
        for reader in readers:
            del self._near[reader]
        while readers:
            helper = next((h for h in self._helpers if len(h.readers) < _AT_ONCE), None)
            if helper is None:
                helper = _Helper(self._found, self._bell)
                self._helpers.append(helper)
            room = _AT_ONCE - len(helper.readers)
            self._far.update(dict.fromkeys(readers[:room], helper))
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
    """A word to sleep on, beside those of the readers. It stays rung until somebody hears it."""

    def __init__(self) -> None:
        self._word = bytearray(4)

    def ring(self) -> None:
        _ring.wake(self._word, 0)

    def sleep(self, readers: tuple[WideReader, ...], timeout: float) -> None:
        """Return when it rings, when one of the readers may have something, or after some time."""
        try:
            _ring.wait_for_any(readers, self._word, timeout)
        except ValueError:
            pass  # a reader was closed, which is news
        except OSError:
            # Closed at this very moment, or a system that cannot do this: then they are polled.
            time.sleep(min(timeout, LONGEST_PAUSE))
        finally:
            self._word[:] = bytes(4)


class _Helper:
    """A thread that sleeps for some readers; when some may have something, it says so and rings."""

    def __init__(self, found: deque[WideReader], bell: _Bell) -> None:
        #: Those it sleeps for. It leaves out those that it has found.
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
