"""What is behind an `fmqp:` URL?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import AlreadyExists, InvalidOption, NotFound
from penstock.core.interfaces import StreamInfo
from penstock.core.position import Position
from penstock.protocols.lrose.addresses import parse_address
from penstock.protocols.lrose.ds_client import ping
from penstock.protocols.lrose.fmq_client import (
    CANNOT_CARRY,
    READER_OPTIONS,
    WRITER_OPTIONS,
    Target,
    open_link,
    open_to_read,
)
from penstock.protocols.lrose.fmq_reader import FmqReader
from penstock.protocols.lrose.fmq_wire import OpenMode
from penstock.protocols.lrose.fmq_writer import FmqWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.url import URL

__all__ = ["FmqpEndpoint"]


class FmqpEndpoint(Endpoint):
    """`fmqp://host:port/path`: a queue behind a DsFmqServer, LROSE's or ours."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        _refuse(url, WRITER_OPTIONS, "is for writers, and would do nothing here")
        return FmqReader(Target.of(url), start)

    def open_writer(self, url: URL) -> Writer:
        _refuse(url, READER_OPTIONS, "is for readers, and would do nothing here")
        return FmqWriter(Target.of(url))

    def reread(self, url: URL) -> Reader:
        options = {name: value for name, value in url.options.items() if name not in WRITER_OPTIONS}
        return self.open_reader(dataclasses.replace(url, options=options), Position.START)

    def create(self, url: URL, *, replace: bool = False) -> None:
        target = Target.of(url)
        if not replace:
            try:
                open_to_read(target, 0.0).close()
            except NotFound:
                pass
            else:
                raise AlreadyExists(f"there is a queue at {url}", hint="replace it with --replace")
        compress = target.options.compress.method is not None
        mode = OpenMode.CREATE if replace else OpenMode.READ_WRITE
        open_link(target, mode, 0.0, compress=compress).close()

    def identity(self, url: URL) -> Identity:
        address = parse_address(url)
        return Identity(address.scheme, f"//{address.server}/{address.path}")

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return CANNOT_CARRY

    def describe(self, url: URL) -> StreamInfo:
        """Describe the queue as far as the protocol allows: its messages, and its server."""
        target = Target.of(url)
        pid = ping(target.address.host, target.address.port)
        with FmqReader(target, Position.START) as reader:
            bounds = reader.bounds()
            is_empty = bounds.oldest == bounds.end
            oldest = None if is_empty else reader.read(0)
            if oldest is not None:
                reader.seek(Position.LAST)
            youngest = None if is_empty else reader.read(0)
            is_ours = reader.server_is_ours
        return StreamInfo(
            url=url.text,
            layout="remote",
            storage="DsFmqServer",
            slots=0,
            buffer_size=0,
            oldest_seq=None if oldest is None else oldest.seq,
            youngest_seq=None if youngest is None else youngest.seq,
            count=bounds.end - bounds.oldest,
            bytes=0,
            oldest_time_ns=None if oldest is None else oldest.created_ns,
            youngest_time_ns=None if youngest is None else youngest.created_ns,
            fill=0.0,
            blocking=False,
            details={
                "server": target.address.server,
                "process": pid,
                "software": "penstock" if is_ours else "LROSE, or another",
            },
        )


def _refuse(url: URL, options: AbstractSet[str], reason: str) -> None:
    for option in sorted(options & url.options.keys()):
        raise InvalidOption(option, url.options[option], reason)
