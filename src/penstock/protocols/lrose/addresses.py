"""Where is a remote queue, and how do LROSE and we write that?

`fmqp://host:port/path` is ours, `fmqp:[translator]:[paramfile]//host:port:path` is LROSE's
(spec lrose 2.1).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidURL

if TYPE_CHECKING:
    from penstock.core.url import URL

__all__ = ["Address", "default_port", "parse_address", "path_of"]

#: Ports of LROSE's servers are so many above `DS_BASE_PORT`.
_BASE_PORT: Final = 5430
_OFFSETS: Final = {"dmapp": 4, "fmqp": 13, "ldatap": 17}
_LARGEST_PORT: Final = 65535
#: Whose paths are directories, and may be written with a slash at the end.
_OF_DIRECTORIES: Final = frozenset({"ldatap"})

#: What follows the scheme in LROSE's spelling.
_LROSE: Final = re.compile(
    r"(?P<translator>[^:]*):(?P<params>.*?)//"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:/\[\]]*):(?P<port>[0-9]{0,5}):(?P<path>.*)",
    re.DOTALL,
)


class Address(NamedTuple):
    """A server, and a path there."""

    scheme: str
    host: str
    port: int
    #: Relative to the server's root, or absolute.
    path: str

    @property
    def server(self) -> str:
        """`host:port`, for people and for LROSE."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """As LROSE writes it, and as its servers have to be told."""
        return f"{self.scheme}:://{self.server}:{self.path}"


def default_port(scheme: str) -> int:
    """Return the port of a service; the environment's `DS_BASE_PORT` shifts all of them."""
    said = os.environ.get("DS_BASE_PORT", "")
    base = int(said) if said.isascii() and said.isdigit() and len(said) <= 5 else _BASE_PORT  # noqa: PLR2004
    return min(base + _OFFSETS[scheme], _LARGEST_PORT)


def parse_address(url: URL) -> Address:
    """Take the address out of a URL of either spelling.

    :raises InvalidURL: it names no path, or is neither.
    """
    if url.host is None and (match := _LROSE.fullmatch(url.path)):
        host, path = match["host"].strip("[]"), match["path"]
        port = int(match["port"] or 0)
    else:
        host, path, port = url.host or "", url.path, url.port or 0
        if url.host is None:
            raise InvalidURL(
                url.text,
                "it names no server",
                hint=f"write {url.scheme}://host:port/path, or {url.scheme}:://host:port:path",
            )
        # The first slash ends the host; a second one makes the path absolute there.
        path = path[1:]
    if not path or (path.endswith("/") and url.scheme not in _OF_DIRECTORIES):
        raise InvalidURL(
            url.text, "it names nothing there", hint=f"write {url.scheme}://host:port/path"
        )
    if port > _LARGEST_PORT:
        raise InvalidURL(url.text, f"there is no port {port}")
    return Address(url.scheme, host or "localhost", port or default_port(url.scheme), path)


def path_of(text: str) -> str:
    """Return the path in what a client says that it wants to open.

    :raises InvalidURL: there is none.
    """
    scheme, colon, rest = text.partition(":")
    match = _LROSE.fullmatch(rest) if colon and scheme.isalnum() else None
    path = match["path"] if match else text
    if not path:
        raise InvalidURL(text[:200], "it names no queue")
    return path
