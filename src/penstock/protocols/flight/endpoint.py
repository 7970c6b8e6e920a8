"""What is behind a `flight:` URL?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position
    from penstock.core.url import URL

__all__ = ["FlightEndpoint"]


class FlightEndpoint(Endpoint):
    """`flight://host:port/stream`: a queue or a log of another machine."""

    def __init__(self) -> None:
        try:
            import pyarrow.flight  # noqa: F401, PLC0415 - not every build of pyarrow has it
        except ImportError as error:
            raise Unsupported(
                f"this pyarrow has no Flight: {error}",
                hint="install the wheel: pip install --force-reinstall pyarrow",
            ) from error

    def open_reader(self, url: URL, start: Position) -> Reader:
        from penstock.protocols.flight.client import Target  # noqa: PLC0415
        from penstock.protocols.flight.reader import FlightReader  # noqa: PLC0415

        return FlightReader(Target.of(url), start)

    def open_writer(self, url: URL) -> Writer:
        from penstock.protocols.flight.client import Target  # noqa: PLC0415
        from penstock.protocols.flight.writer import FlightWriter  # noqa: PLC0415

        target = Target.of(url)
        if target.options.cursor is not None:
            raise InvalidOption(
                "cursor", target.options.cursor, "is for readers, and would do nothing here"
            )
        return FlightWriter(target)

    def create(self, url: URL, *, replace: bool = False) -> None:
        from penstock.protocols.flight.client import create_stream  # noqa: PLC0415

        create_stream(url, replace=replace)

    def describe(self, url: URL) -> StreamInfo:
        from penstock.protocols.flight.client import describe_stream  # noqa: PLC0415

        return describe_stream(url)
