"""How does a router get its sockets, close them, and learn what the kernel dropped at them?"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.model import Cut

__all__ = ["LARGEST_DATAGRAM", "close", "drain", "kernel_drops", "tcp_socket", "udp_socket"]

LARGEST_DATAGRAM: Final = 65_535
#: Requested buffer size of each socket; the kernel may grant less.
_BUFFER: Final = 8 << 20
#: Datagrams counted at a socket that is about to close; its buffer holds fewer.
_MOST_DRAINED: Final = 50_000

#: Linux: memory counters of a socket; the last of nine is the number of drops.
_SO_MEMINFO: Final = 55
_MEMINFO = struct.Struct("=9I")
#: Linux: as SO_RCVBUF, but also beyond the system's limit. For root.
_SO_RCVBUFFORCE: Final = 33
#: Close by a reset: unsent data is discarded.
_ABRUPT: Final = struct.pack("ii", 1, 0)


def udp_socket(family: int, address: tuple[Any, ...] | None = None) -> socket.socket:
    """Return a non-blocking UDP socket with a large buffer.

    :raises OSError: the operating system refuses
    """
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        with contextlib.suppress(OSError):  # not root, or not Linux
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        if address is not None:
            sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def kernel_drops(sock: socket.socket) -> int:
    """Return how many datagrams the kernel dropped at a socket because its buffer was full."""
    try:
        drops: int = _MEMINFO.unpack(
            sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        )[-1]
    except (OSError, struct.error):  # not Linux: unknown
        return 0
    return drops


def drain(sock: socket.socket, tally: DirectionCounters) -> None:
    """Count the datagrams left in a socket that is about to close."""
    with contextlib.suppress(OSError):
        for _ in range(_MOST_DRAINED):  # bounded, even if the peer keeps sending
            size = len(sock.recv(LARGEST_DATAGRAM))
            tally.arrived += 1
            tally.arrived_bytes += size
            tally.discarded += 1


def tcp_socket(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a TCP socket that is bound, but not listening yet.

    :raises OSError: the operating system refuses
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def close(sock: socket.socket, how: Cut) -> None:
    """Close a connection: by a reset, or orderly."""
    with contextlib.suppress(OSError):  # the peer may have been faster
        if how == "rst":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABRUPT)
        else:
            sock.shutdown(socket.SHUT_WR)
    sock.close()
