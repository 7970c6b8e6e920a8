"""Who may connect, with which token, how many at once, and which streams may they name?"""

from __future__ import annotations

import hmac
import logging
import os
import re
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from pyarrow import flight

from penstock.core.errors import InvalidOption, InvalidURL, NotFound
from penstock.core.units import parse_size
from penstock.protocols.flight.errors import ServerBusy
from penstock.protocols.flight.wire import MAX_NAME, Kind, decode_name, encode_name
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.log.segments import is_log
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import SUFFIX, Geometry, file_of
from penstock.queue.wide.layout import SLOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "DEFAULT_PORT",
    "STAGING",
    "Clients",
    "Place",
    "Root",
    "TokenGate",
    "check_size",
    "check_token",
    "load_token",
]

log = logging.getLogger(__name__)

_LONGEST_TOKEN: Final = 4096
#: Connections remembered, to log each of them once.
_REMEMBERED: Final = 1000


def load_token(file: Path) -> bytes:
    """Read a token from a file: one line.

    :raises InvalidOption: the file holds no token, or not a valid one.
    :raises StorageError: the file cannot be read.
    """
    with storage_errors("reading", str(file)), file.open("rb") as stream:
        token = stream.read(_LONGEST_TOKEN + 1).strip()
    return check_token(token, "token_file", file)


def check_token(token: bytes, option: str, where: object) -> bytes:
    """Check that a token is valid in a header. Errors never show the token."""
    if not 0 < len(token) <= _LONGEST_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):  # noqa: PLR2004
        raise InvalidOption(
            option, str(where), f"a token is 1 to {_LONGEST_TOKEN} visible ASCII characters"
        )
    return token


class TokenGate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Admits only calls that carry the token."""

    def __init__(self, token: bytes) -> None:
        super().__init__()
        self._expected = b"Bearer " + token

    def __repr__(self) -> str:
        return "<TokenGate>"

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        del info
        given = [value for key, values in headers.items() if key.lower() == "authorization"
                 for value in values]  # fmt: skip
        found = given[0] if len(given) == 1 else b""
        found = found.encode(errors="replace") if isinstance(found, str) else bytes(found)
        # In constant time, so that timing does not reveal how much of a guess is right.
        if not hmac.compare_digest(found, self._expected):
            reason = "the token is wrong" if given else "a token is needed"
            log.warning("a client was refused: %s", reason)
            raise flight.FlightUnauthenticatedError(reason)


class Clients:
    """The connections with a call under way, up to a limit. Safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._known: OrderedDict[str, None] = OrderedDict()
        #: Connections seen so far, and calls made and refused.
        self.seen = 0
        self.calls = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Count a call of a connection while it runs.

        :raises ServerBusy: the limit of clients is reached.
        """
        with self._lock:
            if peer not in self._calls and len(self._calls) >= self._limit:
                self.refused += 1
                log.warning("%s was refused: %d clients are here", peer, self._limit)
                raise ServerBusy(self._limit, hint="try again later, or raise --max-clients")
            self._calls[peer] += 1
            self.calls += 1
            is_new = peer not in self._known
            self._known[peer] = None
            self._known.move_to_end(peer)
            if is_new:
                self.seen += 1
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        if is_new:
            log.info("%s connected", peer)
        try:
            yield
        finally:
            with self._lock:
                self._calls[peer] -= 1
                if not self._calls[peer]:
                    del self._calls[peer]


# --- addresses ------------------------------------------------------------------------------------


DEFAULT_PORT = 8815


# --- streams below the root -----------------------------------------------------------------------


#: Folders of this name hold staged messages; no stream can have it in its name.
STAGING: Final = ".penstock-staging"

#: Most bytes of a file's name, and most levels of folders.
_LONGEST_PART: Final = 255
_DEEPEST: Final = 32
#: Most streams in one list.
_MOST_LISTED: Final = 10_000
#: Endings of the files that may hold a queue.
_FILES: Final = ("", SUFFIX, ".stat", ".buf")

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Place(NamedTuple):
    """A stream below the root."""

    #: As clients name it: relative to the root, percent-encoded.
    name: str
    kind: Kind
    path: Path
    #: Whether the stream exists.
    exists: bool

    @property
    def url(self) -> str:
        """The stream's own URL on this machine."""
        return f"{self.kind}:{quote(os.fsencode(self.path))}"


