"""What is behind a `flight:` URL?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption
from penstock.protocols.flight.client import (
    Target,
    create_stream,
    describe_stream,
    identify_stream,
)
from penstock.protocols.flight.notes import ServerNotes
from penstock.protocols.flight.reader import FlightReader
from penstock.protocols.flight.writer import FlightWriter

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position
    from penstock.core.url import URL

__all__ = ["FlightEndpoint"]


class FlightEndpoint(Endpoint):
    """`flight://host:port/stream`: a queue or a log of another machine."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        return FlightReader(Target.of(url), start)

    def open_writer(self, url: URL) -> Writer:
        target = Target.of(url)
        if target.options.cursor is not None:
            raise InvalidOption(
                "cursor", target.options.cursor, "is for readers, and would do nothing here"
            )
        return FlightWriter(target)

    def create(self, url: URL, *, replace: bool = False) -> None:
        create_stream(url, replace=replace)

    def describe(self, url: URL) -> StreamInfo:
        return describe_stream(url)

    def storage_of(self, url: URL) -> str | None:
        return identify_stream(url)

    def notes(self, url: URL) -> ServerNotes:
        return ServerNotes(Target.of(url))
