"""LROSE on the network: remote queues, latest_data_info and the map of a site's data."""

from penstock.core.errors import ConnectionLost, Unacknowledged
from penstock.protocols.lrose.connection import Connection, client_count, ping
from penstock.protocols.lrose.errors import RequestRefused
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.protocols.lrose.sessions import ServerStatistics

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
