"""How does a process serve many clients, none of which can hold up another or bring it down?

One thread, the door, accepts and holds all connections that say nothing: they cost a descriptor
each, and no thread. When the first bytes of one are there, its session serves it in a thread, and
may give it back to the door when it has gone quiet. A protocol writes a session, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.closing import Closable
from penstock.core.errors import Malformed, PenstockError, StorageError
from penstock.core.retry import Scarcity
from penstock.core.worker import Worker
from penstock.protocols.connection import Connection, peer_name
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import logging
    import ssl
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.protocols.datagrams import Datagrams, DatagramSocket, DatagramStatistics

__all__ = [
    "Conversation",
    "DatagramServer",
    "End",
    "Limits",
    "Refused",
    "Server",
    "ServerStatistics",
    "Session",
    "listen_tcp",
    "listen_unix",
]

#: Connections that the system keeps for us, and those taken before others have their turn.
_BACKLOG: Final = 1024
_TAKEN_AT_ONCE: Final = 64
#: Without a descriptor for one more, a connection that has said nothing for so long (seconds) has
#: to make room: who comes to be served speaks at once.
_QUICK: Final = 0.1
#: So many descriptors are left then to what clients need that do speak.
_LEFT_FOR_OTHERS: Final = 8
#: Clients beyond the limit that are told so, at most, and for how long (seconds).
_MOST_TURNED_AWAY: Final = 64
_TURNING_AWAY: Final = 5.0
#: What is cut off at the end has so long (seconds) to notice.
_LAST: Final = 2.0
#: Datagrams are waited for so long (seconds) between two looks whether to end.
_LOOK: Final = 0.2
#: Datagrams that are handled before more are taken from the kernel, and the bytes of those that
#: wait for that, at most.
_HANDLED_AT_ONCE: Final = 64
_WAITING: Final = 64 << 20
#: What one of them takes beside its own bytes.
_OVERHEAD: Final = 100
_LISTEN_HINTS: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another port; port 0 takes any",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is always there",
    errno.EACCES: "choose another port: those below 1024 are the administrator's",
}


# --- listening ----------------------------------------------------------------------------------


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host; a port of 0 is the same, free one at each of them.

    :raises StorageError: one of them cannot be had.
    """
    host = host.strip("[]")
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
                continue  # the machine has no such addresses
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = port or one.getsockname()[1]
            one.listen(_BACKLOG)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "it has no address")  # noqa: TRY301 - told below
    except OSError as error:
        for each in sockets:
            each.close()
        hint = _LISTEN_HINTS.get(error.errno or 0, "check the host and the port to listen at")
        raise StorageError("listening on", f"{host}:{port}", error, hint=hint) from error
    return sockets


def listen_unix(path: Path) -> list[socket.socket]:
    """Listen at a path, which only its owner may use, however long it is.

    :raises StorageError: the path cannot be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with storage_errors("listening on", str(path)):
            # Before it is bound, so that there is no moment at which others may use it.
            os.fchmod(listener.fileno(), 0o600)
            # By a short way there: a path of a socket has 107 bytes at most.
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


# --- what a protocol gives, and what it is told -------------------------------------------------


class Session(ABC):
    """What a protocol does for one client. One thread at a time calls it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def serve(self) -> bool:
        """Serve what has come; True: call again when there is more, False: that was all.

        It calls `connection.welcome()` when the first message is there, before which the client's
        time is limited. Then it may wait for more as long as it likes. When it returns True, it
        must hold no bytes that it has not looked at.

        :raises Malformed: the client does not follow the protocol.
        :raises Refused: the client may not do this.
        :raises OSError: the connection broke, or its time is over.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Give everything back: the client has left, or is to leave."""


class Conversation(Session):
    """A session that is one call, from the first word to the last."""

    def __init__(self, connection: Connection, serve: Callable[[Connection], None]) -> None:
        super().__init__(connection)
        self._serve = serve

    def serve(self) -> bool:
        self._serve(self.connection)
        return False


