"""Which protobuf classes do the .proto files beside this one make?

They live in a descriptor pool of their own. Another SDK of uProtocol in the same process registers
messages of the same names in the library's common pool, and two definitions of one name there are
an error. `schema.binpb` is generated from the .proto files by `tools/generate-protos`.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from penstock.core.errors import Unsupported

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as missing:
    raise Unsupported(
        "uProtocol needs the protobuf library", hint="pip install 'penstock[uprotocol]'"
    ) from missing

__all__ = [
    "UNDECODABLE",
    "UUID",
    "Any_",
    "CloudEvent",
    "DeadLetter",
    "DecodeError",
    "FetchSubscriptionsRequest",
    "FetchSubscriptionsResponse",
    "FindServicesRequest",
    "FindServicesResponse",
    "GetLastMessagesRequest",
    "GetLastMessagesResponse",
    "GetServiceTopicsRequest",
    "GetServiceTopicsResponse",
    "MessageResponse",
    "NotificationsRequest",
    "NotificationsResponse",
    "ResetRequest",
    "ResetResponse",
    "ServiceTopicInfo",
    "StartRequest",
    "StartResponse",
    "StopRequest",
    "SubscribeRequest",
    "SubscribeResponse",
    "Subscription",
    "Timestamp",
    "UAttributes",
    "UMessage",
    "UServiceTopic",
    "UStatus",
    "UUri",
    "UUriBatch",
    "UnsubscribeRequest",
    "UnsubscribeResponse",
    "message_class",
]

#: Errors of decoding; the pure Python library has another one for invalid UTF-8.
UNDECODABLE = (DecodeError, UnicodeDecodeError)

_pool = descriptor_pool.DescriptorPool()
_described = resources.files(__package__).joinpath("schema.binpb").read_bytes()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_described).file:
    _pool.Add(_file)


def message_class(name: str) -> Any:
    """Return the class of a message by its full name, such as `uprotocol.v1.UUri`."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


Any_ = message_class("google.protobuf.Any")
Timestamp = message_class("google.protobuf.Timestamp")

UUri = message_class("uprotocol.v1.UUri")
UUriBatch = message_class("uprotocol.v1.UUriBatch")
UUID = message_class("uprotocol.v1.UUID")
UStatus = message_class("uprotocol.v1.UStatus")
UAttributes = message_class("uprotocol.v1.UAttributes")
UMessage = message_class("uprotocol.v1.UMessage")
UServiceTopic = message_class("uprotocol.UServiceTopic")

_SUBSCRIPTION = "uprotocol.core.usubscription.v4."
Subscription = message_class(_SUBSCRIPTION + "Subscription")
SubscribeRequest = message_class(_SUBSCRIPTION + "SubscribeRequest")
SubscribeResponse = message_class(_SUBSCRIPTION + "SubscribeResponse")
UnsubscribeRequest = message_class(_SUBSCRIPTION + "UnsubscribeRequest")
UnsubscribeResponse = message_class(_SUBSCRIPTION + "UnsubscribeResponse")
FetchSubscriptionsRequest = message_class(_SUBSCRIPTION + "FetchSubscriptionsRequest")
FetchSubscriptionsResponse = message_class(_SUBSCRIPTION + "FetchSubscriptionsResponse")
NotificationsRequest = message_class(_SUBSCRIPTION + "NotificationsRequest")
NotificationsResponse = message_class(_SUBSCRIPTION + "NotificationsResponse")
ResetRequest = message_class(_SUBSCRIPTION + "ResetRequest")
ResetResponse = message_class(_SUBSCRIPTION + "ResetResponse")

_DISCOVERY = "uprotocol.core.udiscovery.v3."
FindServicesRequest = message_class(_DISCOVERY + "FindServicesRequest")
FindServicesResponse = message_class(_DISCOVERY + "FindServicesResponse")
GetServiceTopicsRequest = message_class(_DISCOVERY + "GetServiceTopicsRequest")
GetServiceTopicsResponse = message_class(_DISCOVERY + "GetServiceTopicsResponse")
ServiceTopicInfo = message_class(_DISCOVERY + "ServiceTopicInfo")

_TWIN = "uprotocol.core.utwin.v2."
MessageResponse = message_class(_TWIN + "MessageResponse")
GetLastMessagesRequest = message_class(_TWIN + "GetLastMessagesRequest")
GetLastMessagesResponse = message_class(_TWIN + "GetLastMessagesResponse")

CloudEvent = message_class("io.cloudevents.v1.CloudEvent")
DeadLetter = message_class("penstock.dispatch.v1.DeadLetter")
StartRequest = message_class("penstock.dispatch.v1.StartRequest")
StartResponse = message_class("penstock.dispatch.v1.StartResponse")
StopRequest = message_class("penstock.dispatch.v1.StopRequest")
