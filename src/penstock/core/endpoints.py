"""Which code opens a URL?"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import hashlib
import os
import re
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple
from urllib.parse import unquote

from penstock.core.capabilities import Listable, Removable, Resizable
from penstock.core.errors import InvalidURL, UnknownScheme, Unsupported
from penstock.core.overflow import DropReason
from penstock.core.position import Position, PositionLike
from penstock.core.redaction import is_secret, shown
from penstock.core.url import URL, escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.interfaces import Reader, StreamInfo, Writer

__all__ = [
    "OWN_ENDPOINTS",
    "Endpoint",
    "Identity",
    "are_same_stream",
    "cannot_carry",
    "create",
    "describe",
    "endpoint_of",
    "file_name_of",
    "find_streams",
    "identity",
    "is_named_by",
    "is_pattern",
    "open_reader",
    "open_writer",
    "remove",
    "resize",
    "schemes",
    "storage_of",
]

#: The endpoints that come with Penstock, by scheme. Not entry points: to look those up takes
#: longer than to put a message.
OWN_ENDPOINTS: Final[Mapping[str, str]] = {
    "arrow": "penstock.protocols.files.endpoint:ArrowEndpoint",
    "cfgrid": "penstock.radar.file_endpoints:CfGridEndpoint",
    "cfradial": "penstock.radar.file_endpoints:CfRadialEndpoint",
    "csv": "penstock.protocols.files.endpoint:CsvEndpoint",
    "flight": "penstock.protocols.flight.endpoint:FlightEndpoint",
    "flight+tls": "penstock.protocols.flight.endpoint:FlightEndpoint",
    "fmq": "penstock.queue.endpoint:FmqEndpoint",
    "fmqp": "penstock.protocols.lrose.endpoint:FmqpEndpoint",
    "iwrf": "penstock.radar.iwrf.endpoint:IwrfEndpoint",
    "iwrf+fmq": "penstock.radar.iwrf.endpoint:IwrfQueueEndpoint",
    "iwrf+fmqp": "penstock.radar.iwrf.endpoint:IwrfQueueEndpoint",
    "iwrf+tcp": "penstock.radar.iwrf.endpoint:IwrfTcpEndpoint",
    "jrtc+tcp": "penstock.protocols.jrtc.endpoint:JrtcEndpoint",
    "jrtc+udp": "penstock.protocols.jrtc.endpoint:JrtcEndpoint",
    "jsonl": "penstock.protocols.files.endpoint:JsonLinesEndpoint",
    "latest": "penstock.registry.latest_endpoint:LatestEndpoint",
    "lhhttt": "penstock.protocols.lhhttt.endpoint:LhhtttEndpoint",
    "lhhttt+tcp": "penstock.protocols.lhhttt.endpoint:LhhtttEndpoint",
    "lhhttt+unix": "penstock.protocols.lhhttt.endpoint:LhhtttEndpoint",
    "log": "penstock.queue.log.endpoint:LogEndpoint",
    "mcap": "penstock.protocols.files.endpoint:McapEndpoint",
    "parquet": "penstock.protocols.files.endpoint:ParquetEndpoint",
    "psi": "penstock.protocols.psi.endpoint:PsiEndpoint",
    "up+mqtt": "penstock.protocols.uprotocol.endpoint:UpMqttEndpoint",
    "up+zenoh": "penstock.protocols.uprotocol.endpoint:UpZenohEndpoint",
}
#: Packages add a scheme by an entry point of this group that names an `Endpoint` subclass.
ENTRY_POINT_GROUP: Final = "penstock.endpoints"
#: The most characters of a URL in a file name.
_LONGEST: Final = 80


class Identity(NamedTuple):
    """The location of a stream, independent of access options."""

    kind: str
    #: The path on this machine, with links resolved; or `//host:port/path`. Escaped as in a URL.
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
        """Return the identity of the stream at a URL.

        :param port: the default port
        :param options: names of the options that select the stream
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
        """The path on this machine; None: it is on another machine."""
        if self.place.startswith("//"):
            return None
        return Path(unquote(self.place.partition("?")[0], errors="surrogateescape"))

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