class End(StrEnum):
    """Why a connection ended, or why it was refused."""

    #: It was served, and left or was told everything.
    LEFT = "left"
    #: It said nothing, or not enough, or took nothing, for too long.
    TIMED_OUT = "timed out"
    #: It sent what the protocol does not know.
    MALFORMED = "malformed"
    #: Replies that nobody took were too many.
    BEHIND = "behind"
    #: It had said nothing, or half a first message, when there were too many of that kind, or no
    #: descriptor was left.
    CROWDED_OUT = "crowded out"
    #: The server failed at something, which is in its log.
    FAILED = "failed"
    #: The server stopped.
    STOPPED = "stopped"
    #: Refused: there are too many clients.
    CLIENTS = "clients"
    #: Refused: the system has no thread for it.
    THREADS = "threads"
    #: Refused: its token, or its key, is not right.
    TOKEN = "token"  # noqa: S105 - a reason


_REFUSALS: Final = (End.CLIENTS, End.THREADS, End.TOKEN)


class Refused(PenstockError):
    """A client is refused; the server counts it by its reason."""

    def __init__(self, reason: End, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may take of a server. What a message may be large, its session knows."""

    #: Clients that are served at the same time.
    max_clients: int = 256
    #: Seconds that a client has for its first message.
    first_message: float = 30.0
    #: Seconds that a client may be silent between two; None: as long as its machine is there.
    idle: float | None = None
    #: Seconds that a client may take nothing of what it is sent.
    stalled: float = 30.0
    #: Connections that have said nothing; when there are more, the oldest make room.
    max_newcomers: int = 1024
    #: Bytes that clients have not taken yet, of all together: beyond it those who have most of
    #: them are cut off. None: no limit.
    max_unsent: int | None = None


class ServerStatistics(NamedTuple):
    """Books of a server: accepted = open + refused + ended."""

    #: Connections so far.
    accepted: int
    #: Connections now.
    open: int
    #: Connections that were turned away, by the reason.
    refused: dict[End, int]
    #: Connections that have ended otherwise, by the reason.
    ended: dict[End, int]
    #: Bytes received and sent.
    bytes_in: int
    bytes_out: int
    #: Bytes that clients have not taken yet, of what they are being sent.
    unsent: int
    #: How often a connection could not be accepted for want of a descriptor.
    scarcities: int


# --- the server ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Client:
    """A connection as the server sees it."""

    connection: Connection
    #: When it came.
    came: float
    #: When what the door waits for has to be there.
    deadline: float | None
    session: Session | None = None
    #: What serves it now, or did last.
    worker: Worker | None = None
    #: Whether it is one too many, and only told so.
    is_turned_away: bool = False


class Server(Closable):
    """Serves all who connect to some listening sockets, from `start` on until `stop`."""

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
        :param turn_away: makes the session that tells a client that there are too many; without
            it, the connection is closed
        :param token: what `check_token` compares with
        :param reset: connections end by a reset
        :param speaks_first: sessions begin at once, because clients wait for a word
        """
        self.name = name
        self.limits = limits
        self.sockets = list(sockets)
        where = self.sockets[0].getsockname()
        #: The port that it listens on; 0 of a path.
        self.port: int = where[1] if isinstance(where, tuple) else 0
        self._new_session = new_session
        self._turn_away = turn_away
        self._log = log
        self._tls = tls
        self._token = token
        self._ends_by_reset = reset
        self._speaks_first = speaks_first
        self._lock = Lock()
        #: Those that have spoken.
        self._clients: set[_Client] = set()
        self._turned_away: set[_Client] = set()
        #: Those that have not, the oldest first. Of these and the next two the door alone knows.
        self._newcomers: dict[_Client, None] = {}
        self._quiet: set[_Client] = set()
        self._paused_until: float | None = None
        #: How many there may be of them now.
        self._room = limits.max_newcomers
        #: Those that have gone quiet, on their way to the door.
        self._returned: deque[_Client] = deque()
        self._accepted = self._scarcities = self._bytes_in = self._bytes_out = 0
        self._ends: Counter[End] = Counter()
        self._is_stopping = False
        self._has_stopped = False
        idle = limits.idle or limits.first_message
        self._look_every = min(1.0, limits.first_message / 4, idle / 4)
        self._scarcity = Scarcity(f"{name}: accepting clients", log)
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: A descriptor for one client more when none is left, who may want to know why.
        self._spare: int | None = os.dup(self._bell)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for each in self.sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._door = Worker(name, self._run, log=log, restart=True, rouse=self._ring)

    def start(self) -> Server:
        """Let clients in."""
        self._door.start()
        return self

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self.limits.max_clients

    def check_token(self, said: bytes) -> None:
        """Make sure that a client knows the token, if one is asked for.

        :raises Refused: it does not.
        """
        # In constant time: how long it takes must not tell how much of it is right.
        if self._token is not None and not hmac.compare_digest(said, self._token):
            raise Refused(End.TOKEN, "the token is wrong" if said else "a token is needed")

    def statistics(self) -> ServerStatistics:
        with self._lock:
            connections = [each.connection for each in self._clients | self._turned_away]
            ends = self._ends.copy()
            accepted, open = self._accepted, len(self._clients) + len(self._newcomers)
        return ServerStatistics(
            accepted,
            open,
            {reason: ends[reason] for reason in _REFUSALS},
            {reason: ends[reason] for reason in End if reason not in _REFUSALS},
            self._bytes_in + sum(each.bytes_in for each in connections),
            self._bytes_out + sum(each.bytes_out for each in connections),
            sum(each.unsent for each in connections if each.reason is None),
            self._scarcities,
        )

    def stop(self, grace: float = 5.0) -> bool:
        """Let nobody in any more, and have clients end; False: some did not.

        What is being served goes on for so many seconds, but nothing more is heard; then it is cut.
        """
        with self._lock:
            self._is_stopping = True
        if self._has_stopped:
            return True
        deadline = time.monotonic() + grace
        if self._door.is_alive:
            self._door.stop()
        else:  # it was never started
            self._shut()
        with self._lock:
            served = [each for each in self._clients | self._turned_away if each.worker is not None]
        for each in served:
            each.connection.hear_no_more()
        for each in served:
            assert each.worker is not None
            each.worker.join(max(0.0, deadline - time.monotonic()))
        for each in served:
            each.connection.cut(End.STOPPED)
        deadline = time.monotonic() + _LAST
        self._has_stopped = True
        return all(
            each.worker is None or each.worker.join(max(0.0, deadline - time.monotonic()))
            for each in served
        )

    def close(self) -> None:
        """Stop. Closing twice is fine."""
        self.stop()

    # --- the door -----------------------------------------------------------------------------

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is closed with the door
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
            while self._returned:
                self._hold(self._returned.popleft(), self.limits.idle)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + self._look_every
                self._end_silent(now)
                self._keep_spare()
            if self._paused_until is not None and now >= self._paused_until:
                self._listen_again()
        self._shut()

    def _patience(self, look_at: float) -> float:
        until = look_at if self._paused_until is None else min(look_at, self._paused_until)
        return max(0.0, until - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
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
                self._scarcities += 1
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
            self._room += 1  # there may be more descriptors by now

    def _pause(self, seconds: float) -> None:
        """Accept nobody for a moment: there is no descriptor, or no memory, for it."""
        self._paused_until = time.monotonic() + seconds
        for oldest in self._newcomers:  # which may make room before
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
        """End the newcomer that has said nothing for longest; False: there is none that old."""
        client = next(iter(self._newcomers), None)
        if client is None or time.monotonic() < client.came + age:
            return False
        self._release(client)
        self._end(client, End.CROWDED_OUT)
        return True

    def _hold(self, client: _Client, seconds: float | None) -> None:
        """Wait for what a client says next."""
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
        """Do what is to be done with a client that is quiet no more."""
        if client not in self._newcomers and client not in self._quiet:
            return  # it had to make room a moment ago
        self._release(client)
        if client.connection.has_ended():
            self._end(client, End(client.connection.reason or End.LEFT))
        else:
            self._begin(client)

    def _begin(self, client: _Client) -> None:
        """Have a client served that has said something."""
        limits = self.limits
        if client in self._newcomers:
            with self._lock:
                del self._newcomers[client]
                if not self._is_full or self._make_place():
                    self._clients.add(client)
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

    def _make_place(self) -> bool:
        """Cut off one that began its first message, and is not going on with it."""
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
        with self._lock:
            waiting = [*self._newcomers, *self._quiet, *self._returned]
        for client in waiting:
            self._end(client, End.STOPPED)
        self._selector.close()
        for each in self.sockets:
            each.close()
        self._give_spare()
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
        except Exception:  # noqa: BLE001 - it is logged; ruff does not know this log
            self._log.exception("%s: %s", self.name, connection.peer)
            reason = End.FAILED
        if stays and self._give_back(client):
            return
        if self._is_stopping and reason is End.LEFT:
            reason = End.STOPPED
        self._end(client, End(connection.reason) if connection.reason else reason)

    def _meet(self, client: _Client) -> Session:
        """Make the session of a client; its first message has to be there by its deadline."""
        connection = client.connection
        if self._tls is not None:
            assert client.deadline is not None
            connection.encrypt(self._tls, max(0.001, client.deadline - time.monotonic()))
        connection.until = client.deadline
        make = self._turn_away if client.is_turned_away else self._new_session
        assert make is not None
        return make(connection)

    def _give_back(self, client: _Client) -> bool:
        """Let the door wait for what a client says next; False: it is closed."""
        with self._lock:
            if self._is_stopping:
                return False
            client.worker = None
            self._returned.append(client)
        self._ring()
        return True

    def _limit_unsent(self, _: Connection) -> None:
        """Cut off those who have most to take, until the rest is little enough."""
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
            if not client.is_turned_away:  # else it was counted when it came
                self._ends[reason] += 1
            self._bytes_in += connection.bytes_in
            self._bytes_out += connection.bytes_out
        connection.close()  # who sees it finds it counted


class DatagramServer(Closable):
    """Has batches of datagrams handled as they come, from `start` on until it is closed."""

    def __init__(
        self,
        name: str,
        sock: DatagramSocket,
        handle: Callable[[Datagrams], None],
        *,
        log: logging.Logger,
    ) -> None:
        """Take over the socket; `handle` answers by it, or does not.

        What `handle` raises is in the log, and the next batch comes all the same.
        """
        self.socket = sock
        self._handle = handle
        #: Batches that were handled, and at which that failed.
        self.batches = self.failures = 0
        self._waiting: deque[tuple[Datagrams, int]] = deque()
        self._waiting_bytes = 0
        self._worker = Worker(name, self._run, log=log, restart=True, on_failure=self._count)

    def start(self) -> DatagramServer:
        self._worker.start()
        return self

    @property
    def port(self) -> int:
        return self.socket.port

    def _run(self, worker: Worker) -> None:
        # The kernel may have room for a hundred datagrams only. So all that have come are taken
        # from it between two small batches, and wait here.
        waiting = self._waiting
        while not worker.is_stopping or waiting:
            if not worker.is_stopping:
                self._take_all(_LOOK if not waiting else 0.0)
            if waiting:
                found, size = waiting.popleft()
                self._waiting_bytes -= size
                self.batches += 1
                self._handle(found)
                worker.note_success()

    def _take_all(self, timeout: float) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            if self._waiting_bytes > _WAITING:
                return
            found = self.socket.receive(_HANDLED_AT_ONCE, timeout)
            if not found:
                return
            size = sum([len(payload) + _OVERHEAD for payload, _ in found.whole])
            self._waiting.append((found, size))
            self._waiting_bytes += size
            if len(found.whole) < _HANDLED_AT_ONCE:
                return
            timeout = 0.0

    def _count(self, _: Exception) -> None:
        self.failures += 1

    def statistics(self) -> DatagramStatistics:
        return self.socket.statistics()

    def close(self) -> None:
        """Stop; what has come is handled. Closing twice is fine."""
        if self._worker.stop(2 * _LOOK + _LAST):
            self.socket.close()
