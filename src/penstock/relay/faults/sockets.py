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
#: What is asked of the kernel for each socket; it may give less.
_BUFFER: Final = 8 << 20
#: Datagrams counted at a socket that is about to close; its buffer holds fewer.
_MOST_DRAINED: Final = 50_000

#: Linux: counters of a socket's memory; the last of nine is what was dropped for want of it.
_SO_MEMINFO: Final = 55
_MEMINFO = struct.Struct("=9I")
#: Linux: as SO_RCVBUF, but also beyond the system's limit. For root.
_SO_RCVBUFFORCE: Final = 33
#: Close without a farewell: what is not sent yet is dropped, and the peer sees a reset.
_ABRUPT: Final = struct.pack("ii", 1, 0)


def udp_socket(family: int, address: tuple[Any, ...] | None = None) -> socket.socket:
    """Return a UDP socket that does not wait, with as much room as the kernel gives.

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
    """Return how many datagrams the kernel dropped at a socket for want of room."""
    try:
        drops: int = _MEMINFO.unpack(
            sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        )[-1]
    except (OSError, struct.error):  # not Linux: it does not say
        return 0
    return drops


def drain(sock: socket.socket, tally: DirectionCounters) -> None:
    """Count what a socket holds that is about to close."""
    with contextlib.suppress(OSError):
        for _ in range(_MOST_DRAINED):  # whoever goes on sending does not hold us up for ever
            size = len(sock.recv(LARGEST_DATAGRAM))
            tally.arrived += 1
            tally.arrived_bytes += size
            tally.discarded += 1


def tcp_socket(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a TCP socket that has a port and does not listen yet.

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
    """Close a connection: with a reset, or in good order."""
    with contextlib.suppress(OSError):  # the peer may have been faster
        if how == "rst":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABRUPT)
        else:
            sock.shutdown(socket.SHUT_WR)
    sock.close()
