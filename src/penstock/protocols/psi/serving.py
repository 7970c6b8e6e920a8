"""How does a psi server listen, and what may a client do to it?"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.core.errors import Malformed, StorageError
from penstock.core.retry import Scarcity
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.psi.decoding import Decoder

__all__ = [
    "Listener",
    "end_by_reset",
    "hang_up",
    "has_left",
    "hear_one",
    "is_readable",
    "let_go",
    "listen_tcp",
    "listen_unix",
    "tune",
]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_BACKLOG: Final = 128
_RECEIVED_AT_ONCE: Final = 65536
#: Seconds of silence, between probes, and probes, until TCP says that a peer is gone.
_KEEP_ALIVE: Final = (10, 5, 4)
#: Seconds that what was sent has to get to the peer before its connection is reset.
_LAST_WORDS: Final = 2.0
#: Seconds to read what is there: some kernels forget it when a reset comes.
_READING: Final = 0.05
_LISTEN_HINTS: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another port; port 0 takes any",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is always there",
    errno.EACCES: "choose another port: those below 1024 are the administrator's",
}
#: Linux's number of that state of a connection.
_ESTABLISHED: Final = 1


def tune(connection: socket.socket) -> None:
    """Send without delay, and notice a peer whose machine is gone."""
    if connection.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle, between, probes = _KEEP_ALIVE
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def hang_up(connection: socket.socket) -> None:
    """End a connection, also for a thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def end_by_reset(connection: socket.socket) -> None:
    """Let a connection end by a reset, however it ends, also with this process.

    An orderly end makes a psi program wait for ever, at full speed (spec psi 4, "EOF trap").
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def let_go(connection: socket.socket, patience: float = _LAST_WORDS) -> None:
    """Close a connection whose end is a reset, when what was sent is there and cannot be lost."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(OSError):
        while _unsent(connection) and time.monotonic() < deadline:
            time.sleep(0.005)
        if _is_established(connection):
            time.sleep(_READING)
    connection.close()


def _unsent(connection: socket.socket) -> int:
    """Return the bytes that the peer's kernel has not taken yet; 0 when the peer has left."""
    if not _is_established(connection):
        return 0
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _is_established(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def is_readable(connection: socket.socket, timeout: float = 0.0) -> bool:
    """Tell whether something has come, or the peer has left, within a time."""
    # Not by a flag of `recv`: a socket with a time-out waits for it in any case.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def has_left(connection: socket.socket) -> bool:
    """Tell whether the peer has gone; what else it says is dropped."""
    try:
        while is_readable(connection):
            if not connection.recv(4096):
                return True
    except (OSError, ValueError):  # closed meanwhile
        return True
    return False


def hear_one(connection: socket.socket, decoder: Decoder[_T], timeout: float) -> _T | None:
    """Return the first thing that a peer says; None if it leaves or is silent for too long.

    :raises Malformed: it does not follow the format.
    """
    connection.settimeout(timeout)
    try:
        while True:
            data = connection.recv(_RECEIVED_AT_ONCE)
            if not data:
                return None
            if found := decoder.feed(data):
                return found[0]
    except OSError:
        return None


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    :raises StorageError: the address cannot be had.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # The library adds the address to the text, which is said already.
        plain = error
        if error.errno in _LISTEN_HINTS:
            plain = OSError(error.errno, os.strerror(error.errno))
        hint = _LISTEN_HINTS.get(error.errno or 0, "check the host and the port to listen at")
        raise StorageError("listening on", f"{host}:{port}", plain, hint=hint) from error


def listen_unix(path: str) -> socket.socket:
    """Return a Unix socket that listens, which only its owner may use.

    :raises StorageError: the path cannot be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with storage_errors("listening on", path):
            # Before it is bound, so that there is no moment at which others may use it.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(path)
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class Listener:
    """Accepts connections, each served by a thread of its own, so that none waits for another."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket, str], None],
        *,
        name: str,
        max_clients: int,
        reset: bool = False,
    ) -> None:
        """`reset`: connections end by a reset, see `end_by_reset`."""
        self.socket = listener
        self._ends_by_reset = reset and listener.family != socket.AF_UNIX
        self._serve = serve
        self._name = name
        self._max_clients = max_clients
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        #: Connections since the start, those turned away, and those that sent what is no psi.
        self.seen = self.denied = self.malformed = 0
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        number: int = self.socket.getsockname()[1]
        return number

    @property
    def connected(self) -> int:
        """Connections now."""
        return len(self._connections)

    def _accept(self) -> None:
        scarcity = Scarcity(f"{self._name}: accepting clients", log)
        while not self._is_closed:
            try:
                connection, address = self.socket.accept()
            except OSError as error:
                if self._is_closed or error.errno in {errno.EBADF, errno.EINVAL}:
                    log.debug("%s ends: %s", self._name, error)
                    return
                # Whatever there is too little of now, or a client's network: others may come.
                time.sleep(scarcity.wait_after(error))
                continue
            scarcity.note_success()
            self._admit(connection, address)

    def _admit(self, connection: socket.socket, address: object) -> None:
        peer = ":".join(map(str, address[:2])) if isinstance(address, tuple) else "a local process"
        thread = threading.Thread(
            target=self._run, args=(connection, peer), name=f"{self._name}-client", daemon=True
        )
        with self._lock:
            self.seen += 1
            is_one_too_many = len(self._connections) >= self._max_clients or self._is_closed
            if is_one_too_many:
                self.denied += 1
            else:
                self._connections[connection] = thread
        if is_one_too_many:
            connection.close()
            return
        tune(connection)
        if self._ends_by_reset:
            end_by_reset(connection)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads
            log.warning("%s: %s is denied: %s", self._name, peer, error)
            connection.close()
            with self._lock:
                self.denied += 1
                self._connections.pop(connection, None)

    def _run(self, connection: socket.socket, peer: str) -> None:
        try:
            self._serve(connection, peer)
        except Malformed as fault:
            self.malformed += 1
            log.info("%s: %s: %s", self._name, peer, fault)
        except OSError as error:
            log.debug("%s: %s: %s", self._name, peer, error)
        except Exception:
            log.exception("%s: %s", self._name, peer)
        finally:
            (let_go if self._ends_by_reset else hang_up)(connection)
            with self._lock:
                self._connections.pop(connection, None)

    def close(self) -> None:
        """Stop, and cut off all connections. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        hang_up(self.socket)
        with self._lock:
            threads = list(self._connections.items())
        # To shut down both ways would say goodbye in good order.
        how = socket.SHUT_RD if self._ends_by_reset else socket.SHUT_RDWR
        for connection, _ in threads:
            with contextlib.suppress(OSError):
                connection.shutdown(how)
        for _, thread in threads:
            thread.join(timeout=5)
        self._thread.join(timeout=5)
