"""Queues and logs of one machine, read and written from others over Arrow Flight."""

from typing import TYPE_CHECKING

from penstock.core.errors import Unsupported
from penstock.core.late_names import late_names

try:
    import pyarrow.flight
except ImportError as error:  # not every build of pyarrow has it
    raise Unsupported(
        f"this pyarrow has no Flight: {error}",
        hint="install the wheel: pip install --force-reinstall pyarrow",
    ) from error

if TYPE_CHECKING:
    from penstock.core.errors import ConnectionLost, Unacknowledged
    from penstock.protocols.flight.client import Listed, list_streams
    from penstock.protocols.flight.errors import AccessRefused, ServerBusy
    from penstock.protocols.flight.server import (
        FlightServer,
        FlightServerStatistics,
        ServerOptions,
    )

__getattr__ = late_names(__name__)

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
