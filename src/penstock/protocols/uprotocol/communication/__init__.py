"""What entities do with a transport: publish, subscribe, notify, call and be called (uP-L2)."""

from penstock.protocols.uprotocol.communication.addresses import LocalUriProvider
from penstock.protocols.uprotocol.communication.notifying import Notifier
from penstock.protocols.uprotocol.communication.options import CallOptions, UPayload
from penstock.protocols.uprotocol.communication.publishing import Publisher
from penstock.protocols.uprotocol.communication.rpc_client import RpcClient
from penstock.protocols.uprotocol.communication.rpc_server import RequestHandler, RpcServer
from penstock.protocols.uprotocol.communication.subscribing import Subscriber

__all__ = [
    "CallOptions",
    "LocalUriProvider",
    "Notifier",
    "Publisher",
    "RequestHandler",
    "RpcClient",
    "RpcServer",
    "Subscriber",
    "UPayload",
]
