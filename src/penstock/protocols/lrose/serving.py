"""How does one process serve many of LROSE's clients?

What all servers share: listening, limits, books, a clean end. What a service does with a request is
its `Session`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
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

log = logging.getLogger(__name__)

#: Clients beyond the limit, at most, that are told so before they are cut off.
_MOST_DENIED: Final = 64
#: Connections that the system keeps for us, and those taken before clients have their turn.
_BACKLOG: Final = 1024
_TAKEN_AT_ONCE: Final = 64
#: Without a descriptor for one more connection, another try is made so much later (seconds).
_WITHOUT_DESCRIPTOR: Final = 0.25
#: Trouble of the same kind is said again after so many seconds.
_SAID_AGAIN: Final = 60.0


class _Listener:
    """Accepts connections; while the system has none to give, it waits, and says so once.

    asyncio's own server tries as often as its backlog is long, each time with a traceback.
    """

    def __init__(
        self, listening: socket.socket, new_client: Callable[[], ServedClient], where: str
    ) -> None:
        self._socket = listening
        self._new_client = new_client
        self._where = where
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        self._failed_since: float | None = None
        self._said = -math.inf
        self._listen()

    def _listen(self) -> None:
        self._waiting = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._go_on()
                return
            except OSError as error:
                self._wait(error)
                return
            connection.setblocking(False)
            arriving = self._loop.create_task(
                self._loop.connect_accepted_socket(self._new_client, connection)
            )
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[object]) -> None:
        self._arriving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: a connection failed: %s", self._where, error)

    def _wait(self, error: OSError) -> None:
        now = time.monotonic()
        if self._failed_since is None and now - self._said > _SAID_AGAIN:
            self._failed_since = self._said = now
            log.warning(
                "%s takes no more clients for now: %s; those who come wait (raise the limit of "
                "open files with ulimit -n, or allow fewer clients)",
                self._where,
                error.strerror or error,
            )
        self._loop.remove_reader(self._socket)
        self._waiting = self._loop.call_later(_WITHOUT_DESCRIPTOR, self._listen)

    def _go_on(self) -> None:
        """Nobody waits any more."""
        if self._failed_since is not None:
            seconds = time.monotonic() - self._failed_since
            self._failed_since = None
            log.warning("%s takes clients again, after %.1f s", self._where, seconds)

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._arriving:
            await asyncio.wait(self._arriving)


def _listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host; a port of 0 is the same, free one at each of them.

    :raises OSError: one of them cannot be had.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                one = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # the machine has no such addresses
                continue
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = port or one.getsockname()[1]
            one.listen(_BACKLOG)
            one.setblocking(False)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    if not sockets:
        raise OSError(f"{host} has no address that can be listened on")
    return sockets


class DsServer:
    """A server of one service. All of it runs in one event loop."""

    def __init__(
        self,
        options: ServingOptions,
        new_session: Callable[[str], Session],
        *,
        grants: str = "read and write",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a server that is to be started.

        :param grants: what anybody who can reach it can do, for a warning.
        """
        self.options = options
        self._grants = grants
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
        self._sockets: list[socket.socket] = []
        self._listeners: list[_Listener] = []
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
            self._sockets = _listening_sockets(options.host.strip("[]"), options.port)
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise storage_error("listening on", where, error) from error
        self._warn_if_open()
        self._listeners = [
            _Listener(each, lambda: ServedClient(self), self.address) for each in self._sockets
        ]
        self._sweeper = threading.Thread(
            target=self._call_sweep, args=(loop,), name="lrose limits", daemon=True
        )
        self._sweeper.start()

    def _warn_if_open(self) -> None:
        """Say that other machines are let in: the protocol has no passwords."""
        addresses = [str(each.getsockname()[0]).partition("%")[0] for each in self._sockets]
        if not all(ipaddress.ip_address(each).is_loopback for each in addresses):
            log.warning(
                "%s is open to other machines: anybody who can reach it can %s, "
                "because the protocol has no passwords; a firewall can say who",
                self.address,
                self._grants,
            )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        number: int = self._sockets[0].getsockname()[1]
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
        if not self._listeners:
            return
        listeners, self._listeners = self._listeners, []
        for each in listeners:
            await each.close()
        self._has_stopped.set()
        assert self._sweeper is not None
        self._sweeper.join()
        for client in [*self.clients, *self._denied]:
            await client.leave()
        await asyncio.sleep(0)  # connections end in the next round of the loop
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
