"""Queues and logs of one machine, read and written from others over Arrow Flight."""

from penstock.core.errors import Unsupported

try:
    import pyarrow.flight
except ImportError as error:  # not every build of pyarrow has it
    raise Unsupported(
        f"this pyarrow has no Flight: {error}",
        hint="install the wheel: pip install --force-reinstall pyarrow",
    ) from error

from penstock.core.errors import ConnectionLost, Unacknowledged
from penstock.protocols.flight.client import Listed, list_streams
from penstock.protocols.flight.errors import AccessRefused, ServerBusy
from penstock.protocols.flight.server import FlightServer, FlightServerStatistics, ServerOptions

__all__ = [
    "AccessRefused",
    "ConnectionLost",
    "FlightServer",
    "FlightServerStatistics",
    "Listed",
    "ServerBusy",
    "ServerOptions",
    "Unacknowledged",
    "list_streams",
]

del pyarrow
