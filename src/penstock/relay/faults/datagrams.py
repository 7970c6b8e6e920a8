"""How are UDP datagrams forwarded, each with its own fate, for many clients at once?"""

from __future__ import annotations

import contextlib
import copy
import heapq
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

from penstock.relay.faults.counters import Counters
from penstock.relay.faults.decisions import Dice, datagram_fate, garbled
from penstock.relay.faults.model import NO_FAULTS
from penstock.relay.faults.sockets import LARGEST_DATAGRAM, drain, kernel_drops, udp_socket

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable

    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.model import Direction, Faults
    from penstock.relay.faults.sockets import Place

__all__ = ["DatagramRouter"]

log = logging.getLogger(__name__)

#: The most bytes held for delay and rate, over all clients.
_MOST_HELD: Final = 64 << 20
#: Memory of a held datagram beside its bytes.
_OVERHEAD: Final = 256
#: A datagram to be overtaken is sent after this time (seconds) even if none follows.
_PATIENCE: Final = 0.2
#: Retry after this time (seconds) when the kernel's buffer is full.
_AGAIN: Final = 0.001
#: Datagrams read from one socket before the others have their turn.
_TURN: Final = 128


class _Datagram:
    """A datagram in transit."""

    __slots__ = ("copies", "data", "date", "due", "flow", "overtaken_at")

    def __init__(self, flow: _Flow, data: bytes, copies: int, due: float) -> None:
        self.flow = flow
        self.data = data
        #: Number of duplicates to send.
        self.copies = copies
        self.due = due
        #: It is sent after the datagram with this number.
        self.overtaken_at = 0
        #: The number of its valid entry in the schedule.
        self.date = 0


class _Flow:
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
        self.waiting: list[_Datagram] = []
        self.held = 0
        self.is_closed = False


class _Schedule:
    """The datagrams in transit, by due time. Runs in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: (due time, number of the entry, datagram).
        self._dates: list[tuple[float, int, _Datagram]] = []
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
        for _, date, datagram in self._dates:
            if date == datagram.date:
                self._discard(datagram)
        self._dates.clear()

    def hold(self, datagram: _Datagram, now: float, *, overtaken_at: int | None = None) -> None:
        """Hold a datagram until it is due, or until datagram `overtaken_at` has overtaken it."""
        flow = datagram.flow
        size = len(datagram.data) + _OVERHEAD
        if self._held_bytes + size > _MOST_HELD:
            flow.tally.congested += 1
            return
        self._held_bytes += size
        flow.held += 1
        flow.tally.held += 1
        if datagram.due > now:
            flow.tally.delayed += 1
        if overtaken_at is None:
            # A datagram that is already due is here because the kernel's buffer was full.
            self._plan(datagram, datagram.due if datagram.due > now else now + _AGAIN)
        else:
            datagram.overtaken_at = overtaken_at
            flow.waiting.append(datagram)
            self._plan(datagram, datagram.due + _PATIENCE)

    def let_overtaken_go(self, flow: _Flow, n: int, now: float) -> None:
        """Release the datagrams that waited for the n-th."""
        ready = [datagram for datagram in flow.waiting if datagram.overtaken_at <= n]
        for datagram in ready:
            flow.waiting.remove(datagram)
            flow.tally.reordered += 1
            if datagram.due > now:
                self._plan(datagram, datagram.due)
            else:
                datagram.date = 0
                self._let_go(datagram)

    def _plan(self, datagram: _Datagram, due: float) -> None:
        datagram.date = next(self._numbers)
        heapq.heappush(self._dates, (due, datagram.date, datagram))
        if self._dates[0][2] is datagram:
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
            _, date, datagram = heapq.heappop(self._dates)
            if date != datagram.date:
                continue
            if datagram in datagram.flow.waiting:  # no datagram overtook it
                datagram.flow.waiting.remove(datagram)
            self._let_go(datagram)
        self._arm()

    def _let_go(self, datagram: _Datagram) -> None:
        """Send a held datagram, unless its client is gone."""
        if datagram.flow.is_closed:
            self._discard(datagram)
        elif _send(datagram):
            self._release(datagram)
        else:
            self._plan(datagram, self._loop.time() + _AGAIN)

    def _release(self, datagram: _Datagram) -> None:
        self._held_bytes -= len(datagram.data) + _OVERHEAD
        datagram.flow.held -= 1
        datagram.flow.tally.held -= 1

    def _discard(self, datagram: _Datagram) -> None:
        self._release(datagram)
        datagram.flow.tally.discarded += 1


def _send(datagram: _Datagram) -> bool:
    """Send a datagram and its duplicates; False: the kernel's buffer is full."""
    flow = datagram.flow
    try:
        _send_through(flow, datagram.data)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("%s: %s", flow.direction, error.strerror)
        flow.tally.failed += 1
        return True
    flow.tally.passed += 1
    flow.tally.passed_bytes += len(datagram.data)
    for _ in range(datagram.copies):
        with contextlib.suppress(OSError):  # a missing duplicate is no loss
            flow.send(datagram.data)
            flow.tally.duplicated += 1
    return True