class Endpoint:
    """One URL scheme: opens its readers and writers.

    A subclass overrides what it supports; the rest raises `Unsupported`. Optional features are
    in `capabilities`: `class MyEndpoint(Listable, Endpoint)`.
    """

    #: Why the oldest messages of its streams are dropped.
    oldest_go_by: ClassVar[DropReason] = DropReason.OVERRUN
    #: Whether written messages can be read again. If not, a reader would stand where their
    #: receiver does, and is not opened to look at them.
    can_be_reread: ClassVar[bool] = True

    def open_reader(self, url: URL, start: Position) -> Reader:  # noqa: ARG002
        raise Unsupported(f"{url.scheme}: cannot be read from ({url})")

    def open_writer(self, url: URL) -> Writer:
        raise Unsupported(f"{url.scheme}: cannot be written to ({url})")

    def reread(self, url: URL) -> Reader:
        """Open the stream of a writer's URL at its oldest message, to see what is there.

        A subclass whose readers take other options than its writers overrides it.

        :raises NotFound: the stream does not exist yet.
        :raises Unsupported: its messages cannot be read again.
        """
        if not self.can_be_reread:
            raise Unsupported(f"{url} cannot be read again")
        return self.open_reader(url, Position.START)

    def create(self, url: URL, *, replace: bool = False) -> None:  # noqa: ARG002
        raise Unsupported(
            f"{url.scheme}: has nothing to create ({url})", hint="write to it: put, cp"
        )

    def describe(self, url: URL) -> StreamInfo:
        raise Unsupported(f"{url.scheme}: has nothing to show ({url})")

    def identity(self, url: URL) -> Identity:
        """Return the location of a stream, from its URL alone. It never changes.

        By default all options except secrets select the stream; a subclass leaves out those that
        do not.
        """
        return Identity.of(url, options=[name for name in url.options if not is_secret(name)])

    def storage_of(self, url: URL) -> str | None:  # noqa: ARG002
        """Return a token of the storage at a URL now: the same for all URLs of one stream.

        None: the stream does not exist yet, or its storage is unknown.

        :raises ConnectionLost: its server cannot be reached.
        """
        return None

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        """Return the fields that messages of a stream do not keep, each with what happens to it.

        Nothing is opened: what is not known so is left out, and the writer tells all.
        """
        return {}

    def relay_options(self, url: URL) -> dict[str, str]:  # noqa: ARG002
        """Return options for a caller that moves large batches and handles outages itself."""
        return {}


def open_reader(url: str, start: PositionLike = Position.START, **options: object) -> Reader:
    """Open a stream for reading; keyword options win over those in the URL.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises NotFound: the stream does not exist.
    :raises DamagedQueue: the stream is not readable.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).open_reader(parsed, Position.of(start))


def open_writer(url: str, **options: object) -> Writer:
    """Open a stream for writing, and create it if it is missing; options as `open_reader`.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: an option is unknown or its value does not fit.
    :raises DamagedQueue: the stream is damaged and not writable.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).open_writer(parsed)


def create(url: str, *, replace: bool = False, **options: object) -> None:
    """Create a stream.

    :raises AlreadyExists: the stream exists, and `replace` is not set.
    """
    parsed = URL.parse(url, options)
    endpoint_of(parsed).create(parsed, replace=replace)


def remove(url: str, *, force: bool = False) -> None:
    """Remove a stream with all its messages.

    :raises Unsupported: this kind of stream cannot be removed from here.
    :raises InUse: a reader or writer has it open, and `force` is not set.
    :raises NotFound: no stream has this URL.
    """
    endpoint, parsed = endpoint_of(url), URL.parse(url)
    if not isinstance(endpoint, Removable):
        raise Unsupported(
            f"{parsed.scheme}: cannot be removed from here ({parsed})",
            hint="remove it where it is kept",
        )
    endpoint.remove(parsed, force=force)


