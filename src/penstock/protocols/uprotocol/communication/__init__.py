"""What entities do with a transport: publish, subscribe, notify, call and be called (uP-L2)."""

from penstock.protocols.uprotocol.communication.pubsub import (
    CallOptions,
    LocalUriProvider,
    Notifier,
    Publisher,
    UPayload,
)
from penstock.protocols.uprotocol.communication.rpc import RequestHandler, RpcClient, RpcServer
from penstock.protocols.uprotocol.communication.subscription import Subscriber

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
