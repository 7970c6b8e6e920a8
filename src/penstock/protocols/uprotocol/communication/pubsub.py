"""How does an entity publish to its topics, and notify another entity?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import UPayloadFormat, UPriority
from penstock.protocols.uprotocol.message import DEFAULT_TTL_MS, UMessage, notification, publish
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.transports.interface import Listener, UTransport

__all__ = ["CallOptions", "LocalUriProvider", "Notifier", "Publisher", "UPayload"]


@dataclass(frozen=True, slots=True)
class LocalUriProvider:
    """An entity's own addresses.

    :raises InvalidUUri: a field is out of its range, or the authority is not a name.
    """

    authority: str
    ue_id: int
    version: int = 1

    def __post_init__(self) -> None:
        self.resource(0)

    @property
    def source(self) -> UUri:
        """The entity itself: where responses and notifications to it go."""
        return self.resource(0)

    def resource(self, resource_id: int) -> UUri:
        """Return the address of one of its methods or topics."""
        return UUri(self.authority, self.ue_id, self.version, resource_id)

    def own(self, resource: int | UUri) -> UUri:
        """Return the address of a resource, given by its number or its full address."""
        if isinstance(resource, UUri):
            return resource.resolved(self.authority)
        return self.resource(resource)


@dataclass(frozen=True, slots=True)
class UPayload:
    """Bytes and their format."""

    data: bytes
    format: UPayloadFormat = UPayloadFormat.RAW

    @classmethod
    def of(cls, payload: UPayload | bytes | str | None) -> UPayload | None:
        """Create a payload from bytes (raw) or a string (text)."""
        if payload is None or isinstance(payload, UPayload):
            return payload
        if isinstance(payload, str):
            return cls(payload.encode(), UPayloadFormat.TEXT)
        return cls(bytes(payload))

    @classmethod
    def of_message(cls, message: UMessage) -> Self:
        """Return the payload of a message, or an empty one."""
        return cls(message.payload or b"", message.attributes.payload_format)

    @property
    def protobuf(self) -> bytes | None:
        """The protobuf message in it, plain or wrapped in an Any; None if it has another format.

        :raises DecodeError: it is not an Any.
        """
        if self.format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
            value: bytes = proto.Any_.FromString(self.data).value
            return value
        plain = (UPayloadFormat.PROTOBUF, UPayloadFormat.UNSPECIFIED)
        return self.data if self.format in plain else None

    @classmethod
    def of_proto(cls, message: Any) -> Self:
        """Encode a protobuf message."""
        return cls(message.SerializeToString(deterministic=True), UPayloadFormat.PROTOBUF)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a message: priority, lifetime and so on."""

    #: Timeout of a call, and lifetime of a message (milliseconds).
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
        """Return the options that apply to a publish or a notification."""
        return {
            "ttl": self.ttl,
            "priority": self.priority or UPriority.UNSPECIFIED,
            "traceparent": self.traceparent,
        }


def payload_fields(payload: UPayload | bytes | str | None) -> dict[str, Any]:
    """Return the payload arguments of the message constructors."""
    given = UPayload.of(payload)
    if given is None:
        return {"payload": None}
    return {"payload": given.data, "payload_format": given.format}


class Publisher:
    """Publishes for one entity."""

    def __init__(self, transport: UTransport, uris: LocalUriProvider) -> None:
        self._transport = transport
        self._uris = uris

    def publish(
        self,
        topic: int | UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> UMessage:
        """Send a message to all subscribers of a topic, and return it.

        :raises InvalidMessage: the message would violate a rule.
        :raises UStatusError: the transport rejected it.
        """
        message = publish(
            self._uris.own(topic),
            **payload_fields(payload),
            **(options or CallOptions()).of_message(),
        )
        self._transport.send(message)
        return message


class Notifier:
    """Sends and receives notifications for one entity."""

    def __init__(self, transport: UTransport, uris: LocalUriProvider) -> None:
        self._transport = transport
        self._uris = uris

    def notify(
        self,
        topic: int | UUri,
        destination: UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> UMessage:
        """Send a message of a topic to one entity, and return it.

        :raises InvalidMessage: the message would violate a rule.
        :raises UStatusError: the transport rejected it.
        """
        message = notification(
            self._uris.own(topic),
            destination,
            **payload_fields(payload),
            **(options or CallOptions()).of_message(),
        )
        self._transport.send(message)
        return message

    def start_listening(self, topic: UUri, listener: Listener) -> None:
        """Register a listener for notifications of a topic to this entity.

        :raises UStatusError: as `UTransport.register_listener`.
        """
        self._transport.register_listener(topic, listener, self._uris.source)

    def stop_listening(self, topic: UUri, listener: Listener) -> None:
        """Unregister a listener.

        :raises UStatusError: NOT_FOUND, the listener is not registered.
        """
        self._transport.unregister_listener(topic, listener, self._uris.source)
