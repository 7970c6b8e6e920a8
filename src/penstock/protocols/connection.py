"""How does a stream socket send and receive by deadlines, with few system calls?"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Connection", "hang_up", "is_readable", "peer_name", "tune"]

#: Keep-alive: seconds idle, seconds between probes, number of probes.
_KEEP_ALIVE: Final = (10, 5, 4)
#: A waiting call checks deadlines and `cut` this often (seconds).
_BEAT: Final = 0.25
#: A peer that accepts nothing for this long (seconds) is given up.
_STALLED: Final = 30.0
#: A send of more bytes than this calls `on_large` first.
_LARGE: Final = 1 << 16
#: Bytes encrypted by one call.
_ENCRYPTED: Final = 1 << 20
#: Parts sent by one call: the least that systems allow is 1024.
_MOST_PARTS: Final = 512
#: Seconds to wait for acknowledgement of sent data before a reset.
_LAST_WORDS: Final = 2.0
#: Seconds for the peer to read its data: some kernels discard it on a reset.
_READING: Final = 0.05
#: Linux's number of the TCP state ESTABLISHED.
_ESTABLISHED: Final = 1


def tune(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and enable keep-alive probes."""
    if sock.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle, between, probes = _KEEP_ALIVE
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def hang_up(sock: socket.socket) -> None:
    """Shut down and close a connection, and wake a thread that waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def is_readable(sock: socket.socket | int, timeout: float = 0.0) -> bool:
    """Tell whether data or the end of the stream arrives within `timeout` seconds."""
    # Not by a flag of `recv`: a socket with a timeout waits in any case.
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def peer_name(address: object) -> str:
    """Return `host:port` of a peer, for people."""
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else "a local process"


class Connection:
    """A blocking connection for one thread; other threads may cut it off.

    A message takes one system call in the best case. So timeouts are those of the kernel
    (`SO_RCVTIMEO`) and not Python's: with these, every few kilobytes would be a call, and each
    would wait for the GIL.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str = "",
        *,
        reset: bool = False,
        stalled: float = _STALLED,
        on_large: Callable[[Connection], None] | None = None,
    ) -> None:
        """Take over a connected socket.

        :param reset: always close by a reset: some peers mishandle an orderly end
        :param stalled: give up a peer that accepts nothing for this many seconds, or that is silent
            in the middle of a message
        :param on_large: called before a large send, to limit the unsent bytes; see `unsent`
        """
        self.socket = sock
        self.peer = peer or peer_name(sock.getpeername())
        #: Bytes received and sent.
        self.bytes_in = self.bytes_out = 0
        #: Bytes of the current send that the kernel has not accepted.
        self.unsent = 0
        #: Deadline of the expected data, by the monotonic clock.
        self.until: float | None = None
        #: Whether its first message arrived: the client knows the protocol.
        self.is_known = False
        #: Why it was cut off.
        self.reason: str | None = None
        #: Called periodically while a call waits; raises to give up.
        self.on_silence: Callable[[], None] | None = None
        self._on_large = on_large
        self._stalled = stalled
        self._beat = min(_BEAT, stalled / 8)
        self._is_plain = True
        #: Held while TLS replaces the socket, which has no descriptor then.
        self._changing = threading.Lock()
        self._ends_by_reset = reset and sock.family != socket.AF_UNIX
        tune(sock)
        if self._ends_by_reset:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._keep_time()

    def _keep_time(self) -> None:
        self._is_plain = not isinstance(self.socket, ssl.SSLSocket) and sys.platform != "win32"
        self.socket.settimeout(None if self._is_plain else self._beat)
        if self._is_plain:
            beat = struct.pack("@ll", 0, max(1, int(self._beat * 1_000_000)))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, beat)

    def encrypt(self, context: ssl.SSLContext, timeout: float) -> None:
        """Start TLS, as the server.

        :raises OSError: the handshake failed, or took longer than `timeout` seconds.
        """
        self.socket.settimeout(timeout)
        with self._changing:
            self.socket = encrypted = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        encrypted.do_handshake()
        self._keep_time()

    def expect(self, seconds: float | None) -> None:
        """Set the deadline of the next data to `seconds` from now; None: no deadline."""
        self.until = None if seconds is None else time.monotonic() + seconds

    def welcome(self) -> None:
        """Note the arrival of the first message, and clear the deadline."""
        self.is_known = True
        self.until = None

    # --- bytes --------------------------------------------------------------------------------

    @overload
    def receive(self, view: memoryview, *, eager: bool = False) -> int: ...
    @overload
    def receive(self, view: memoryview, patience: float | None) -> int | None: ...
    def receive(
        self, view: memoryview, patience: float | None = None, *, eager: bool = False
    ) -> int | None:
        """Receive available bytes into a buffer; return their number, 0 at the end of the stream.

        Returns None after `patience` seconds without data.

        :param eager: prefer a full buffer: wait a moment for the rest

        :raises TimeoutError: the expected data did not arrive by the deadline.
        :raises ConnectionError: the connection broke, or was cut off.
        """
        silence = 0.0
        flags = socket.MSG_WAITALL if eager and self._is_plain else 0
        while True:
            try:
                count = self.socket.recv_into(view, 0, flags)
            except (BlockingIOError, TimeoutError):
                self._check()
                silence += self._beat
                if patience is not None and silence >= patience:
                    return None
                continue
            except ssl.SSLEOFError:
                return 0
            self.bytes_in += count
            if self.until is not None and count:
                self._check()  # slow bytes are no silence, but may exceed the deadline
            return count

    def receive_all(self, view: memoryview, allowed: float | None = None) -> bool:
        """Fill a buffer; False: the stream ended before its first byte.

        The first byte sets the deadline `until` to `allowed` seconds later.

        :raises TimeoutError: the data did not arrive in time.
        :raises ConnectionError: the connection ended in the middle, broke, or was cut off.
        """
        flags = socket.MSG_WAITALL if self._is_plain else 0
        done = 0
        came_at = time.monotonic()
        while done < len(view):
            try:
                count = self.socket.recv_into(view[done:], 0, flags)
            except (BlockingIOError, TimeoutError):
                if done and time.monotonic() - came_at > self._stalled:
                    raise TimeoutError(f"it says no more for {self._stalled:g} s") from None
                self._check()
                continue
            except ssl.SSLEOFError:
                count = 0
            if not count:
                if not done:
                    return False
                raise ConnectionResetError(f"it ended after {done} of {len(view)} bytes")
            if not done and allowed is not None:
                self.expect(allowed)
            done += count
            self.bytes_in += count
            if done < len(view):
                came_at = time.monotonic()
                self._check()
        return True

    def send(self, *parts: Any) -> None:
        """Send all parts in order, in as few calls as possible.

        :raises TimeoutError: the peer accepts nothing for too long.
        :raises ConnectionError: the connection broke, or was cut off.
        """
        left = deque(view for part in parts if len(view := memoryview(part).cast("B")))
        self.unsent = sum(map(len, left))
        if self.unsent > _LARGE and self._on_large is not None:
            self._on_large(self)
        taken_at = time.monotonic()
        try:
            while left:
                began = time.monotonic()
                try:
                    count = self._send_some(left)
                except (BlockingIOError, TimeoutError):
                    if time.monotonic() - taken_at > self._stalled:
                        raise TimeoutError(f"it takes nothing for {self._stalled:g} s") from None
                    self._wait_on()
                    continue
                self.bytes_out += count
                self.unsent -= count
                if self.unsent:
                    taken_at = began  # the bytes may have been accepted right at the start
                    if self.reason is not None:
                        self._wait_on()
                while left and count >= len(left[0]):
                    count -= len(left.popleft())
                if count:
                    left[0] = left[0][count:]
        finally:
            self.unsent = 0

    def _send_some(self, parts: Sequence[memoryview]) -> int:
        if not self._is_plain:
            return self.socket.send(parts[0][:_ENCRYPTED])
        if len(parts) == 1:
            return self.socket.send(parts[0])
        return self.socket.sendmsg([*parts][:_MOST_PARTS])

    def _check(self) -> None:
        self._wait_on()
        if self.until is not None and time.monotonic() > self.until:
            raise TimeoutError("what was waited for did not come in time")

    def _wait_on(self) -> None:
        if self.reason is not None:
            raise ConnectionAbortedError(self.reason)
        if self.on_silence is not None:
            self.on_silence()

    # --- the peer -----------------------------------------------------------------------------

    def is_readable(self, timeout: float = 0.0) -> bool:
        """Tell whether data or the end of the stream arrives within `timeout` seconds."""
        with self._changing:
            if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
                return True
            descriptor = self.socket.fileno()
        return is_readable(descriptor, timeout)

    def is_writable(self) -> bool:
        """Tell whether a short message can be sent without waiting."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        return bool(poll.poll(0))

    def is_quiet(self) -> bool:
        """Tell whether neither data nor the end of the stream is available."""
        return not self.is_readable()

    def has_left(self) -> bool:
        """Tell whether the peer has closed; pending data is discarded."""
        try:
            while self.is_readable():
                if not self.socket.recv(4096):
                    return True
        except (OSError, ValueError):  # closed meanwhile
            return True
        return False

    def has_ended(self) -> bool:
        """Tell whether the peer has closed or was cut off; pending data is kept."""
        if self.reason is not None:
            return True
        try:
            # Not `SSLSocket.recv`, which cannot peek.
            return self.is_readable() and not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
        except (OSError, ValueError):  # closed meanwhile
            return True

    def acknowledge_now(self) -> None:
        """Send a TCP acknowledgement at once (`TCP_QUICKACK`)."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    # --- the end ------------------------------------------------------------------------------

    def hear_no_more(self) -> None:
        """Shut down receiving; sending still works. Thread-safe."""
        self._shut_down(socket.SHUT_RD)

    def cut(self, reason: str) -> None:
        """End all waiting calls within a moment. Thread-safe."""
        self.reason = self.reason or reason
        # With a reset, a full shutdown would be an orderly end.
        self._shut_down(socket.SHUT_RD if self._ends_by_reset else socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. Before a reset, wait until the peer has the sent data. Idempotent."""
        if self._ends_by_reset and self.reason is None and self.bytes_out:
            self._wait_until_taken()
        elif not self._ends_by_reset:
            self._shut_down(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()

    def _shut_down(self, how: int) -> None:
        with self._changing, contextlib.suppress(OSError):
            # Not `SSLSocket.shutdown`, after which data would be sent unencrypted.
            socket.socket.shutdown(self.socket, how)

    def _wait_until_taken(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS
        with contextlib.suppress(OSError):
            while self._is_established() and self._untaken() and time.monotonic() < deadline:
                time.sleep(0.005)
            if self._is_established():
                time.sleep(_READING)

    def _untaken(self) -> int:
        """Return the bytes that the peer's kernel has not acknowledged."""
        return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def _is_established(self) -> bool:
        option = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return option[0] == _ESTABLISHED
