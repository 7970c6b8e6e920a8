"""Which code opens a URL?"""

from __future__ import annotations

import dataclasses
import difflib
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from penstock.core.errors import UnknownScheme, Unsupported
from penstock.core.position import Position, PositionLike
from penstock.core.redaction import shown
from penstock.core.url import URL

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer

__all__ = ["Endpoint", "create", "describe", "open_reader", "open_writer", "schemes"]

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
