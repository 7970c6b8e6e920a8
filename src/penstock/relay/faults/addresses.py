"""Where does a router listen, and where does it send to?"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any, NamedTuple

from penstock.core.errors import InvalidOption, StorageError

__all__ = ["Place", "is_loopback", "parse_address", "resolve", "shown"]

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


def is_loopback(place: Place) -> bool:
    """Tell whether only this machine can reach an address."""
    return ipaddress.ip_address(str(place.address[0]).partition("%")[0]).is_loopback


def shown(address: tuple[Any, ...]) -> str:
    """Format an address for people."""
    host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
    return f"{host}:{address[1]}"
