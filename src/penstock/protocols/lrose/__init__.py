"""LROSE on the network: remote queues, latest_data_info and the map of a site's data."""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.core.errors import ConnectionLost, Unacknowledged
    from penstock.protocols.lrose.ds_client import Connection, RequestRefused, client_count, ping
    from penstock.protocols.lrose.ds_server import ServerStatistics
    from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions

__getattr__ = late_names(__name__)

__all__ = [
    "Connection",
    "ConnectionLost",
    "FmqServer",
    "FmqServerOptions",
    "RequestRefused",
    "ServerStatistics",
    "Unacknowledged",
    "client_count",
    "ping",
]
