"""Which pulses are behind `iwrf:`, `iwrf+fmq:`, `iwrf+fmqp:` and `iwrf+tcp:`?"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Removable
from penstock.core.endpoints import Endpoint, Identity, endpoint_of
from penstock.core.errors import InvalidURL, PositionError, Unsupported
from penstock.core.interfaces import StreamInfo
from penstock.core.options import parse_options
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.radar.iwrf.files import FileOptions, IwrfFileReader, IwrfFileWriter
from penstock.radar.iwrf.messages import CANNOT_CARRY, details_of
from penstock.radar.iwrf.queues import IwrfQueueReader, IwrfQueueWriter, QueueOptions
from penstock.radar.iwrf.tcp import IwrfTcpReader, IwrfTcpWriter, TcpOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.interfaces import Reader, Writer

__all__ = ["IwrfEndpoint", "IwrfQueueEndpoint", "IwrfTcpEndpoint"]

#: Messages that are looked at to find out which radar it is.
_LOOKED_AT: Final = 500
#: Seconds to listen to a server for that.
_LISTENED: Final = 3.0
#: What a queue is made with, if nothing is said; LROSE's programs take as much.
_QUEUE: Final = {"slots": "1000", "size": "100M"}


class IwrfEndpoint(Endpoint):
    """`iwrf:DIR`: files of packets."""

    oldest_go_by = DropReason.RETENTION

    def open_reader(self, url: URL, start: Position) -> Reader:
        return IwrfFileReader(url.text, _path(url), start, parse_options(url, FileOptions))

    def open_writer(self, url: URL) -> Writer:
        return IwrfFileWriter(url.text, _path(url), parse_options(url, FileOptions))

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return CANNOT_CARRY

    def identity(self, url: URL) -> Identity:
        return Identity.of(url)

    def describe(self, url: URL) -> StreamInfo:
        place = _path(url)
        options = parse_options(url, FileOptions)
        with IwrfFileReader(url.text, place, Position.START, options) as reader:
            first = reader.read(0)
            payloads = [first.payload] if first else []
            payloads += [message.payload for message in reader.read_many(_LOOKED_AT)]
            bounds = reader.bounds()
            reader.seek(Position.LAST)
            last = reader.read(0)
            sizes = reader.sizes()
        return StreamInfo(
            url=url.text,
            layout="iwrf",
            storage="files",
            slots=0,
            buffer_size=0,
            oldest_seq=None if first is None else first.seq,
            youngest_seq=None if last is None else last.seq,
            count=bounds.end,
            bytes=sizes.bytes,
            oldest_time_ns=None if first is None else first.time_ns,
            youngest_time_ns=None if last is None else last.time_ns,
            fill=0.0,
            blocking=False,
            details={
                "files": sizes.files,
                "bytes_that_are_no_packet": sizes.skipped or None,
                **details_of(payloads),
            },
        )


def _path(url: URL) -> Path:
    if url.host is not None or not url.path:
        hint = "write iwrf:/dir, or iwrf:/file.iwrf_ts"
        raise InvalidURL(url.text, "it names no directory on this machine", hint=hint)
    return Path(url.path)


class IwrfQueueEndpoint(Endpoint, Removable):
    """`iwrf+fmq:PATH` and `iwrf+fmqp://host:port/path`: packets in LROSE's queues."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        inner, _ = _split(url)
        options = dict(inner.options)
        wanted = options.pop("type", None)
        place = URL.parse(_without_options(inner))
        if place.host is None and endpoint_of(place).storage_of(place) is None:
            options.setdefault("layout", "classic")  # as a writer makes it, if one is waited for
        inner = URL.parse(_without_options(inner), options)
        queue = endpoint_of(inner).open_reader(inner, start)
        return IwrfQueueReader(url.text, queue, None if wanted is None else int(wanted))

    def reread(self, url: URL) -> Reader:
        inner, _ = _split(url)
        return IwrfQueueReader(url.text, endpoint_of(inner).reread(inner), None)

    def open_writer(self, url: URL) -> Writer:
        inner, options = _split(url)
        inner = URL.parse(_without_options(inner), _made_with(inner))
        return IwrfQueueWriter(url.text, endpoint_of(inner).open_writer(inner), options)

    def create(self, url: URL, *, replace: bool = False) -> None:
        inner, _ = _split(url)
        inner = URL.parse(_without_options(inner), _made_with(inner))
        endpoint_of(inner).create(inner, replace=replace)

    def remove(self, url: URL, *, force: bool = False) -> None:
        inner, _ = _split(url)
        endpoint = endpoint_of(inner)
        if not isinstance(endpoint, Removable):
            raise Unsupported(
                f"{url.scheme}: cannot be removed from here ({url})",
                hint="remove it where it is kept",
            )
        endpoint.remove(inner, force=force)

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return CANNOT_CARRY

    def identity(self, url: URL) -> Identity:
        inner, _ = _split(url)
        return endpoint_of(inner).identity(inner)

    def storage_of(self, url: URL) -> str | None:
        inner, _ = _split(url)
        return endpoint_of(inner).storage_of(inner)

    def relay_options(self, url: URL) -> dict[str, str]:
        inner, _ = _split(url)
        return endpoint_of(inner).relay_options(inner)

    def describe(self, url: URL) -> StreamInfo:
        inner, _ = _split(url)
        found = endpoint_of(inner).describe(inner)
        with self.open_reader(url, Position.START) as reader:
            payloads = [message.payload for message in reader.read_many(_LOOKED_AT)]
        return dataclasses.replace(
            found, url=url.text, details={**details_of(payloads), **found.details}
        )


