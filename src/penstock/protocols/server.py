"""How does a process serve many clients, none of which can hold up another or bring it down?

One thread, the door, accepts connections and holds all idle ones: each costs a descriptor, and no
thread. When the first bytes of one arrive, its session serves it in a thread, and may return it to
the door when it is idle again. A protocol implements a session, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time
from collections import Counter, deque
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed, PenstockError, StorageError
from penstock.core.interfaces import Closable
from penstock.core.retry import Scarcity
from penstock.core.worker import Worker
from penstock.protocols.connection import Connection, peer_name
from penstock.protocols.host_port import check_port
from penstock.protocols.session import (
    REFUSALS,
    Conversation,
    End,
    Limits,
    Refused,
    ServerStatistics,
    Session,
)
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import logging
    import ssl
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "Conversation",
    "End",
    "Limits",
    "Refused",
    "Server",
    "ServerStatistics",
    "Session",
    "listen_tcp",
    "listen_unix",
]

#: The listen backlog, and the connections accepted before other events are handled.
_BACKLOG: Final = 1024
_TAKEN_AT_ONCE: Final = 64
#: Without a free descriptor, a connection that was silent for this long (seconds) is closed:
#: genuine clients send at once.
_QUICK: Final = 0.1
#: Descriptors then left for the needs of active clients.
_LEFT_FOR_OTHERS: Final = 8
#: How long (seconds) a client waits for a place of those that may turn out to be slow, and how
#: often it is tried.
_KNOCKING: Final = 0.25
_BETWEEN_KNOCKS: Final = 0.01
#: The most clients beyond the limit that are told so, and for how long (seconds).
_MOST_TURNED_AWAY: Final = 64
_TURNING_AWAY: Final = 5.0
#: Time (seconds) for cut-off sessions to end.
_LAST: Final = 2.0
_LISTEN_HINTS: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another port; port 0 takes any",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is always there",
    errno.EACCES: "choose another port: those below 1024 are the administrator's",
}


# --- listening ----------------------------------------------------------------------------------


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host; port 0 picks one free port for all of them.

    :raises StorageError: an address is in use or not available.
    """
    host = host.strip("[]")
    check_port(host, port)
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                one = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                continue  # the machine does not support this family
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = port or one.getsockname()[1]
            one.listen(_BACKLOG)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "it has no address")  # noqa: TRY301 - handled below
    except OSError as error:
        for each in sockets:
            each.close()
        hint = _LISTEN_HINTS.get(error.errno or 0, "check the host and the port to listen at")
        raise StorageError("listening on", f"{host}:{port}", error, hint=hint) from error
    return sockets


