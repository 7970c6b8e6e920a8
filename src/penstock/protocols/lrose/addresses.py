"""Where is a remote queue: in a URL of ours, in one of LROSE's, and below a server's root?

`fmqp://host:port/path` is ours, `fmqp:[translator]:[paramfile]//host:port:path` is LROSE's
(docs/specs/lrose.md 2.1). A server looks the path up below its root, and nowhere else. Arguments
may follow in LROSE's spelling, after a question mark: what they say is for the client.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidURL
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.log.segments import is_log
from penstock.queue.wide.file import SUFFIX

if TYPE_CHECKING:
    from penstock.core.url import URL

__all__ = ["Address", "QueueRoot", "default_port", "parse_address", "path_of"]

#: Offsets of the ports of LROSE's servers from `DS_BASE_PORT`.
_BASE_PORT: Final = 5430
#: LROSE passes over a smaller one.
_LEAST_BASE: Final = 1024
_OFFSETS: Final = {"dmapp": 4, "fmqp": 13, "ldatap": 17}
_LARGEST_PORT: Final = 65535
#: Schemes whose paths are directories, and may end with a slash.
_OF_DIRECTORIES: Final = frozenset({"ldatap"})

#: What follows the scheme in LROSE's spelling.
_LROSE: Final = re.compile(
    r"(?P<translator>[^:]*):(?P<params>.*?)//"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:/\[\]]*):(?P<port>[^:]*):(?P<path>.*)",
    re.DOTALL,
)
#: A port in it; `default`, nothing and 0 mean that of the service.
_PORT: Final = re.compile(r"default|[0-9]{0,5}")


class Address(NamedTuple):
    """A server, and a path there."""

    scheme: str
    host: str
    port: int
    #: Relative to the server's root, or absolute.
    path: str

    @property
    def server(self) -> str:
        """`host:port`, for messages and for LROSE."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """LROSE's spelling, which its servers expect."""
        return f"{self.scheme}:://{self.server}:{self.path}"


def default_port(scheme: str) -> int:
    """Return the port of a service; the environment's `DS_BASE_PORT` shifts all of them."""
    said = re.match(r"\s*\+?([0-9]{1,5})(?![0-9])", os.environ.get("DS_BASE_PORT", ""), re.ASCII)
    base = int(said[1]) if said and int(said[1]) >= _LEAST_BASE else _BASE_PORT
    return min(base + _OFFSETS[scheme], _LARGEST_PORT)


def parse_address(url: URL) -> Address:
    """Parse the address in a URL of either spelling.

    :raises InvalidURL: it names no path, or has neither spelling.
    """
    if url.host is None and (match := _LROSE.fullmatch(url.path)):
        host, path = match["host"].strip("[]"), match["path"]
        said = match["port"]
        if not _PORT.fullmatch(said):
            raise InvalidURL(url.text, f"there is no port {said}")
        port = int(said) if said.isdigit() else 0
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
    if "?" in path:
        raise InvalidURL(
            url.text, "it has a question mark in its path", hint="for LROSE, arguments begin there"
        )
    return Address(url.scheme, host or "localhost", port or default_port(url.scheme), path)


def path_of(text: str) -> str:
    """Return the path in a client's request to open, without arguments.

    :raises InvalidURL: it has no path.
    """
    scheme, colon, rest = text.partition(":")
    match = _LROSE.fullmatch(rest) if colon and scheme.isalnum() else None
    path = (match["path"] if match else text).partition("?")[0]
    if not path:
        raise InvalidURL(text[:200], "it names no queue")
    return path


# --- paths below the root of a server -----------------------------------------------------------

_LONGEST: Final = 1024
_LONGEST_PART: Final = 240
_DEEPEST: Final = 32
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
#: Endings of the files that may hold a queue.
_FILES: Final = ("", SUFFIX, ".stat", ".buf", ".lock")


class QueueRoot:
    """The directory that a server serves; nothing outside of it can be named."""

    def __init__(self, folder: Path, *, shared_memory: bool = False) -> None:
        self.folder = folder.resolve()
        self._told = folder.absolute()
        self._shared_memory = shared_memory

    def path(self, said: str) -> str:
        """Return the path of the queue that a client named, as LROSE's URL or as a path.

        :raises InvalidURL: it leads out of the root, or is not a valid name.
        """
        return self.below(path_of(said))

    def below(self, name: str) -> str:
        """Return the path for one that is absolute, or relative to the root.

        :raises InvalidURL: it leads out of the root, or is not a valid name.
        """
        if len(os.fsencode(name)) > _LONGEST or _CONTROL.search(name):
            raise InvalidURL(name[:100], "no queue has such a name")
        if name.startswith("/"):
            try:
                name = str(Path(os.path.normpath(name)).relative_to(self.folder))
            except ValueError:
                raise InvalidURL(name, "it is not below the directory that is served") from None
        parts = [part for part in name.split("/") if part not in {"", "."}]
        if not parts or ".." in parts or len(parts) > _DEEPEST:
            raise InvalidURL(name, "it is not below the directory that is served")
        if any(len(os.fsencode(part)) > _LONGEST_PART for part in parts):
            raise InvalidURL(name, "a part of it is longer than the name of a file can be")
        path = str(self.folder.joinpath(*parts))
        # No symbolic link in the path may lead out of the root.
        for ending in _FILES:
            if not Path(os.path.realpath(path + ending)).is_relative_to(self.folder):
                raise InvalidURL(name, "it leads out of the directory that is served")
        # A log's segments look like queues, and belong to the log.
        if any(map(is_log, (self.folder.joinpath(*parts[:depth]) for depth in range(len(parts))))):
            raise InvalidURL(
                name, "it is inside of a log", hint="penstock serve flight serves the log itself"
            )
        if shared_memory_key(path) is not None and not self._shared_memory:
            raise InvalidURL(
                name,
                "a queue in shared memory is not below the directory that is served",
                hint="start the server with --shared-memory",
            )
        return path

    def as_told(self, path: str) -> str:
        """Return the path of a queue below the root as given in the options, links unresolved."""
        return str(self._told / Path(path).relative_to(self.folder))

    def hide(self, text: str) -> str:
        """Return a text without the path of the root, which clients must not see."""
        return text.replace(f"{self.folder}/", "")