def _send_through(flow: _Flow, data: bytes) -> None:
    try:
        flow.send(data)
    except ConnectionRefusedError:
        flow.send(data)  # the reply to an earlier one; this one was not sent


class _Client:
    """A client's address, and its socket to the target."""

    def __init__(
        self, address: tuple[Any, ...], sock: socket.socket, up: _Flow, down: _Flow
    ) -> None:
        self.address = address
        self.socket = sock
        self.up = up
        self.down = down
        self.born = self.last = 0.0
        self.cut_timer: asyncio.TimerHandle | None = None


class DatagramRouter:
    """Forwards datagrams between clients and a target. Runs in one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        target: Place,
        *,
        faults: Faults,
        seed: int,
        max_clients: int,
        idle: float,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._target = target
        self._faults = faults
        self._seed = seed
        self._max_clients = max_clients
        self._idle = idle
        self._books = Counters("datagrams")
        self._clients: dict[tuple[Any, ...], _Client] = {}
        #: Datagrams dropped by the kernel at sockets that are closed now.
        self._overflowed_before = 0
        self._schedule = _Schedule(loop)
        self._sweep: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._has_warned = False

    # --- what the router's owner asks for ----------------------------------------------------

    def start(self) -> None:
        self._loop.add_reader(self._listener, self._from_clients)
        self._sweep = self._loop.call_later(self._idle / 4, self._expire)

    def set(self, faults: Faults) -> None:
        self._faults = faults
        for client in self._clients.values():
            self._arm_cut(client)

    def pause(self) -> None:
        """Read nothing and send nothing; the kernel's buffers hold what they can."""
        self._is_paused = True
        self._schedule.pause()
        for one in self._sockets():
            self._loop.remove_reader(one)

    def resume(self) -> None:
        self._is_paused = False
        self._loop.add_reader(self._listener, self._from_clients)
        for client in self._clients.values():
            self._loop.add_reader(client.socket, self._from_target, client)
        self._schedule.resume()

    async def cut_all(self) -> int:
        """Forget all clients, like a restarted router: they get new ports."""
        clients = list(self._clients.values())
        for client in clients:
            self._cut(client)
        return len(clients)

    def snapshot(self) -> Counters:
        books = copy.deepcopy(self._books)
        books.clients.active = len(self._clients)
        books.up.overflowed = kernel_drops(self._listener)
        books.down.overflowed = self._overflowed_before + sum(
            kernel_drops(client.socket) for client in self._clients.values()
        )
        for one in (books.up, books.down):
            one.arrived += one.overflowed
        return books

    async def close(self) -> Counters:
        """Close, and return the final counters."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._loop.remove_reader(self._listener)
        for client in list(self._clients.values()):
            self._forget(client)
            self._books.clients.ended += 1
        self._schedule.close()
        drain(self._listener, self._books.up)
        last = self.snapshot()
        self._listener.close()
        return last

    # --- clients -----------------------------------------------------------------

    def _admit(self, address: tuple[Any, ...]) -> _Client | None:
        if len(self._clients) >= self._max_clients:
            return None
        try:
            sock = udp_socket(self._target.family)
            with contextlib.ExitStack() as undo:
                undo.callback(sock.close)
                sock.connect(self._target.address)
                undo.pop_all()
        except OSError as error:  # too many open files, or no route to the target
            # Reached by each datagram of a refused client.
            level = logging.DEBUG if self._has_warned else logging.WARNING
            log.log(level, "no socket for another client: %s", error.strerror)
            self._has_warned = True
            return None
        index = self._books.clients.seen
        self._books.clients.seen += 1
        listener = self._listener
        client = _Client(
            address,
            sock,
            _Flow("up", Dice(self._seed, index, "up"), self._books.up, sock.send),
            _Flow(
                "down",
                Dice(self._seed, index, "down"),
                self._books.down,
                lambda data: listener.sendto(data, address),
            ),
        )
        client.born = client.last = self._loop.time()
        self._clients[address] = client
        self._loop.add_reader(sock, self._from_target, client)
        self._arm_cut(client)
        return client

    def _arm_cut(self, client: _Client) -> None:
        if client.cut_timer is not None:
            client.cut_timer.cancel()
            client.cut_timer = None
        if (every := self._faults.cut_every) is not None:
            client.cut_timer = self._loop.call_at(client.born + every, self._cut, client)

    def _cut(self, client: _Client) -> None:
        self._forget(client)
        self._books.clients.cut += 1

    def _forget(self, client: _Client) -> None:
        del self._clients[client.address]
        if client.cut_timer is not None:
            client.cut_timer.cancel()
        self._loop.remove_reader(client.socket)
        drain(client.socket, self._books.down)
        self._overflowed_before += kernel_drops(client.socket)
        client.socket.close()
        for flow in (client.up, client.down):
            flow.is_closed = True

    def _expire(self) -> None:
        now = self._loop.time()
        for client in list(self._clients.values()):
            is_quiet = now - client.last > self._idle and not (client.up.held or client.down.held)
            if is_quiet and not self._is_paused:
                self._forget(client)
                self._books.clients.expired += 1
        self._sweep = self._loop.call_later(self._idle / 4, self._expire)

    def _sockets(self) -> Iterable[socket.socket]:
        yield self._listener
        for client in self._clients.values():
            yield client.socket

    # --- datagrams -----------------------------------------------------------------

    def _from_clients(self) -> None:
        now = self._loop.time()
        for _ in range(_TURN):
            try:
                data, address = self._listener.recvfrom(LARGEST_DATAGRAM)
            except BlockingIOError:
                return
            client = self._clients.get(address) or self._admit(address)
            if client is None:
                tally = self._books.up
                tally.arrived += 1
                tally.arrived_bytes += len(data)
                tally.refused += 1
                continue
            client.last = now
            self._take(client.up, data, now)

    def _from_target(self, client: _Client) -> None:
        client.last = now = self._loop.time()
        for _ in range(_TURN):
            try:
                data = client.socket.recv(LARGEST_DATAGRAM)
            except BlockingIOError:
                return
            except OSError as error:  # the ICMP reply to an earlier datagram
                log.debug("target: %s", error.strerror)
                continue
            self._take(client.down, data, now)

    def _take(self, flow: _Flow, data: bytes, now: float) -> None:
        tally = flow.tally
        tally.arrived += 1
        tally.arrived_bytes += len(data)
        n = flow.n
        flow.n += 1
        faults = self._faults if self._faults.affects(flow.direction) else NO_FAULTS
        fate = datagram_fate(flow.dice, n, faults)
        if fate.is_dropped:
            tally.dropped += 1
        else:
            if fate.garble and data:
                data = garbled(data, fate.garble)
                tally.garbled += 1
            due = now
            if faults.rate is not None:
                due = flow.free_at = max(flow.free_at, now) + len(data) / faults.rate
            due += fate.delay
            datagram = _Datagram(flow, data, int(fate.is_duplicated), due)
            if fate.overtaken_by:
                self._schedule.hold(datagram, now, overtaken_at=n + fate.overtaken_by)
            elif due > now or not _send(datagram):
                self._schedule.hold(datagram, now)
        if flow.waiting:
            self._schedule.let_overtaken_go(flow, n, now)
