"""How do psi processes find each other? (docs/specs/psi.md 10)

A server has the list of processes, and sends every change to all clients, its author included. A
client keeps its own processes on that list through broken connections.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from penstock.core.errors import Closed, ConnectionLost, Malformed, NotFound, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.overflow import BoundedBuffer, OverflowPolicy, QueueFull
from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from penstock.protocols.connection import Connection, hang_up, tune
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.psi.rendezvous_wire import (
    RENDEZVOUS_PORT,
    AddProcess,
    Disconnect,
    Process,
    RemoveProcess,
    RendezvousClientDecoder,
    RendezvousHello,
    RendezvousServerDecoder,
    Update,
    encode_client_hello,
    encode_hello,
    encode_update,
)
from penstock.protocols.server import End, Limits, Server, Session, listen_tcp

__all__ = ["RendezvousClient", "RendezvousServer"]

log = logging.getLogger(__name__)

_RECEIVED_AT_ONCE: Final = 65536
_LOOK: Final = 0.1
#: Seconds without progress after which a client is disconnected.
_STALLED: Final = 10.0
#: Updates queued for a client, at most.
_WAITING: Final = 10_000
_SENT_AT_ONCE: Final = 64
#: Bytes queued for a client, at most; beyond it the client is disconnected.
_WAITING_BYTES: Final = 64 << 20
#: Processes on the list, and bytes of all of them, at most.
_MOST_PROCESSES: Final = 10_000
_MOST_BYTES: Final = 16 << 20


class RendezvousServer(Closable):
    """Serves the list of processes. As in psi, processes of a client that has left stay."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = RENDEZVOUS_PORT,
        *,
        max_clients: int = 256,
        max_bytes: int = _MOST_BYTES,
        forget_who_left: bool = False,
    ) -> None:
        """Listen; `forget_who_left`: remove a client's processes when it leaves.

        `max_bytes`: limit of all processes in memory. A process beyond it is refused, logged and
        counted in `refused`; the protocol has no answer for that.

        :raises StorageError: the address is not available.
        """
        self.processes: dict[str, Process] = {}
        #: Processes beyond the limits.
        self.refused = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        #: The hello for clients of an address, as long as the list does not change.
        self._hello: tuple[str, bytes] | None = None
        self._clients: set[_Client] = set()
        self._lock = threading.RLock()
        self._is_closed = False
        limits = Limits(max_clients=max_clients, first_message=_STALLED, stalled=_STALLED)
        self._server = Server(
            "psi-rendezvous",
            listen_tcp(host, port),
            lambda connection: _RendezvousSession(connection, self, forget=forget_who_left),
            limits,
            log=log,
        ).start()
        self.port = self._server.port

    def add(self, process: Process) -> bool:
        """Add a process and tell all clients; False if the name is taken, or beyond the limits."""
        with self._lock:
            if process.name in self.processes:
                return False
            size = self._bytes + process.memory
            if len(self.processes) >= _MOST_PROCESSES or size > self._max_bytes:
                self.refused += 1
                log.warning(
                    "the process %.100r is refused: %s are there, of %s bytes",
                    process.name,
                    f"{len(self.processes):,}",
                    f"{self._bytes:,}",
                )
                return False
            self.processes[process.name] = process
            self._bytes = size
            self._hello = None
            self._tell(AddProcess(process))
            return True

    def remove(self, name: str) -> bool:
        """Remove a process and tell all clients; False if it is unknown."""
        with self._lock:
            process = self.processes.pop(name, None)
            if process is None:
                return False
            self._bytes -= process.memory
            self._hello = None
            self._tell(RemoveProcess(name))
            return True

    def _tell(self, update: Update) -> None:
        data = encode_update(update)
        for client in self._clients:
            client.send(data)

    def admit(self, connection: Connection) -> _Client:
        """Send a client the list, and each change from now on."""
        client = _Client(connection)
        # Under the lock: no change may be lost between the list and the first update.
        with self._lock:
            address = connection.peer.rpartition(":")[0]
            if self._hello is None or self._hello[0] != address:
                self._hello = address, encode_hello(address, list(self.processes.values()))
            client.send(self._hello[1])
            self._clients.add(client)
        return client

    def dismiss(self, client: _Client) -> None:
        """Remove a client that has left."""
        with self._lock:
            self._clients.discard(client)
        client.close()

    def close(self) -> None:
        """Send all clients a disconnect, and stop. Idempotent."""
        if self._is_closed:
            return
        with self._lock:
            self._is_closed = True
            self._tell(Disconnect())
            clients = list(self._clients)
        for client in clients:
            client.close()
        self._server.close()