def listen_unix(path: Path) -> list[socket.socket]:
    """Listen at a path of any length, accessible to its owner only.

    :raises StorageError: the path is in use or not accessible.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with storage_errors("listening on", str(path)):
            # Before `bind`, so that other users never have access.
            os.fchmod(listener.fileno(), 0o600)
            # Through a short path: the limit for a socket is 107 bytes.
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return [listener]


# --- the server ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Client:
    """A connection and its state in the server."""

    connection: Connection
    #: When it was accepted.
    came: float
    #: When its next message must have arrived.
    deadline: float | None
    session: Session | None = None
    #: The thread that serves it now, or did last.
    worker: Worker | None = None
    #: Whether it exceeds the limit of clients, and is only told so.
    is_turned_away: bool = False
    #: When it first asked for a place among the clients, if there was none.
    knocked: float | None = None


class Server(Closable):
    """Serves all clients of its listening sockets, from `start` until `stop`."""

    def __init__(
        self,
        name: str,
        sockets: Sequence[socket.socket],
        new_session: Callable[[Connection], Session],
        limits: Limits,
        *,
        log: logging.Logger,
        turn_away: Callable[[Connection], Session] | None = None,
        tls: ssl.SSLContext | None = None,
        token: bytes | None = None,
        reset: bool = False,
        speaks_first: bool = False,
    ) -> None:
        """Take over the sockets.

        :param name: of its threads, and in its log
        :param turn_away: creates the session that tells a client that the server is full; without
            it, the connection is closed
        :param token: the token that `check_token` expects
        :param reset: close connections by a reset
        :param speaks_first: start sessions at once, because the server sends the first message
        """
        self.name = name
        self.limits = limits
        self.sockets = list(sockets)
        where = self.sockets[0].getsockname()
        #: The port that it listens on; 0 for a path.
        self.port: int = where[1] if isinstance(where, tuple) else 0
        self._new_session = new_session
        self._turn_away = turn_away
        self._log = log
        self._tls = tls
        self._token = token
        self._ends_by_reset = reset
        self._speaks_first = speaks_first
        self._lock = Lock()
        #: Clients that have sent data.
        self._clients: set[_Client] = set()
        self._turned_away: set[_Client] = set()
        #: Clients that have not, the oldest first. This and the next two are the door's alone.
        self._newcomers: dict[_Client, None] = {}
        #: Newcomers that have sent data while all places were taken; they are tried again soon.
        self._knocking: deque[_Client] = deque()
        self._quiet: set[_Client] = set()
        self._paused_until: float | None = None
        #: The current limit of newcomers.
        self._room = limits.max_newcomers
        #: Clients that became idle, on their way to the door.
        self._returned: deque[_Client] = deque()
        #: Threads that are about to end.
        self._leaving: deque[Worker] = deque()
        self._accepted = self._bytes_in = self._bytes_out = 0
        self._ends: Counter[End] = Counter()
        self._is_stopping = False
        self._is_shut = False
        self._has_cut = False
        idle = limits.idle or limits.first_message
        self._look_every = min(1.0, limits.first_message / 4, idle / 4)
        self._scarcity = Scarcity(f"{name}: accepting clients", log)
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: A reserve descriptor, to accept and inform one more client when none is left.
        self._spare: int | None = os.dup(self._bell)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for each in self.sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._door = Worker(name, self._run, log=log, restart=True, rouse=self._ring)

    def start(self) -> Server:
        """Start to accept clients."""
        self._door.start()
        return self

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self.limits.max_clients

    def check_token(self, said: bytes) -> None:
        """Check a client's token, if the server has one.

        :raises Refused: the token is wrong.
        """
        # In constant time: the duration must not reveal how much of the token is right.
        if self._token is not None and not hmac.compare_digest(said, self._token):
            raise Refused(End.TOKEN, "the token is wrong" if said else "a token is needed")

    def statistics(self) -> ServerStatistics:
        with self._lock:
            connections = [each.connection for each in self._clients | self._turned_away]
            ends = self._ends.copy()
            accepted = self._accepted
            open = len(self._clients) + len(self._newcomers) + len(self._knocking)
        return ServerStatistics(
            accepted,
            open,
            {reason: ends[reason] for reason in REFUSALS},
            {reason: ends[reason] for reason in End if reason not in REFUSALS},
            self._bytes_in + sum(each.bytes_in for each in connections),
            self._bytes_out + sum(each.bytes_out for each in connections),
            sum(each.unsent for each in connections if each.reason is None),
        )

    def stop(self, grace: float = 5.0) -> bool:
        """Accept no more clients, and end all sessions; False: some did not end.

        Requests in progress may take `grace` seconds, but no more are received; then they are cut.
        """
        with self._lock:
            self._is_stopping = True
        # A former call has used the grace.
        deadline = time.monotonic() + (0.0 if self._has_cut else grace)
        self._door.stop()
        self._shut()  # if it was never started
        with self._lock:
            served = [each for each in self._clients | self._turned_away if each.worker is not None]
            workers = [*self._leaving, *(each.worker for each in served if each.worker is not None)]
        for each in served:
            each.connection.hear_no_more()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for each in served:
            each.connection.cut(End.STOPPED)
        self._has_cut = True
        deadline = time.monotonic() + _LAST
        return all(worker.join(max(0.0, deadline - time.monotonic())) for worker in workers)

    def close(self) -> None:
        """Stop. Idempotent."""
        self.stop()

    # --- the door -----------------------------------------------------------------------------

    def _ring(self) -> None:
        with self._lock:
            if self._bell >= 0:  # else it was closed with the door
                os.eventfd_write(self._bell, 1)

    def _run(self, worker: Worker) -> None:
        look_at = 0.0
        while not worker.is_stopping:
            for key, _ in self._selector.select(self._patience(look_at)):
                if isinstance(key.data, _Client):
                    self._go_on_with(key.data)
                elif key.fd == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type] # a socket
            worker.note_success()
            while self._returned:
                self._hold(self._returned.popleft(), self.limits.idle)
            while self._leaving and not self._leaving[0].is_alive:
                self._leaving.popleft()
            for _ in range(len(self._knocking)):
                client = self._knocking.popleft()
                self._newcomers[client] = None
                self._begin(client)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + self._look_every
                self._end_silent(now)
                self._keep_spare()
            if self._paused_until is not None and now >= self._paused_until:
                self._listen_again()
        self._shut()

    def _patience(self, look_at: float) -> float:
        now = time.monotonic()
        until = look_at if self._paused_until is None else min(look_at, self._paused_until)
        if self._knocking:
            until = min(until, now + _BETWEEN_KNOCKS)
        return max(0.0, until - now)

    def _accept(self, listener: socket.socket) -> None:
        if self._paused_until is not None:
            return  # another of the sockets has paused them all
        for _ in range(_TAKEN_AT_ONCE):
            while len(self._newcomers) >= self._room:
                if not self._crowd_out(_QUICK):
                    self._pause(_QUICK)
                    return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                wait = self._scarcity.wait_after(error)
                self._room = max(1, min(self._room, len(self._newcomers) - _LEFT_FOR_OTHERS))
                if not self._crowd_out(_QUICK) and not self._give_spare():
                    self._pause(wait)
                    return
            else:
                self._scarcity.note_success()
                self._admit(sock, address)

    def _give_spare(self) -> bool:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        return spare is not None

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.dup(self._bell)
        if self._spare is not None and self._room < self.limits.max_newcomers:
            self._room += 1  # more descriptors may be free now

    def _pause(self, seconds: float) -> None:
        """Accept no clients for `seconds`: no descriptor or memory is left."""
        self._paused_until = time.monotonic() + seconds
        for oldest in self._newcomers:  # may be closed earlier
            self._paused_until = min(self._paused_until, oldest.came + _QUICK)
            break
        for each in self.sockets:
            self._selector.unregister(each)

    def _listen_again(self) -> None:
        self._paused_until = None
        for each in self.sockets:
            self._selector.register(each, selectors.EVENT_READ)

    def _admit(self, sock: socket.socket, address: object) -> None:
        limits = self.limits
        connection = Connection(
            sock,
            peer_name(address),
            reset=self._ends_by_reset,
            stalled=limits.stalled,
            on_large=None if limits.max_unsent is None else self._limit_unsent,
        )
        now = time.monotonic()
        client = _Client(connection, now, now + limits.first_message)
        with self._lock:
            self._accepted += 1
            self._newcomers[client] = None
            is_hopeless = (
                self._turn_away is None
                and self._is_full
                and all(each.connection.is_known for each in self._clients)
            )
        if self._speaks_first or is_hopeless:
            self._begin(client)
            return
        self._hold(client, limits.first_message)

    def _crowd_out(self, age: float) -> bool:
        """Close the oldest silent newcomer; False: none is `age` seconds old."""
        client = next(iter(self._newcomers), None)
        if client is None or time.monotonic() < client.came + age:
            return False
        self._release(client)
        self._end(client, End.CROWDED_OUT)
        return True

    def _hold(self, client: _Client, seconds: float | None) -> None:
        """Wait for the next data of a client."""
        client.deadline = None if seconds is None else time.monotonic() + seconds
        if client not in self._newcomers:
            self._quiet.add(client)
        self._selector.register(client.connection.socket, selectors.EVENT_READ, client)

    def _release(self, client: _Client) -> None:
        self._selector.unregister(client.connection.socket)
        self._quiet.discard(client)

    def _end_silent(self, now: float) -> None:
        for client in [*self._newcomers, *self._quiet]:
            if client.deadline is not None and now > client.deadline:
                self._release(client)
                self._log.info("%s: %s was silent for too long", self.name, client.connection.peer)
                self._end(client, End.TIMED_OUT)

    def _go_on_with(self, client: _Client) -> None:
        """Serve or end a client whose socket became readable."""
        if client not in self._newcomers and client not in self._quiet:
            return  # crowded out a moment ago
        self._release(client)
        if client.connection.has_ended():
            self._end(client, End(client.connection.reason or End.LEFT))
        else:
            self._begin(client)

    def _begin(self, client: _Client) -> None:
        """Start to serve a client that has sent data."""
        limits = self.limits
        if client in self._newcomers:
            with self._lock:
                del self._newcomers[client]
                if not self._is_full or self._make_place():
                    self._clients.add(client)
                elif self._may_wait(client):
                    self._knocking.append(client)
                    return
                else:
                    client.is_turned_away = True
                    self._ends[End.CLIENTS] += 1
                    self._turned_away.add(client)
            if client.is_turned_away:
                self._log.debug("%s: %s is one too many", self.name, client.connection.peer)
                client.deadline = time.monotonic() + min(_TURNING_AWAY, limits.first_message)
                if self._turn_away is None or len(self._turned_away) > _MOST_TURNED_AWAY:
                    self._end(client, End.CLIENTS)
                    return
        client.worker = Worker(f"{self.name}-client", lambda _: self._serve(client), log=self._log)
        try:
            client.worker.start()
        except RuntimeError as error:
            self._log.warning("%s: %s is denied: %s", self.name, client.connection.peer, error)
            self._end(client, End.THREADS)

    def _may_wait(self, client: _Client) -> bool:
        """Tell whether a place may be free in a moment: some have not been heard out yet.

        On a busy machine the threads of slow clients get to their first bytes late. Until then
        nobody knows that they are slow.
        """
        client.knocked = client.knocked or time.monotonic()
        return (
            time.monotonic() < client.knocked + _KNOCKING
            and len(self._knocking) < self._room
            and not all(each.connection.is_known for each in self._clients)
        )

    def _make_place(self) -> bool:
        """Cut off a client whose first message is incomplete and stalled."""
        for client in self._clients:
            connection = client.connection
            has_begun = connection.bytes_in > 0 or client.session is None
            if connection.is_known or connection.reason is not None or not has_begun:
                continue
            if not connection.is_readable():
                connection.cut(End.CROWDED_OUT)
                return True
        return False

    def _shut(self) -> None:
        """End the clients without a thread, and close the sockets. Idempotent, thread-safe."""
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
            waiting = [*self._newcomers, *self._knocking, *self._quiet, *self._returned]
        for client in waiting:
            self._end(client, End.STOPPED)
        self._selector.close()
        for each in self.sockets:
            each.close()
        self._give_spare()
        with self._lock:
            os.close(self._bell)
            self._bell = -1

    # --- threads of clients -------------------------------------------------------------------

    def _serve(self, client: _Client) -> None:
        connection = client.connection
        stays, reason = False, End.LEFT
        try:
            connection.until = None
            if client.session is None:
                client.session = self._meet(client)
            stays = client.session.serve()
        except Refused as error:
            self._log.info("%s: %s is refused: %s", self.name, connection.peer, error)
            reason = error.reason
        except Malformed as fault:
            self._log.info("%s: %s: %s", self.name, connection.peer, fault)
            reason = End.MALFORMED
        except OSError as error:
            self._log.debug("%s: %s: %s", self.name, connection.peer, error)
            reason = End.TIMED_OUT if isinstance(error, TimeoutError) else End.LEFT
        except PenstockError as error:
            self._log.info("%s: %s: %s", self.name, connection.peer, error)
            reason = End.FAILED
        except Exception:  # noqa: BLE001 - logged; ruff does not know this logger
            self._log.exception("%s: %s", self.name, connection.peer)
            reason = End.FAILED
        if stays and self._give_back(client):
            return
        if self._is_stopping and reason is End.LEFT:
            reason = End.STOPPED
        self._end(client, End(connection.reason) if connection.reason else reason)

    def _meet(self, client: _Client) -> Session:
        """Create the session of a client; its first message must arrive by its deadline."""
        connection = client.connection
        if self._tls is not None:
            assert client.deadline is not None
            connection.encrypt(self._tls, max(0.001, client.deadline - time.monotonic()))
        connection.until = client.deadline
        make = self._turn_away if client.is_turned_away else self._new_session
        assert make is not None
        return make(connection)

    def _leave(self, client: _Client) -> None:
        """Note that a client's thread, if it has one, is about to end."""
        if client.worker is not None:
            self._leaving.append(client.worker)
            client.worker = None

    def _give_back(self, client: _Client) -> bool:
        """Return an idle client to the door; False: the server is stopping."""
        with self._lock:
            if self._is_stopping:
                return False
            self._leave(client)
            self._returned.append(client)
        self._ring()
        return True

    def _limit_unsent(self, _: Connection) -> None:
        """Cut off the clients with the most unsent bytes, until the rest is within the limit."""
        limit = self.limits.max_unsent
        assert limit is not None
        with self._lock:
            connections = [each.connection for each in self._clients]
        unsent = {each: each.unsent for each in connections if each.reason is None}
        total = sum(unsent.values())
        while total > limit:
            most = max(unsent, key=unsent.__getitem__)
            total -= unsent.pop(most)
            self._log.info("%s: %s takes nothing, and is cut off", self.name, most.peer)
            most.cut(End.BEHIND)

    def _end(self, client: _Client, reason: End) -> None:
        connection = client.connection
        if client.session is not None:
            try:
                client.session.close()
            except Exception:  # noqa: BLE001 - as above
                self._log.exception("%s: closing %s", self.name, connection.peer)
        with self._lock:
            self._newcomers.pop(client, None)
            self._clients.discard(client)
            self._turned_away.discard(client)
            self._leave(client)
            if not client.is_turned_away:  # else it was counted as refused
                self._ends[reason] += 1
            self._bytes_in += connection.bytes_in
            self._bytes_out += connection.bytes_out
        connection.close()  # last, so that its end is already counted
