"""How are the bytes of one direction of a TCP connection forwarded?"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.relay.faults.decisions import stream_pieces
from penstock.relay.faults.model import NO_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.decisions import Dice
    from penstock.relay.faults.model import Direction, Faults

__all__ = ["CutOff", "Line"]

_READ: Final = 64 << 10
#: The most bytes in transit in one direction of a connection; then its sender waits.
_MOST_HELD: Final = 4 << 20


class CutOff(Exception):
    """The limit of forwarded bytes is reached."""


class Line:
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
        :raises CutOff: the limit of forwarded bytes is reached
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
        :raises CutOff: the limit of forwarded bytes is reached
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
                    raise CutOff
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
            raise CutOff

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