def _split(url: URL) -> tuple[URL, QueueOptions]:
    """Return the URL of the queue, and the options that are ours."""
    text = url.text.partition("+")[2]
    names = QueueOptions.model_fields.keys() & url.options.keys()
    ours = {name: url.options[name] for name in names}
    theirs = {name: value for name, value in url.options.items() if name not in names}
    checked = parse_options(URL.parse(url.text.partition("?")[0], ours), QueueOptions)
    return URL.parse(text.partition("?")[0], theirs), checked


def _made_with(inner: URL) -> dict[str, str]:
    """Return the options of a queue that LROSE can read; a server makes no other."""
    layout = {"layout": "classic"} if inner.host is None else {}
    return {**layout, **_QUEUE, **inner.options}


def _without_options(url: URL) -> str:
    return url.text.partition("?")[0]


class IwrfTcpEndpoint(Endpoint):
    """`iwrf+tcp://host:port`: packets over the network; a writer listens there."""

    can_be_reread = False

    def open_reader(self, url: URL, start: Position) -> Reader:
        if start not in {Position.START, Position.END}:
            raise PositionError(f"{url}: packets come as they are sent, not from {start}")
        return IwrfTcpReader(url.text, *_address(url), parse_options(url, TcpOptions))

    def open_writer(self, url: URL) -> Writer:
        return IwrfTcpWriter(url.text, *_address(url), parse_options(url, TcpOptions))

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return CANNOT_CARRY

    def identity(self, url: URL) -> Identity:
        return Identity.of(url)

    def describe(self, url: URL) -> StreamInfo:
        payloads: list[bytes] = []
        with self.open_reader(url, Position.START) as reader:
            deadline = time.monotonic() + _LISTENED
            while time.monotonic() < deadline and len(payloads) < _LOOKED_AT:
                payloads += [m.payload for m in reader.read_many(_LOOKED_AT, _LISTENED / 4)]
                if "gates" in (details := details_of(payloads)) and details["radar"]:
                    break
        return StreamInfo(
            url=url.text,
            layout="iwrf",
            storage="a server",
            slots=0,
            buffer_size=0,
            oldest_seq=None,
            youngest_seq=None,
            count=0,
            bytes=0,
            oldest_time_ns=None,
            youngest_time_ns=None,
            fill=0.0,
            blocking=False,
            details=details_of(payloads),
        )


def _address(url: URL) -> tuple[str, int]:
    if not url.host or url.port is None or url.path.strip("/"):
        raise InvalidURL(
            url.text, "it names no host and port alone", hint=f"write {url.scheme}://host:port"
        )
    return url.host, url.port
