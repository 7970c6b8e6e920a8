"""Where does a fault router listen and send to, and what did the kernel drop at its sockets?"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import InvalidOption, StorageError

if TYPE_CHECKING:
    from penstock.relay.faults.counters import DirectionCounters
    from penstock.relay.faults.model import Cut

__all__ = [
    "LARGEST_DATAGRAM",
    "Place",
    "close",
    "drain",
    "kernel_drops",
    "parse_address",
    "resolve",
    "shown",
    "tcp_socket",
    "udp_socket",
]

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]\s]*)):(?P<port>[0-9]{1,5})"
)
_LOOPBACK = "127.0.0.1"


class Place(NamedTuple):
    """A resolved socket address."""

    family: socket.AddressFamily
    #: (host, port), and two more numbers for IPv6.
    address: tuple[Any, ...]

    def __str__(self) -> str:
        return shown(self.address)


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Parse `host:port`, `[::1]:port` or `:port` (this machine).

    :raises InvalidOption: the text is not an address
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise InvalidOption(option, text, "expected HOST:PORT, such as 127.0.0.1:5443 or [::1]:53")
    return match["six"] or match["host"] or _LOOPBACK, int(match["port"])


def resolve(where: tuple[str, int], option: str, kind: socket.SocketKind) -> Place:
    """Resolve an address.

    :raises InvalidOption: the port is out of range
    :raises StorageError: the host is unknown
    """
    host, port = where
    lowest = 0 if option == "listen" else 1
    if not lowest <= port <= 65535:  # noqa: PLR2004 - what 16 bits hold
        raise InvalidOption(option, f"{host}:{port}", f"a port is from {lowest} to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=kind)
    except (socket.gaierror, UnicodeError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise StorageError(
            "looking up", host, cause, hint=f"check the address of {option}"
        ) from error
    family, _, _, _, address = found[0]
    return Place(family, address)


def shown(address: tuple[Any, ...]) -> str:
    """Format an address for people."""
    host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
    return f"{host}:{address[1]}"


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
