"""What is said with a message beside whom it is for?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from penstock.protocols.uprotocol.codes import UPayloadFormat, UPriority
from penstock.protocols.uprotocol.message import DEFAULT_TTL_MS, UMessage

__all__ = ["CallOptions", "UPayload"]


@dataclass(frozen=True, slots=True)
class UPayload:
    """Bytes, and what they are."""

    data: bytes
    format: UPayloadFormat = UPayloadFormat.RAW

    @classmethod
    def of(cls, payload: UPayload | bytes | str | None) -> UPayload | None:
        """Take bytes for raw ones, and text for text."""
        if payload is None or isinstance(payload, UPayload):
            return payload
        if isinstance(payload, str):
            return cls(payload.encode(), UPayloadFormat.TEXT)
        return cls(bytes(payload))

    @classmethod
    def of_message(cls, message: UMessage) -> Self:
        """Give the payload of a message, an empty one if it has none."""
        return cls(message.payload or b"", message.attributes.payload_format)

    @classmethod
    def of_proto(cls, message: Any) -> Self:
        """Write a protobuf message."""
        return cls(message.SerializeToString(deterministic=True), UPayloadFormat.PROTOBUF)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a message is sent, and how long it is of use."""

    #: Milliseconds: how long a call waits for its answer, and a message may be under way.
    ttl: int | None = None
    priority: UPriority | None = None
    token: str | None = None
    permission_level: int | None = None
    traceparent: str | None = None

    @property
    def call_ttl(self) -> int:
        return DEFAULT_TTL_MS if self.ttl is None else self.ttl

    @property
    def call_priority(self) -> UPriority:
        return self.priority or UPriority.CS4

    def of_message(self) -> dict[str, Any]:
        """Return what a publish or a notification takes of these."""
        return {
            "ttl": self.ttl,
            "priority": self.priority or UPriority.UNSPECIFIED,
            "traceparent": self.traceparent,
        }


def payload_fields(payload: UPayload | bytes | str | None) -> dict[str, Any]:
    """Return what every message takes of a payload."""
    given = UPayload.of(payload)
    if given is None:
        return {"payload": None}
    return {"payload": given.data, "payload_format": given.format}
