"""How do TCP connections pass, and how are they cut, silenced and refused?"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.core.retry import Scarcity
from penstock.relay.faults.counters import Counters
from penstock.relay.faults.decisions import Dice, stream_pieces
from penstock.relay.faults.model import NO_FAULTS
from penstock.relay.faults.sockets import close, tcp_socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.model import Cut, Direction, Faults
    from penstock.relay.faults.sockets import Place

__all__ = ["ConnectionRouter"]

log = logging.getLogger(__name__)

_READ: Final = 64 << 10
#: The most bytes in transit in one direction of a connection; then its sender waits.
_MOST_HELD: Final = 4 << 20
_BACKLOG: Final = 1024
#: Connections accepted before other events are handled.
_TURN: Final = 64
#: Timeout (seconds) of a connection to the target.
_CONNECTING: Final = 10.0
#: Time (seconds) for a peer to close its side after an orderly cut.
_FAREWELL: Final = 1.0


class _CutOff(Exception):
    """The limit of forwarded bytes is reached."""


class _Line:
    """One direction of a connection: a reading and a writing half."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        direction: Direction,
        dice: Dice,
        tally: DirectionCounters,
        source: socket.socket,
        sink: socket.socket,
        *,
        faults: Callable[[], Faults],
        silence: Callable[[], None],
    ) -> None:
        self.direction = direction
        #: Open while bytes, ends and errors are forwarded.
        self.gate = asyncio.Event()
        #: Bytes read and neither forwarded nor otherwise counted.
        self.held = 0
        self._loop = loop
        self._dice = dice
        self._tally = tally
        self.source = source
        self._sink = sink
        self._faults = faults
        self._silence = silence
        self._offset = 0
        self._passed = 0
        #: When the rate allows the next bytes, and when the last bytes are due.
        self._free_at = self._last_due = 0.0
        #: (due, bytes); no bytes mean the end of the stream.
        self._queue: deque[tuple[float, bytes]] = deque()
        self._is_writing = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    def end(self) -> None:
        """Count the bytes in transit as discarded."""
        self._tally.discarded += self.held
        self.held = 0

    def discard(self, size: int) -> None:
        """Count bytes that arrived after the end as discarded."""
        self._tally.arrived += size
        self._tally.discarded += size

    # --- the half that reads -----------------------------------------------------------------

    async def read(self) -> None:
        """Read bytes from the source until it ends.

        :raises OSError: the connection broke
        :raises _CutOff: the limit of forwarded bytes is reached
        """
        while data := await self._receive():
            self._tally.arrived += len(data)
            self.held += len(data)
            await self._take(data)
        self._put(self._last_due, b"")

    async def _receive(self) -> bytes:
        await self.gate.wait()
        try:
            return await self._loop.sock_recv(self.source, _READ)
        except OSError:
            await self.gate.wait()  # a silent connection hides that its other side is gone
            raise

    async def _take(self, data: bytes) -> None:
        faults = self._faults() if self._faults().affects(self.direction) else NO_FAULTS
        fate = stream_pieces(self._dice, self._offset, data, faults)
        self._offset += len(data)
        self._tally.dropped += fate.dropped
        self._tally.garbled += fate.garbled
        self.held -= fate.dropped
        now = self._loop.time()
        for piece in fate.pieces:
            due = now
            if faults.rate is not None:
                due = self._free_at = max(self._free_at, now) + len(piece) / faults.rate
            due += fate.delay
            if due > now:
                self._tally.delayed += len(piece)
            if due <= now and not self._queue and not self._is_writing:
                await self._pass(piece)  # the short way, without waking the other half
            else:
                self._put(due, piece)
        while self.held > _MOST_HELD:
            self._room.clear()
            await self._room.wait()

    def _put(self, due: float, piece: bytes) -> None:
        self._last_due = max(self._last_due, due)  # a stream keeps its order
        self._queue.append((self._last_due, piece))
        self._news.set()

    # --- the half that writes -----------------------------------------------------------------

    async def write(self) -> None:
        """Forward the bytes that are due, and then the end of the stream.

        :raises OSError: the connection broke
        :raises _CutOff: the limit of forwarded bytes is reached
        """
        while True:
            while not self._queue:
                self._news.clear()
                await self._news.wait()
            due, piece = self._queue[0]
            if (wait := due - self._loop.time()) > 0:
                await asyncio.sleep(wait)
            self._queue.popleft()
            if not piece:
                await self.gate.wait()
                self._sink.shutdown(socket.SHUT_WR)
                return
            self._is_writing = True
            try:
                await self._pass(piece)
            finally:
                self._is_writing = False
            self._room.set()

    async def _pass(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            await self.gate.wait()
            left = self._left_before_cut()
            if left == 0:
                if not self._faults().half_open:
                    raise _CutOff
                self._silence()
                continue
            try:
                sent = self._sink.send(rest if left is None else rest[:left])
            except BlockingIOError:
                await self._until_writable()
                continue
            except OSError:
                await self.gate.wait()
                self._tally.failed += self.held
                self.held = 0
                raise
            rest = rest[sent:]
            self.held -= sent
            self._passed += sent
            self._tally.passed += sent
        if self._left_before_cut() == 0 and not self._faults().half_open:
            raise _CutOff

    def _left_before_cut(self) -> int | None:
        faults = self._faults()
        if faults.cut_after is None or not faults.affects(self.direction):
            return None
        return max(faults.cut_after - self._passed, 0)

    async def _until_writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._sink, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._sink)


