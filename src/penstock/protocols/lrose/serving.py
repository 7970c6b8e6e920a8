"""How does one process serve many of LROSE's clients?

What all servers share: listening, limits, books, a clean end. What a service does with a request is
its `Session`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.core.closing import Closable
from penstock.protocols.lrose.served_client import ServedClient
from penstock.protocols.lrose.sessions import (
    Answer,
    ServerStatistics,
    ServingOptions,
    Session,
)
from penstock.protocols.lrose.sku import keep_memory
from penstock.queue.storage import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "DsServer", "ServerStatistics", "ServerThread", "ServingOptions", "Session"]

#: Clients beyond the limit, at most, that are told so before they are cut off.
_MOST_DENIED: Final = 64


class DsServer:
    """A server of one service. All of it runs in one event loop."""

    def __init__(
        self,
        options: ServingOptions,
        new_session: Callable[[str], Session],
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = options
        #: Makes a session for a client, given its address for people.
        self.new_session = new_session
        self.counts = ServerStatistics()
        #: The time, for limits of time.
        self.now: Callable[[], float] = time.monotonic
        self.clients: set[ServedClient] = set()
        #: Bytes of requests that have not come to their end.
        self.held = 0
        #: Clients that have more replies to take than a socket holds; others have hardly any.
        self.behind: set[ServedClient] = set()
        #: Set when a client that may do so asks for the end.
        self.stop_requested = asyncio.Event()
        self._denied: set[ServedClient] = set()
        self._on_close = on_close
        self._server: asyncio.Server | None = None
        self._sweeper: threading.Thread | None = None
        self._has_stopped = threading.Event()

    async def start(self) -> None:
        """Listen.

        :raises StorageError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        options = self.options
        keep_memory()
        try:
            self._server = await loop.create_server(
                lambda: ServedClient(self), options.host.strip("[]"), options.port, backlog=1024
            )
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise storage_error("listening on", where, error) from error
        self._sweeper = threading.Thread(
            target=self._call_sweep, args=(loop,), name="lrose limits", daemon=True
        )
        self._sweeper.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    @property
    def address(self) -> str:
        """`host:port`, for people."""
        host = self.options.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def client_count(self) -> int:
        return len(self.clients)

    def admit(self, client: ServedClient) -> None:
        """Take a client in, or mark it as one too many."""
        if len(self.clients) < self.options.max_clients:
            self.counts.clients_seen += 1
            self.clients.add(client)
            return
        self.counts.clients_denied += 1
        client.is_denied = True
        self._denied.add(client)
        if len(self._denied) > _MOST_DENIED:
            client.hang_up()

    def release(self, client: ServedClient) -> None:
        """Forget a client that has left."""
        self.clients.discard(client)
        self._denied.discard(client)
        self.behind.discard(client)

    def limit_unsent(self) -> None:
        """Cut off those who have most replies to take, until the rest is few enough."""
        sizes = {client: client.unsent for client in self.behind}
        total = sum(sizes.values())
        while total > self.options.max_unsent:
            client = max(sizes, key=sizes.__getitem__)
            total -= sizes.pop(client)
            client.cut_off(f"{total:,} bytes of replies are untaken beside its own")
            self.counts.clients_behind += 1

    def _call_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop look at its clients now and then.

        From a thread, because while the loop has a timer of its own, every request sets and unsets
        one of the system's, which costs as much as parsing it.
        """
        options = self.options
        pause = min(1.0, options.idle / 4, options.first_message / 4)
        while not self._has_stopped.wait(pause):
            try:
                loop.call_soon_threadsafe(self._sweep)
            except RuntimeError:
                return  # the loop was closed, and nobody closed us before

    def _sweep(self) -> None:
        now = self.now()
        for client in [*self.clients, *self._denied]:
            client.look(now)
        self.limit_unsent()

    def statistics(self) -> ServerStatistics:
        return replace(self.counts, clients=len(self.clients))

    async def close(self) -> None:
        """Stop: no more clients, and none that are there. Closing twice is fine."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        self._has_stopped.set()
        assert self._sweeper is not None
        self._sweeper.join()
        for client in [*self.clients, *self._denied]:
            await client.leave()
        await asyncio.sleep(0)  # connections end in the next round of the loop
        await server.wait_closed()
        self._on_close()


class ServerThread(Closable):
    """A server in a thread of its own, for a program that has no event loop."""

    def __init__(self, make: Callable[[], DsServer]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lrose", daemon=True)
        self._thread.start()
        self._is_closed = False
        try:
            self.server = asyncio.run_coroutine_threadsafe(self._start(make), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        self.port = self.server.port
        self.address = self.server.address

    @staticmethod
    async def _start(make: Callable[[], DsServer]) -> DsServer:
        server = make()
        await server.start()
        return server

    def statistics(self) -> ServerStatistics:
        return self.server.statistics()

    def close(self) -> None:
        """Stop the server and its thread. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result()
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
