"""Which code opens a URL?"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from urllib.parse import unquote

from penstock.core.capabilities import Listable
from penstock.core.errors import InvalidURL, UnknownScheme, Unsupported
from penstock.core.overflow import DropReason
from penstock.core.position import Position, PositionLike
from penstock.core.redaction import is_secret, shown
from penstock.core.url import URL, escaped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer

__all__ = [
    "Endpoint",
    "Identity",
    "are_same_stream",
    "create",
    "describe",
    "endpoint_of",
    "find_streams",
    "identity",
    "is_named_by",
    "is_pattern",
    "open_reader",
    "open_writer",
    "schemes",
    "storage_of",
]

#: Packages add a scheme by an entry point of this group that names an `Endpoint` subclass.
ENTRY_POINT_GROUP = "penstock.endpoints"


class Identity(NamedTuple):
    """Where a stream is, whatever the options by which it is reached."""

    kind: str
    #: The path on this machine, with no link in it; or `//host:port/path`. As in a URL.
    place: str

    @classmethod
    def of(
        cls,
        url: URL,
        *,
        kind: str | None = None,
        path: str | None = None,
        port: int | None = None,
        options: Iterable[str] = (),
    ) -> Identity:
        """Return the identity of what a URL names.

        :param port: the one that is meant where the URL has none
        :param options: those that say which stream it is
        """
        path = url.path if path is None else path
        if url.host is None:
            place = escaped(os.path.realpath(path))
        else:
            port = url.port or port
            host = f"[{url.host}]" if ":" in url.host else url.host
            place = f"//{host}{'' if port is None else f':{port}'}{escaped(path)}"
        named = sorted(url.options.keys() & set(options))
        said = "&".join(f"{name}={url.options[name]}" for name in named)
        return cls(kind or url.scheme, f"{place}?{said}" if said else place)

    @property
    def path(self) -> Path | None:
        """Where it is on this machine; None: it is on another."""
        if self.place.startswith("//"):
            return None
        return Path(unquote(self.place.partition("?")[0], errors="surrogateescape"))

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


class Endpoint:
    """One scheme of URLs: how its readers and writers are opened.

    A scheme overrides what it can do; the rest says clearly that it cannot. What only some can do
    is in `capabilities`: `class MyEndpoint(Listable, Endpoint)`.
    """

    #: What becomes of the oldest messages of its streams.
    oldest_go_by: ClassVar[DropReason] = DropReason.OVERRUN

    def open_reader(self, url: URL, start: Position) -> Reader:  # noqa: ARG002
        raise Unsupported(f"{url.scheme}: cannot be read from ({url})")

    def open_writer(self, url: URL) -> Writer:
        raise Unsupported(f"{url.scheme}: cannot be written to ({url})")

    def create(self, url: URL, *, replace: bool = False) -> None:  # noqa: ARG002
        raise Unsupported(f"{url.scheme}: has nothing to create ({url})")

    def describe(self, url: URL) -> StreamInfo:
        raise Unsupported(f"{url.scheme}: has nothing to show ({url})")

    def identity(self, url: URL) -> Identity:
        """Return where a stream is, by its URL alone. It is the same for ever.

        As it is here, every option but a secret says which stream is meant; leave out those that
        do not.
        """
        return Identity.of(url, options=[name for name in url.options if not is_secret(name)])

    def storage_of(self, url: URL) -> str | None:  # noqa: ARG002
        """Return a token of what is behind a URL now: the same for all URLs of one stream.

        None: there is nothing yet, or it cannot be told.

        :raises ConnectionLost: its server cannot be reached.
        """
        return None

    def relay_options(self, url: URL) -> dict[str, str]:  # noqa: ARG002
        """Return options for whoever moves large batches, and waits for the other side itself."""
        return {}


def open_reader(url: str, start: PositionLike = Position.START, **options: object) -> Reader:
    """Open a stream for reading; keyword options win over those in the URL.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises NotFound: there is no such stream.
    :raises DamagedQueue: there is one, and it is not readable.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).open_reader(parsed, Position.of(start))


def open_writer(url: str, **options: object) -> Writer:
    """Open a stream for writing, and create it if it is missing; options as `open_reader`.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises DamagedQueue: there is one, and it is not writable as it is.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).open_writer(parsed)


def create(url: str, *, replace: bool = False, **options: object) -> None:
    """Create a stream.

    :raises AlreadyExists: there is one already, and `replace` is not set.
    """
    parsed = URL.parse(url, options)
    endpoint_of(parsed).create(parsed, replace=replace)


def describe(url: str, **options: object) -> StreamInfo:
    """Tell what a stream holds now."""
    parsed = URL.parse(url, options)
    found = endpoint_of(parsed).describe(parsed)
    return dataclasses.replace(found, url=shown(found.url))


def storage_of(url: str, **options: object) -> str | None:
    """Return a token of where a stream is stored, the same however it is named; None: unknown.

    :raises ConnectionLost: its server cannot be reached.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).storage_of(parsed)


def identity(url: str) -> Identity:
    """Return where a stream is: what checkpoints, notes and states are kept under.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    """
    return endpoint_of(url).identity(URL.parse(url))


def are_same_stream(one: str, other: str) -> bool:
    """Tell whether two URLs name one stream, as far as can be known.

    :raises ConnectionLost: a server cannot be reached.
    """
    try:
        if identity(one) == identity(other):
            return True
        stored = storage_of(one)
        return stored is not None and stored == storage_of(other)
    except InvalidURL:
        return False  # of a reader or writer that no endpoint has opened


def is_pattern(url: str) -> bool:
    """Tell whether a URL stands for any number of streams: `fmq:/data/*`."""
    return URL.parse(url).has_wildcards and isinstance(endpoint_of(url), Listable)


def find_streams(url: str) -> list[str]:
    """Return the URLs of the streams that a pattern finds now, in order; of any other URL itself.

    :raises ConnectionLost: a server cannot be reached.
    """
    endpoint, parsed = endpoint_of(url), URL.parse(url)
    if not isinstance(endpoint, Listable) or not parsed.has_wildcards:
        return [url]
    return sorted(endpoint.find(parsed))


def is_named_by(url: str, pattern: str) -> bool:
    """Tell whether a URL names a stream that another one names, or may find if it is a pattern."""
    one, other = identity(url), identity(pattern)
    if one == other:
        return True
    return (
        is_pattern(pattern)
        and one.kind == other.kind
        # A wildcard stands for a part of a name, as in a shell, and not for directories.
        and one.place.count("/") == other.place.count("/")
        and fnmatch.fnmatchcase(one.place, other.place)
    )


def schemes() -> list[str]:
    """Return the schemes that are installed."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


@lru_cache(maxsize=256)  # bounded: a URL from outside may name any scheme
def _load(scheme: str) -> Endpoint | None:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        endpoint: Endpoint = entry.load()()
        return endpoint
    return None


def endpoint_of(url: str | URL) -> Endpoint:
    """Return what has the scheme of a URL, to ask what it can do.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    """
    if isinstance(url, str):
        url = URL.parse(url)
    endpoint = _load(url.scheme)
    if endpoint is not None:
        return endpoint
    known = schemes()
    near = difflib.get_close_matches(url.scheme, known, n=1)
    raise UnknownScheme(
        url.text,
        f"no endpoint answers to {url.scheme}:",
        hint=f"did you mean {near[0]}:?" if near else f"known schemes: {', '.join(known)}",
    )
