"""Which code opens a URL?"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidURL, UnknownScheme, Unsupported
from penstock.core.position import Position, PositionLike
from penstock.core.redaction import shown
from penstock.core.url import URL

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.notes import StreamNotes

__all__ = [
    "Endpoint",
    "are_same_stream",
    "create",
    "describe",
    "notes_of",
    "open_reader",
    "open_writer",
    "schemes",
    "storage_of",
]

#: Packages add a scheme by an entry point of this group that names an `Endpoint` subclass.
ENTRY_POINT_GROUP = "penstock.endpoints"


class Endpoint:
    """One scheme of URLs: how its readers and writers are opened.

    A scheme overrides what it can do; the rest says clearly that it cannot.
    """

    def open_reader(self, url: URL, start: Position) -> Reader:  # noqa: ARG002
        raise Unsupported(f"{url.scheme}: cannot be read from ({url})")

    def open_writer(self, url: URL) -> Writer:
        raise Unsupported(f"{url.scheme}: cannot be written to ({url})")

    def create(self, url: URL, *, replace: bool = False) -> None:  # noqa: ARG002
        raise Unsupported(f"{url.scheme}: has nothing to create ({url})")

    def describe(self, url: URL) -> StreamInfo:
        raise Unsupported(f"{url.scheme}: has nothing to show ({url})")

    def storage_of(self, url: URL) -> str | None:
        """Return a token of where a stream is stored: the same for all URLs of it.

        None: there is none yet, or it cannot be told.
        """
        if not url.host or not url.path.strip("/"):
            return None
        return f"{url.scheme}://{url.host}:{url.port}{url.path}"

    def notes(self, url: URL) -> StreamNotes:
        raise Unsupported(f"{url.scheme}: keeps no notes ({url})")


def open_reader(url: str, start: PositionLike = Position.START, **options: object) -> Reader:
    """Open a stream for reading; keyword options win over those in the URL.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises NotFound: there is no such stream.
    :raises DamagedQueue: there is one, and it is not readable.
    """
    parsed = URL.parse(url, options)
    return _endpoint(parsed).open_reader(parsed, Position.of(start))


def open_writer(url: str, **options: object) -> Writer:
    """Open a stream for writing, and create it if it is missing; options as `open_reader`.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises DamagedQueue: there is one, and it is not writable as it is.
    """
    parsed = URL.parse(url, options)
    return _endpoint(parsed).open_writer(parsed)


def create(url: str, *, replace: bool = False, **options: object) -> None:
    """Create a stream.

    :raises AlreadyExists: there is one already, and `replace` is not set.
    """
    parsed = URL.parse(url, options)
    _endpoint(parsed).create(parsed, replace=replace)


def describe(url: str, **options: object) -> StreamInfo:
    """Tell what a stream holds now."""
    parsed = URL.parse(url, options)
    found = _endpoint(parsed).describe(parsed)
    return dataclasses.replace(found, url=shown(found.url))


def storage_of(url: str, **options: object) -> str | None:
    """Return a token of where a stream is stored, the same however it is named; None: unknown.

    :raises ConnectionLost: its server cannot be reached.
    """
    parsed = URL.parse(url, options)
    return _endpoint(parsed).storage_of(parsed)


def are_same_stream(one: str, other: str) -> bool:
    """Tell whether two URLs name one stream, as far as can be known.

    :raises ConnectionLost: a server cannot be reached.
    """
    try:
        if replace(URL.parse(one), text="") == replace(URL.parse(other), text=""):
            return True
        stored = storage_of(one)
        return stored is not None and stored == storage_of(other)
    except InvalidURL:
        return False  # of a reader or writer that no endpoint has opened


def notes_of(url: str) -> StreamNotes:
    """Return the notes that a stream keeps of its writers; it need not be there yet.

    :raises Unsupported: it keeps none.
    """
    parsed = URL.parse(url)
    return _endpoint(parsed).notes(parsed)


def schemes() -> list[str]:
    """Return the schemes that are installed."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


@lru_cache(maxsize=256)  # bounded: a URL from outside may name any scheme
def _load(scheme: str) -> Endpoint | None:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        endpoint: Endpoint = entry.load()()
        return endpoint
    return None


def _endpoint(url: URL) -> Endpoint:
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
