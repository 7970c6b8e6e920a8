"""uProtocol: addresses, ids, messages and their encodings on every transport, without I/O."""

from penstock.protocols.uprotocol.codes import (
    DeadLetterReason,
    SubscriptionStatus,
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
    UStatusError,
)
from penstock.protocols.uprotocol.errors import InvalidMessage, InvalidUUID, InvalidUUri
from penstock.protocols.uprotocol.message import (
    UAttributes,
    UMessage,
    error_response,
    expires_at_ms,
    is_expired,
    notification,
    publish,
    request,
    response,
)
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import validate

__all__ = [
    "UUID7",
    "DeadLetterReason",
    "InvalidMessage",
    "InvalidUUID",
    "InvalidUUri",
    "SubscriptionStatus",
    "UAttributes",
    "UCode",
    "UMessage",
    "UMessageType",
    "UPayloadFormat",
    "UPriority",
    "UStatus",
    "UStatusError",
    "UUri",
    "error_response",
    "expires_at_ms",
    "is_expired",
    "notification",
    "publish",
    "request",
    "response",
    "validate",
]