class _RendezvousSession(Session):
    """Takes the updates of one client."""

    def __init__(self, connection: Connection, server: RendezvousServer, *, forget: bool) -> None:
        super().__init__(connection)
        self._server = server
        self._forget = forget
        self._decoder = RendezvousServerDecoder()
        self._client: _Client | None = None
        self._own: set[str] = set()

    def serve(self) -> bool:
        view = memoryview(bytearray(_RECEIVED_AT_ONCE))
        while count := self.connection.receive(view):
            for update in self._decoder.feed(bytes(view[:count])):
                self.connection.welcome()
                if isinstance(update, Disconnect):
                    return False
                if isinstance(update, RendezvousHello):
                    self._client = self._server.admit(self.connection)
                else:
                    self._take(update)
            if self._client is not None:
                if not self._decoder.held and not self.connection.is_readable():
                    return True
                if self.connection.until is None:
                    self.connection.expect(_STALLED)  # for the rest of what it says
        return False

    def _take(self, update: Update) -> None:
        match update:
            case AddProcess(process):
                if self._server.add(process):
                    self._own.add(process.name)
            case RemoveProcess(name):
                self._server.remove(name)
                self._own.discard(name)

    def close(self) -> None:
        if self._client is not None:
            self._server.dismiss(self._client)
        for name in self._own if self._forget else ():
            self._server.remove(name)


