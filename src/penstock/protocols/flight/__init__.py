"""Queues and logs of one machine, read and written from others over Arrow Flight."""

from penstock.protocols.flight.client import Listed, list_streams
from penstock.protocols.flight.errors import (
    AccessRefused,
    ConnectionLost,
    ServerBusy,
    Unacknowledged,
)
from penstock.protocols.flight.options import ServerOptions
from penstock.protocols.flight.server import FlightServer, FlightServerStatistics

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