class Root:
    """The directory that a server serves; nothing outside of it can be named."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def place(self, name: str, kind: Kind | None, *, may_make: bool = False) -> Place:
        """Find a stream by the name that a client sent.

        :raises InvalidURL: the name leads out of the root, or is not valid.
        :raises InvalidOption: the stream is not of kind `kind`.
        :raises NotFound: no stream has this name, and `may_make` is false.
        """
        parts = _parts(name)
        path = self.folder.joinpath(*parts)
        self._check_inside(name, path)
        found = _kind_of(path)
        if found is not None and kind is not None and found != kind:
            raise InvalidOption("kind", kind, f"{name} is a stream of kind {found}")
        if found is None and not may_make:
            raise NotFound(f"there is no stream {name}", hint="penstock create makes one")
        decided = Kind(found or kind or Kind.QUEUE)
        if decided is Kind.QUEUE:
            _check_queue(name, path)
        return Place(encode_name("/".join(parts)), decided, path, found is not None)

    def _check_inside(self, name: str, path: Path) -> None:
        """Check that no symbolic link in the path leads out of the root."""
        for ending in _FILES:
            file = f"{path}{ending}"
            real = os.path.realpath(file)
            if not Path(real).is_relative_to(self.folder):
                raise InvalidURL(name, "it leads out of the directory that is served")
        if _kind_of(path) is Kind.LOG:
            with os.scandir(path) as entries:
                if any(entry.is_symlink() for entry in entries):
                    raise InvalidURL(name, "a link is among its segments")

    def streams(self) -> Iterator[Place]:
        """Yield the existing streams, sorted by name, up to `_MOST_LISTED`."""
        count = 0
        for folder, below, files in os.walk(self.folder):
            path = Path(folder)
            below[:] = sorted(name for name in below if name != STAGING)
            if path != self.folder and is_log(path):
                names, below[:] = [path], []
            else:
                stems = {os.path.splitext(f)[0] for f in files if f.endswith((SUFFIX, ".stat"))}  # noqa: PTH122
                names = [path / stem for stem in sorted(stems)]
            if len(path.relative_to(self.folder).parts) >= _DEEPEST - 1:
                below.clear()
            for each in names:
                try:
                    yield self.place(encode_name(str(each.relative_to(self.folder))), None)
                except (InvalidURL, NotFound, OSError):
                    continue  # no stream that clients could name
                count += 1
                if count >= _MOST_LISTED:
                    return

    def hide(self, text: str) -> str:
        """Return a text without the path of the root, which clients must not see."""
        if self.folder == self.folder.parent:
            return text  # all of the machine: there is nothing to hide
        return text.replace(f"{self.folder}/", "").replace(str(self.folder), "the root")


def _parts(name: str) -> list[str]:
    path = decode_name(name)
    if len(os.fsencode(path)) > MAX_NAME:
        raise InvalidURL(name[:60] + "…", f"a name has at most {MAX_NAME} bytes")
    if _CONTROL.search(path):
        raise InvalidURL(name, "it has a control character")
    parts = path.split("/")
    if len(parts) > _DEEPEST:
        raise InvalidURL(name, f"it is deeper than {_DEEPEST} levels")
    for part in parts:
        if part in {"", ".", "..", STAGING} or len(os.fsencode(part)) > _LONGEST_PART:
            raise InvalidURL(name, f"{part[:60]!r} cannot be a part of a stream's name")
    return parts


def _check_queue(name: str, path: Path) -> None:
    if shared_memory_key(str(path)) is not None:
        raise InvalidURL(name, "a queue in shared memory is not below the directory that is served")
    if not file_of(str(path)).endswith(SUFFIX):
        raise InvalidURL(name, "it is not a file")
    if is_log(path.parent):
        raise InvalidURL(name, "it is inside of a log", hint="open the log itself")


def _kind_of(path: Path) -> Kind | None:
    if path.is_dir() and is_log(path):
        return Kind.LOG
    is_queue = Path(file_of(str(path))).is_file() or Path(f"{path}.stat").is_file()
    return Kind.QUEUE if is_queue else None


def check_size(options: Mapping[str, str], limit: int) -> None:
    """Check that a stream with these options, its slots included, has at most `limit` bytes.

    :raises InvalidOption: it would be larger.
    """
    for of_size, of_slots in (("size", "slots"), ("segment", "segment_slots")):
        asked = {name: parse_size(options[name]) for name in (of_size, of_slots) if name in options}
        if not asked:
            continue
        slots = asked.get(of_slots)
        # The default number of slots is small.
        table = 0 if slots is None else Geometry.fitting(slots, 0, 0).slots * SLOT.size
        if asked.get(of_size, 0) + table > limit:
            name = of_size if of_size in asked else of_slots
            raise InvalidOption(
                name, options[name], f"this server makes at most {limit:,} bytes, slots included"
            )