def resize(url: str, **options: object) -> None:
    """Resize a stream, and keep its messages.

    :raises Unsupported: this kind of stream has no size.
    :raises InvalidOption: its messages do not fit.
    :raises LockTimeout: a writer holds the lock.
    """
    endpoint, parsed = endpoint_of(url), URL.parse(url, options)
    if not isinstance(endpoint, Resizable):
        raise Unsupported(f"{parsed.scheme}: has no size that can be changed ({parsed})")
    endpoint.resize(parsed)


def describe(url: str, **options: object) -> StreamInfo:
    """Describe a stream's content and size."""
    parsed = URL.parse(url, options)
    found = endpoint_of(parsed).describe(parsed)
    return dataclasses.replace(found, url=shown(found.url))


def storage_of(url: str, **options: object) -> str | None:
    """Return a token of a stream's storage, the same for all its URLs; None: unknown.

    :raises ConnectionLost: its server cannot be reached.
    """
    parsed = URL.parse(url, options)
    return endpoint_of(parsed).storage_of(parsed)


def identity(url: str) -> Identity:
    """Return the location of a stream: the key of its checkpoints, notes and states.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    """
    return endpoint_of(url).identity(URL.parse(url))


def cannot_carry(url: str) -> Mapping[str, str]:
    """Return the fields that messages of a stream do not keep, as far as that is known unopened.

    :raises InvalidURL: the text is no URL, or no installed endpoint has its scheme.
    :raises InvalidOption: the stream is not of the kind that the URL says.
    """
    return endpoint_of(url).cannot_carry(URL.parse(url))


def file_name_of(url: str) -> str:
    """Return a readable file name that is unique to a URL."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:_LONGEST]
    # `radar_1` and `radar-1`, or two topics of one broker, need different names.
    return f"{plain}-{hashlib.sha256(url.encode(errors='surrogateescape')).hexdigest()[:12]}"


def are_same_stream(one: str, other: str) -> bool:
    """Tell whether two URLs name one stream, as far as is known.

    :raises ConnectionLost: a server cannot be reached.
    """
    try:
        if identity(one) == identity(other):
            return True
        stored = storage_of(one)
        return stored is not None and stored == storage_of(other)
    except InvalidURL:
        return False  # a reader or writer not opened by an endpoint


def is_pattern(url: str) -> bool:
    """Tell whether a URL is a pattern for any number of streams: `fmq:/data/*`."""
    return URL.parse(url).has_wildcards and isinstance(endpoint_of(url), Listable)


def find_streams(url: str) -> list[str]:
    """Return the URLs of the streams that match a pattern, sorted; any other URL as it is.

    :raises ConnectionLost: a server cannot be reached.
    """
    endpoint, parsed = endpoint_of(url), URL.parse(url)
    if not isinstance(endpoint, Listable) or not parsed.has_wildcards:
        return [url]
    return sorted(endpoint.find(parsed))


def is_named_by(url: str, pattern: str) -> bool:
    """Tell whether `pattern` names the stream of `url`, or may match it."""
    one, other = identity(url), identity(pattern)
    if one == other:
        return True
    return (
        is_pattern(pattern)
        and one.kind == other.kind
        # A wildcard matches part of a name and no `/`, as in a shell.
        and one.place.count("/") == other.place.count("/")
        and fnmatch.fnmatchcase(one.place, other.place)
    )


def schemes() -> list[str]:
    """Return the schemes that are installed."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - reads all installed packages

    added = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted({*OWN_ENDPOINTS, *added})


@lru_cache(maxsize=256)  # bounded: a URL from outside may name any scheme
def _load(scheme: str) -> Endpoint | None:
    if (own := OWN_ENDPOINTS.get(scheme)) is not None:
        module, _, name = own.partition(":")
        endpoint: Endpoint = getattr(import_module(module), name)()
        return endpoint
    from importlib.metadata import entry_points  # noqa: PLC0415 - as above

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        added: Endpoint = entry.load()()
        return added
    return None


def endpoint_of(url: str | URL) -> Endpoint:
    """Return the endpoint of a URL's scheme, to query its capabilities.

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