class _Connection:
    """A client's connection, and the router's to the target."""

    def __init__(self, index: int, client: socket.socket) -> None:
        self.index = index
        self.client = client
        self.target: socket.socket | None = None
        self.lines: tuple[_Line, ...] = ()
        self.task: asyncio.Task[None] | None = None
        self.born = 0.0
        self.cut_timer: asyncio.TimerHandle | None = None
        #: How to cut it; None: it is not cut.
        self.cut: Cut | None = None
        #: Whether the target could be reached; True while unknown.
        self.is_reached = True
        #: Whether it ended orderly.
        self.has_ended = False
        #: Half open for good, instead of being cut.
        self.is_silenced = False


class ConnectionRouter:
    """Forwards connections to a target. Runs in one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        target: Place,
        *,
        faults: Faults,
        seed: int,
        max_clients: int,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._address = listener.getsockname()
        self._target = target
        self._faults = faults
        self._seed = seed
        self._max_clients = max_clients
        self._books = Counters("bytes")
        self._connections: dict[int, _Connection] = {}
        #: Connections with an orderly cut, not closed yet.
        self._farewells: set[asyncio.Task[None]] = set()
        self._is_listening = False
        self._is_paused = False
        self._is_closed = False
        self._scarcity = Scarcity("taking another connection", log)

    # --- what the router's owner asks for ----------------------------------------------------

    def start(self) -> None:
        self._listen_or_refuse()

    def set(self, faults: Faults) -> None:
        self._faults = faults
        self._listen_or_refuse()
        for connection in self._connections.values():
            self._arm_cut(connection)
        self._open_gates()

    def pause(self) -> None:
        """Forward nothing: TCP flow control makes the senders wait."""
        self._is_paused = True
        self._open_gates()

    def resume(self) -> None:
        self._is_paused = False
        self._open_gates()

    async def cut_all(self) -> int:
        """Cut all connections, as the faults specify."""
        connections = list(self._connections.values())
        for connection in connections:
            self._cut(connection)
        await _ended(connections)
        return len(connections)

    def snapshot(self) -> Counters:
        books = copy.deepcopy(self._books)
        books.clients.active = len(self._connections)
        for connection in self._connections.values():
            for line in connection.lines:
                books.of(line.direction).held += line.held
        for one in (books.up, books.down):
            one.arrived_bytes, one.passed_bytes = one.arrived, one.passed
        return books

    async def close(self) -> Counters:
        """Close, and return the final counters."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        connections = list(self._connections.values())
        for connection in connections:
            if connection.task is not None:
                connection.task.cancel()
        await _ended(connections)
        farewells = list(self._farewells)
        for task in farewells:
            task.cancel()
        await asyncio.gather(*farewells, return_exceptions=True)
        return self.snapshot()

    # --- connections -----------------------------------------------------------------

    def _listen_or_refuse(self) -> None:
        should_listen = self._faults.refuse < 1
        if should_listen and not self._is_listening:
            self._listener.listen(_BACKLOG)
            self._loop.add_reader(self._listener, self._accept)
        elif self._is_listening and not should_listen:
            # The kernel refuses connections to a port that is bound but not listening.
            self._loop.remove_reader(self._listener)
            family = self._listener.family
            self._listener.close()
            self._listener = tcp_socket(family, self._address)
        self._is_listening = should_listen

    def _accept(self) -> None:
        for _ in range(_TURN):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files: the listener stays readable, so pause
                self._loop.remove_reader(self._listener)
                self._loop.call_later(self._scarcity.wait_after(error), self._accept_again)
                return
            self._scarcity.note_success()
            self._admit(client)

    def _accept_again(self) -> None:
        if self._is_listening and not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, client: socket.socket) -> None:
        client.setblocking(False)
        index = self._books.clients.seen
        self._books.clients.seen += 1
        is_full = len(self._connections) >= self._max_clients and not self._make_room()
        if is_full or Dice(self._seed, index, "refuse").refuses(self._faults.refuse):
            self._books.clients.refused += 1
            close(client, "rst")
            return
        connection = _Connection(index, client)
        connection.born = self._loop.time()
        self._connections[index] = connection
        self._arm_cut(connection)
        connection.task = self._loop.create_task(self._serve(connection))
        # Not by the task itself, which never runs if it is cancelled before its first step.
        connection.task.add_done_callback(lambda _: self._forget(connection))

    def _make_room(self) -> bool:
        """Cut the oldest silenced connection, whose client may have left long ago."""
        for connection in self._connections.values():
            if connection.is_silenced and connection.cut is None:
                self._cut(connection)
                return True
        return False

    async def _serve(self, connection: _Connection) -> None:
        try:
            connection.is_reached = await self._reach_target(connection)
            if connection.is_reached:
                async with asyncio.TaskGroup() as tasks:
                    for line in connection.lines:
                        tasks.create_task(line.read())
                        tasks.create_task(line.write())
                connection.has_ended = True
        except* _CutOff:
            connection.cut = self._faults.cut
        except* OSError as errors:
            log.debug("connection %d: %s", connection.index, errors.exceptions[0])
        except* asyncio.CancelledError:
            # By the router: a cut, or its `close`, which is an orderly end if nothing is lost.
            connection.has_ended = not any(line.held for line in connection.lines)

    async def _reach_target(self, connection: _Connection) -> bool:
        try:
            target = connection.target = socket.socket(self._target.family, socket.SOCK_STREAM)
            target.setblocking(False)
            async with asyncio.timeout(_CONNECTING):
                await self._loop.sock_connect(target, self._target.address)
        except OSError as error:
            log.debug("the target %s cannot be reached: %s", self._target, error)
            return False
        for one in (connection.client, target):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.lines = (
            self._line(connection, "up", connection.client, target),
            self._line(connection, "down", target, connection.client),
        )
        self._open_gates(connection)
        return True

    def _line(
        self,
        connection: _Connection,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
    ) -> _Line:
        return _Line(
            self._loop,
            direction,
            Dice(self._seed, connection.index, direction),
            self._books.of(direction),
            source,
            sink,
            faults=lambda: self._faults,
            silence=lambda: self._silence(connection),
        )

    def _forget(self, connection: _Connection) -> None:
        books = self._books.clients
        if connection.cut is not None:
            books.cut += 1
        elif connection.is_reached:
            books.ended += 1
        else:
            books.unreachable += 1
        del self._connections[connection.index]
        if connection.cut_timer is not None:
            connection.cut_timer.cancel()
        for line in connection.lines:
            line.end()
        if connection.cut == "fin" and connection.lines and not self._is_closed:
            for line in connection.lines:
                self._part_in_good_order(line)
            return
        how: Cut = connection.cut or ("fin" if connection.has_ended else "rst")
        for one in (connection.client, connection.target):
            if one is not None:
                close(one, how)

    def _part_in_good_order(self, line: _Line) -> None:
        task = self._loop.create_task(self._read_to_the_end(line))
        self._farewells.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._farewells.discard(task)
            line.source.close()

        task.add_done_callback(end)
        with contextlib.suppress(OSError):  # the peer may have been faster
            line.source.shutdown(socket.SHUT_WR)

    async def _read_to_the_end(self, line: _Line) -> None:
        """Read the remaining data: closing with unread data would reset the connection."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_FAREWELL):
                while data := await self._loop.sock_recv(line.source, _READ):
                    line.discard(len(data))

    # --- cutting and silence -----------------------------------------------------------------

    def _arm_cut(self, connection: _Connection) -> None:
        if connection.cut_timer is not None:
            connection.cut_timer.cancel()
            connection.cut_timer = None
        if (every := self._faults.cut_every) is not None:
            connection.cut_timer = self._loop.call_at(
                connection.born + every, self._cut_or_silence, connection
            )

    def _cut_or_silence(self, connection: _Connection) -> None:
        if self._faults.half_open:
            self._silence(connection)
        else:
            self._cut(connection)

    def _cut(self, connection: _Connection) -> None:
        connection.cut = self._faults.cut
        if connection.task is not None:
            connection.task.cancel()

    def _silence(self, connection: _Connection) -> None:
        if not connection.is_silenced:
            connection.is_silenced = True
            self._books.clients.silenced += 1
            self._open_gates(connection)

    def _open_gates(self, *connections: _Connection) -> None:
        """Open or shut the gates of the given connections, or of all."""
        for connection in connections or self._connections.values():
            is_silent = connection.is_silenced or self._faults.is_silent_from_the_start
            for line in connection.lines:
                is_shut = self._is_paused or (is_silent and self._faults.affects(line.direction))
                (line.gate.clear if is_shut else line.gate.set)()


async def _ended(connections: list[_Connection]) -> None:
    tasks = [connection.task for connection in connections if connection.task is not None]
    await asyncio.gather(*tasks, return_exceptions=True)
