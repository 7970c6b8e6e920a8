"""When is a datagram in transit forwarded?"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.decisions import Dice
    from penstock.relay.faults.model import Direction

__all__ = ["Flow", "Parcel", "Schedule", "send"]

log = logging.getLogger(__name__)

#: The most bytes held for delay and rate, over all clients.
_MOST_HELD: Final = 64 << 20
#: Memory of a held datagram beside its bytes.
_OVERHEAD: Final = 256
#: A datagram to be overtaken is sent after this time (seconds) even if none follows.
_PATIENCE: Final = 0.2
#: Retry after this time (seconds) when the kernel's buffer is full.
_AGAIN: Final = 0.001


class Parcel:
    """A datagram in transit."""

    __slots__ = ("copies", "data", "date", "due", "flow", "overtaken_at")

    def __init__(self, flow: Flow, data: bytes, copies: int, due: float) -> None:
        self.flow = flow
        self.data = data
        #: Number of duplicates to send.
        self.copies = copies
        self.due = due
        #: It is sent after the datagram with this number.
        self.overtaken_at = 0
        #: The number of its valid entry in the schedule.
        self.date = 0


class Flow:
    """One direction of one client."""

    def __init__(
        self,
        direction: Direction,
        dice: Dice,
        tally: DirectionCounters,
        send: Callable[[bytes], Any],
    ) -> None:
        self.direction = direction
        self.dice = dice
        self.tally = tally
        self.send = send
        self.n = 0
        #: When the rate allows the next datagram.
        self.free_at = 0.0
        #: Those that wait to be overtaken.
        self.waiting: list[Parcel] = []
        self.held = 0
        self.is_closed = False


class Schedule:
    """The datagrams in transit, by due time. Runs in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: (due time, number of the entry, datagram).
        self._dates: list[tuple[float, int, Parcel]] = []
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        self._is_paused = False

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._send_due()

    def close(self) -> None:
        """Count the datagrams in transit as discarded."""
        self.pause()
        self._arm()
        for _, date, parcel in self._dates:
            if date == parcel.date:
                self._discard(parcel)
        self._dates.clear()

    def hold(self, parcel: Parcel, now: float, *, overtaken_at: int | None = None) -> None:
        """Hold a datagram until it is due, or until datagram `overtaken_at` has overtaken it."""
        flow = parcel.flow
        size = len(parcel.data) + _OVERHEAD
        if self._held_bytes + size > _MOST_HELD:
            flow.tally.congested += 1
            return
        self._held_bytes += size
        flow.held += 1
        flow.tally.held += 1
        if parcel.due > now:
            flow.tally.delayed += 1
        if overtaken_at is None:
            # A datagram that is already due is here because the kernel's buffer was full.
            self._plan(parcel, parcel.due if parcel.due > now else now + _AGAIN)
        else:
            parcel.overtaken_at = overtaken_at
            flow.waiting.append(parcel)
            self._plan(parcel, parcel.due + _PATIENCE)

    def let_overtaken_go(self, flow: Flow, n: int, now: float) -> None:
        """Release the datagrams that waited for the n-th."""
        ready = [parcel for parcel in flow.waiting if parcel.overtaken_at <= n]
        for parcel in ready:
            flow.waiting.remove(parcel)
            flow.tally.reordered += 1
            if parcel.due > now:
                self._plan(parcel, parcel.due)
            else:
                parcel.date = 0
                self._let_go(parcel)

    def _plan(self, parcel: Parcel, due: float) -> None:
        parcel.date = next(self._numbers)
        heapq.heappush(self._dates, (due, parcel.date, parcel))
        if self._dates[0][2] is parcel:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dates and not self._is_paused:
            self._timer = self._loop.call_at(self._dates[0][0], self._send_due)

    def _send_due(self) -> None:
        now = self._loop.time()
        while self._dates and not self._is_paused and self._dates[0][0] <= now:
            _, date, parcel = heapq.heappop(self._dates)
            if date != parcel.date:
                continue
            if parcel in parcel.flow.waiting:  # no datagram overtook it
                parcel.flow.waiting.remove(parcel)
            self._let_go(parcel)
        self._arm()

    def _let_go(self, parcel: Parcel) -> None:
        """Send a held datagram, unless its client is gone."""
        if parcel.flow.is_closed:
            self._discard(parcel)
        elif send(parcel):
            self._release(parcel)
        else:
            self._plan(parcel, self._loop.time() + _AGAIN)

    def _release(self, parcel: Parcel) -> None:
        self._held_bytes -= len(parcel.data) + _OVERHEAD
        parcel.flow.held -= 1
        parcel.flow.tally.held -= 1

    def _discard(self, parcel: Parcel) -> None:
        self._release(parcel)
        parcel.flow.tally.discarded += 1


def send(parcel: Parcel) -> bool:
    """Send a datagram and its duplicates; False: the kernel's buffer is full."""
    flow = parcel.flow
    try:
        _send_through(flow, parcel.data)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("%s: %s", flow.direction, error.strerror)
        flow.tally.failed += 1
        return True
    flow.tally.passed += 1
    flow.tally.passed_bytes += len(parcel.data)
    for _ in range(parcel.copies):
        with contextlib.suppress(OSError):  # a missing duplicate is no loss
            flow.send(parcel.data)
            flow.tally.duplicated += 1
    return True


def _send_through(flow: Flow, data: bytes) -> None:
    try:
        flow.send(data)
    except ConnectionRefusedError:
        flow.send(data)  # the reply to an earlier one; this one was not sent
