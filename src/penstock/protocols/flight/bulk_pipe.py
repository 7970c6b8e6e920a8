"""How do many bytes go through a socket at once, and how is silence noticed meanwhile?"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["OnSilence", "Pipe"]

#: Called again and again while nothing moves, with the seconds since something did; raises to give
#: up.
OnSilence: TypeAlias = "Callable[[float], None]"

#: A connection that carries nothing is looked after by the system: seconds before it asks, between
#: two questions, and how many may stay without an answer.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
#: Bytes encrypted by one call.
_AT_ONCE: Final = 1 << 20
#: Parts sent by one call: the least that systems allow is 1024.
_MOST_PARTS: Final = 512


class Pipe:
    """A connection. All of a piece passes in one call of the system, if it goes well.

    Not by a timeout of Python's: then every few kilobytes would be a call, and each of those would
    wait for other threads of this process.
    """

    def __init__(self, connection: socket.socket, patience: float) -> None:
        """Use a connection; whoever waits hears of it after `patience` seconds without a byte."""
        self._socket = connection
        self._is_plain = not isinstance(connection, ssl.SSLSocket)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.wait_for(patience)

    def wait_for(self, patience: float) -> None:
        """Have whoever waits hear of it after so many seconds."""
        self._patience = patience
        if not self._is_plain or sys.platform == "win32":
            self._is_plain = False
            self._socket.settimeout(patience)
            return
        self._socket.settimeout(None)
        time = struct.pack("@ll", int(patience), max(1, int(patience % 1 * 1_000_000)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, time)

    def receive(self, view: memoryview, on_silence: OnSilence) -> bool:
        """Fill a buffer; False: the other side has ended.

        :raises ConnectionError: it ended in the middle, or broke.
        """
        flags = socket.MSG_WAITALL if self._is_plain else 0
        done, silence = 0, 0.0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:], 0, flags)
            except (BlockingIOError, TimeoutError):
                silence += self._patience
                on_silence(silence)
                continue
            except ssl.SSLEOFError:
                count = 0
            if not count:
                if not done:
                    return False
                raise ConnectionResetError("it ended in the middle of what it said")
            done, silence = done + count, 0.0
        return True

    def send(self, parts: Sequence[Any], on_silence: OnSilence) -> None:
        """Send everything, part after part.

        :raises ConnectionError: the connection broke.
        """
        left = deque(view for part in parts if len(view := memoryview(part).cast("B")))
        silence = 0.0
        while left:
            try:
                if self._is_plain:
                    count = self._socket.sendmsg([*left][:_MOST_PARTS])
                else:
                    count = self._socket.send(left[0][:_AT_ONCE])
            except (BlockingIOError, TimeoutError):
                silence += self._patience
                on_silence(silence)
                continue
            silence = 0.0
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def is_quiet(self) -> bool:
        """Tell whether nothing has come that nobody asked for, nor the end."""
        watch = select.poll()
        watch.register(self._socket, select.POLLIN | select.POLLHUP)
        return not watch.poll(0)

    def hear_no_more(self) -> None:
        """End what waits to receive; what is to be sent can still be."""
        with contextlib.suppress(OSError):
            # Not by the method of an encrypted one, which would send in the clear from then on.
            socket.socket.shutdown(self._socket, socket.SHUT_RD)

    def __del__(self) -> None:
        self.close()  # of a writer that nobody closed; without a warning, as for Flight's own

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
