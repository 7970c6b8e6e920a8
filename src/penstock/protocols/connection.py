"""How do bytes pass through a stream socket by deadlines, without a call for every few of them?"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Connection", "hang_up", "is_readable", "peer_name", "tune"]

#: Seconds of silence, between probes, and probes, until TCP says that a peer is gone.
_KEEP_ALIVE: Final = (10, 5, 4)
#: Whoever waits for a peer looks up this often (seconds): at deadlines, and whether to end.
_BEAT: Final = 0.25
#: A peer that takes nothing for so long (seconds) never will.
_STALLED: Final = 30.0
#: A send of more bytes than these is told of before: see `on_large`.
_LARGE: Final = 1 << 16
#: Bytes encrypted by one call.
_ENCRYPTED: Final = 1 << 20
#: Parts sent by one call: the least that systems allow is 1024.
_MOST_PARTS: Final = 512
#: Seconds that what was sent has to get to the peer before its connection is reset.
_LAST_WORDS: Final = 2.0
#: Seconds to read what is there: some kernels forget it when a reset comes.
_READING: Final = 0.05
#: Linux's number of that state of a connection.
_ESTABLISHED: Final = 1


def tune(sock: socket.socket) -> None:
    """Send without delay, and notice a peer whose machine is gone."""
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
    """End a connection, also for a thread that waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def is_readable(sock: socket.socket, timeout: float = 0.0) -> bool:
    """Tell whether something has come, or the peer has left, within a time."""
    # Not by a flag of `recv`: a socket with a time-out waits for it in any case.
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def peer_name(address: object) -> str:
    """Return `host:port` of a peer, for people."""
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else "a local process"


class Connection:
    """A connection for one thread, which waits for its peer; others may cut it off.

    All of a message passes in one call of the system, if it goes well. So time is kept by the
    system and not by a time-out of Python's: then every few kilobytes would be a call, and each of
    those would wait for other threads of this process.
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

        :param reset: it ends by a reset, however it ends: to some an orderly end is a trap
        :param stalled: who takes nothing for so many seconds, or is silent in the middle of what
            is waited for, is given up
        :param on_large: hears before much is sent how much all have to take, see `unsent`
        """
        self.socket = sock
        self.peer = peer or peer_name(sock.getpeername())
        #: Bytes that passed.
        self.bytes_in = self.bytes_out = 0
        #: Bytes of what is being sent that the peer has not taken.
        self.unsent = 0
        #: What is waited for has to be there by this moment of the monotonic clock.
        self.until: float | None = None
        #: Whether its first message is here: it is one that knows the protocol.
        self.is_known = False
        #: Why it was cut off.
        self.reason: str | None = None
        #: Called now and then while whoever waits does so; raises to give up.
        self.on_silence: Callable[[], None] | None = None
        self._on_large = on_large
        self._stalled = stalled
        self._beat = min(_BEAT, stalled / 8)
        self._is_plain = True
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
        """Become an encrypted one, as the server.

        :raises OSError: the peer does not, or takes longer.
        """
        self.socket.settimeout(timeout)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self._keep_time()

    def expect(self, seconds: float | None) -> None:
        """Have what is waited for next be there in so many seconds; None: any time."""
        self.until = None if seconds is None else time.monotonic() + seconds

    def welcome(self) -> None:
        """Note that the first message is here; the next may come any time."""
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
        """Receive what has come, up to the length of a buffer; 0: the peer has ended.

        None, if it may only wait so long: nothing came.

        :param eager: a buffer that is not full is of no use: it may wait a moment for the rest

        :raises TimeoutError: nothing, or not all that is expected, came in time.
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
                self._check()  # a byte now and then is no silence, but is not in time either
            return count

    def receive_all(self, view: memoryview, allowed: float | None = None) -> bool:
        """Fill a buffer; False: the peer ended before.

        All of it may take the seconds `allowed` from its first byte on, whatever is `until` then.

        :raises TimeoutError: it did not come in time.
        :raises ConnectionError: the peer ended in the middle, or it broke, or was cut off.
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
        """Send everything, part after part, in as few calls as possible.

        :raises TimeoutError: the peer takes nothing for too long.
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
                    taken_at = began  # what was taken may have been so at once
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
        """Tell whether something has come, or the peer has left, within a time."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        return is_readable(self.socket, timeout)

    def is_quiet(self) -> bool:
        """Tell whether nothing has come, nor the end."""
        return not self.is_readable()

    def has_left(self) -> bool:
        """Tell whether the peer has gone; what else it says is dropped."""
        try:
            while self.is_readable():
                if not self.socket.recv(4096):
                    return True
        except (OSError, ValueError):  # closed meanwhile
            return True
        return False

    def has_ended(self) -> bool:
        """Tell whether no more comes: the peer has gone, or it was cut off. Nothing is dropped."""
        if self.reason is not None:
            return True
        try:
            # Not by the method of an encrypted one, which cannot look without taking.
            return self.is_readable() and not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
        except (OSError, ValueError):  # closed meanwhile
            return True

    def acknowledge_now(self) -> None:
        """Have the kernel tell the peer at once that what has come so far is here."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    # --- the end ------------------------------------------------------------------------------

    def hear_no_more(self) -> None:
        """End what waits to receive; what is to be sent can still be. From any thread."""
        with contextlib.suppress(OSError):
            # Not by the method of an encrypted one, which would send in the clear from then on.
            socket.socket.shutdown(self.socket, socket.SHUT_RD)

    def cut(self, reason: str) -> None:
        """End what waits, whatever it is, within a moment. From any thread."""
        self.reason = self.reason or reason
        if self._ends_by_reset:  # to shut down both ways would be an orderly end
            self.hear_no_more()
            return
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it. If it ends by a reset, what was sent gets to the peer first. Twice is fine."""
        if self._ends_by_reset and self.reason is None and self.bytes_out:
            self._wait_until_taken()
        elif not self._ends_by_reset:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()

    def _wait_until_taken(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS
        with contextlib.suppress(OSError):
            while self._is_established() and self._untaken() and time.monotonic() < deadline:
                time.sleep(0.005)
            if self._is_established():
                time.sleep(_READING)

    def _untaken(self) -> int:
        """Return the bytes that the peer's kernel has not taken yet."""
        return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def _is_established(self) -> bool:
        option = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return option[0] == _ESTABLISHED