class _Client:
    """The queue of updates for a client, so that a slow one does not delay the others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: BoundedBuffer[bytes] = BoundedBuffer(_WAITING, OverflowPolicy.FAIL)
        self._bytes = 0
        self._lock = threading.Lock()
        self._worker = Worker("psi-rendezvous-send", self._run, log=log).start()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._bytes += len(data)
        try:
            if self._bytes > _WAITING_BYTES:
                self._connection.cut(End.BEHIND)
            else:
                self._waiting.put(data)
        except QueueFull:
            self._connection.cut(End.BEHIND)
        except Closed:
            return

    def _run(self, _: Worker) -> None:
        try:
            while True:
                # One by one: they are the same bytes for all clients.
                for data in self._waiting.get_many(_SENT_AT_ONCE):
                    self._connection.send(data)
                    with self._lock:
                        self._bytes -= len(data)
        except Closed:
            return
        except TimeoutError:
            self._connection.cut(End.TIMED_OUT)
        except OSError:
            self._connection.cut(End.LEFT)

    def close(self) -> None:
        self._waiting.close()
        self._worker.join(2)


class RendezvousClient(Closable):
    """Follows a server's list, and keeps its own processes on it through broken connections."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = RENDEZVOUS_PORT, *, longest_wait: float = 5.0
    ) -> None:
        self._server = (host, port)
        self._longest_wait = longest_wait
        #: The server's list.
        self.processes: dict[str, Process] = {}
        self._bytes = 0
        #: This machine's address, as the server sees it.
        self.address: str | None = None
        self.last_error: Exception | None = None
        self._own: dict[str, Process] = {}
        #: Processes that were removed, until the server tells that they are.
        self._removed: set[str] = set()
        #: Processes of the list that follows a hello, and did not come yet.
        self._listed = 0
        self._connection: socket.socket | None = None
        self._changed = threading.Condition()
        backoff = Backoff(initial=min(0.05, longest_wait), maximum=longest_wait)
        self._worker = Worker("psi-rendezvous", self._run, log=log, backoff=backoff).start()

    @property
    def connected(self) -> bool:
        return self.address is not None and self._connection is not None

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait for the server's list; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.connected, timeout)

    def add(self, process: Process) -> None:
        """Add a process, now or with the next connection."""
        with self._changed:
            self._own[process.name] = process
            self._removed.discard(process.name)
            self._send(AddProcess(process))

    def remove(self, name: str) -> None:
        """Remove a process, now or with the next connection."""
        with self._changed:
            self._own.pop(name, None)
            self._removed.add(name)
            self._send(RemoveProcess(name))

    def wait_for(self, name: str, timeout: float = 10.0) -> Process:
        """Wait for a process, and return it.

        :raises NotFound: it did not appear in time.
        :raises ConnectionLost: the server does not answer.
        """
        with self._changed:
            if self._changed.wait_for(lambda: name in self.processes, timeout):
                return self.processes[name]
            if self.address is None:
                where = ":".join(map(str, self._server))
                error = self.last_error
                raise ConnectionLost(
                    where,
                    "no answer" if error is None else why_unreachable(error, *self._server),
                    hint="is a rendezvous server running there? see host and port",
                )
            there = ", ".join(sorted(self.processes)[:8])
            raise NotFound(
                f"no process {name!r} came to the rendezvous",
                hint=f"there are: {there}" if there else "there is none yet",
            )

    def _send(self, update: Update) -> None:
        if self._connection is not None and self.address is not None:
            try:
                self._connection.sendall(encode_update(update))
            except OSError:
                hang_up(self._connection)  # it is sent again with the next connection

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            began = time.monotonic()
            try:
                self._connect(worker)
            except (OSError, PenstockError) as error:
                self.last_error = error
                log.info("the rendezvous at %s:%s: %s", *self._server, error)
            with self._changed:
                self._connection = None
            if time.monotonic() - began > self._longest_wait:
                worker.note_success()
            worker.back_off()

    def _connect(self, worker: Worker) -> None:
        connection = socket.create_connection(self._server, _STALLED)
        try:
            tune(connection)
            connection.sendall(encode_client_hello())
            decoder = RendezvousClientDecoder()
            connection.settimeout(_LOOK)
            while not worker.is_stopping:
                try:
                    data = connection.recv(_RECEIVED_AT_ONCE)
                except TimeoutError:
                    continue
                if not data:
                    return
                for update in decoder.feed(data):
                    if isinstance(update, Disconnect):
                        return
                    self._take(update, connection)
            with contextlib.suppress(OSError):
                connection.sendall(encode_update(Disconnect()))
        finally:
            hang_up(connection)

    def _take(self, update: RendezvousHello | Update, connection: socket.socket) -> None:
        with self._changed:
            match update:
                case RendezvousHello(address, count):
                    self.processes.clear()
                    self._bytes = 0
                    self._listed = count
                    self._connection, self.address = connection, address or ""
                    connection.settimeout(_STALLED)
                    for process in self._own.values():
                        self._send(AddProcess(process))
                    connection.settimeout(_LOOK)
                case AddProcess(process):
                    self._keep(process)
                    if self._listed and process.name in self._removed:
                        self._send(RemoveProcess(process.name))
                    self._listed -= bool(self._listed)
                case RemoveProcess(name):
                    gone = self.processes.pop(name, None)
                    self._bytes -= 0 if gone is None else gone.memory
                    self._removed.discard(name)
            if not self._listed:
                self._removed &= self.processes.keys()
            self._changed.notify_all()

    def _keep(self, process: Process) -> None:
        if process.name in self.processes:
            return
        size = self._bytes + process.memory
        if size > _MOST_BYTES:
            raise Malformed(
                "psi rendezvous", "processes", f"at most {_MOST_BYTES:,} bytes", f"{size:,}"
            )
        self._bytes = size
        self.processes[process.name] = process

    def close(self) -> None:
        """Disconnect. Its processes stay on the list unless they are removed first."""
        self._worker.stop(_STALLED)
