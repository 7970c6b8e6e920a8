"""Queues and logs of one machine, read and written from others over Arrow Flight."""

from penstock.protocols.flight.errors import (
    AccessRefused,
    ConnectionLost,
    ServerBusy,
    Unacknowledged,
)
from penstock.protocols.flight.options import ServerOptions

__all__ = ["AccessRefused", "ConnectionLost", "ServerBusy", "ServerOptions", "Unacknowledged"]
