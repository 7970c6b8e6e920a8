"""How does a message become a packet of the MQTT library, and back?

(docs/specs/uprotocol.md 8.2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paho.mqtt.properties import Properties, VariableByteIntegers

from penstock.protocols.uprotocol.codes import UCode, UMessageType
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage
from penstock.protocols.uprotocol.mqtt_wire import (
    MqttProperties,
    attributes_of,
    properties_of,
    readable_attributes,
    topic_d2d,
    topic_e2e,
    topic_filter_d2d,
    topic_filter_e2e,
)
from penstock.protocols.uprotocol.transports.interface import Unreadable

if TYPE_CHECKING:
    from paho.mqtt.client import MQTTMessage

    from penstock.protocols.uprotocol.attributes import UAttributes
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["Packet", "Packing", "Topics"]

#: Topics within a vehicle name both entities, those between devices only their authorities.
Topics = Literal["e2e", "d2d"]

#: The `field` of the error if a message does not match its topic.
_ANOTHERS = "topic"

#: Bytes of a PUBLISH packet without topic, properties and payload, at most.
_HEADER = 16

#: MQTT 5, 2.2.2.2: the properties that a message uses.
_EXPIRY = b"\x02"
_CONTENT_TYPE = b"\x03"
_CORRELATION = b"\x09"
_USER = b"\x26"


class Packet(NamedTuple):
    """A packet to publish."""

    topic: str
    properties: Properties
    payload: bytes
    #: Upper bound of its bytes on the wire.
    size: int
    #: Whether it fails without a subscriber to its topic.
    must_be_heard: bool = False


class _Packed(Properties):
    """Properties encoded already, ten times as fast as by the library."""

    packed: bytes

    def __init__(self, plain: MqttProperties) -> None:
        parts = []
        if plain.message_expiry is not None:
            parts.append(_EXPIRY + plain.message_expiry.to_bytes(4))
        if plain.content_type is not None:
            parts.append(_CONTENT_TYPE + _sized(plain.content_type.encode()))
        if plain.correlation_data is not None:
            parts.append(_CORRELATION + _sized(plain.correlation_data))
        for key, value in plain.user_properties:
            try:
                parts.append(_USER + _sized(key.encode()) + _sized(value.encode()))
            except UnicodeEncodeError:
                raise InvalidMessage(f"user property {key} is not text", field=key) from None
        body = b"".join(parts)
        size = VariableByteIntegers.encode(len(body))  # type: ignore[no-untyped-call]
        packed = bytes(size) + body
        # Bypass the library's check of names.
        object.__setattr__(self, "packed", packed)

    def pack(self) -> bytes:
        return self.packed


def _sized(data: bytes) -> bytes:
    if len(data) > 0xFFFF:  # noqa: PLR2004 - two bytes tell the length
        raise InvalidMessage(f"an attribute of {len(data):,} bytes does not fit MQTT")
    return len(data).to_bytes(2) + data


class Packing:
    """Encodes and decodes messages, with a kind of topics and an exact or inexact ttl."""

    def __init__(self, authority: str, topics: Topics = "e2e", *, exact_ttl: bool = True) -> None:
        self.authority = authority
        self.topics = topics
        self._exact_ttl = exact_ttl

    def topic_of(self, attributes: UAttributes) -> str:
        """Return the topic of a message.

        :raises InvalidMessage: it has no topic of this kind.
        """
        write = topic_e2e if self.topics == "e2e" else topic_d2d
        return write(attributes, self.authority)

    def filter_of(self, source: UUri, sink: UUri | None) -> str:
        """Return the topic filter of a listener's pattern."""
        write = topic_filter_e2e if self.topics == "e2e" else topic_filter_d2d
        return write(source, sink, self.authority)

    def pack(self, message: UMessage, *, must_be_heard: bool = False) -> Packet:
        """Encode a message as a packet.

        :param must_be_heard: whether a message to one receiver fails without a subscriber.

        :raises InvalidMessage: it cannot be encoded.
        """
        attributes, payload = message.attributes, message.payload or b""
        topic = self.topic_of(attributes)
        plain = properties_of(attributes, exact_ttl=self._exact_ttl)
        properties = _Packed(plain)
        size = _HEADER + len(topic) + len(properties.packed) + len(payload)
        must_be_heard &= attributes.type != UMessageType.PUBLISH
        return Packet(topic, properties, payload, size, must_be_heard)

    def unpack(self, packet: MQTTMessage) -> UMessage:
        """Decode a packet.

        :raises InvalidMessage: it is not a message, or its source does not match its topic.
        """
        attributes = attributes_of(_plain(packet))
        topic = _topic(packet)
        # Brokers authorize by topic: the addresses of the message must match it.
        if topic != self.topic_of(attributes):
            raise InvalidMessage(
                f"it came at the topic {topic[:200]!r}, which is not its own", field=_ANOTHERS
            )
        return UMessage.from_parts(attributes, bytes(packet.payload))

    def unreadable(self, packet: MQTTMessage, error: InvalidMessage) -> Unreadable:
        """Describe a packet that is not a valid message."""
        plain, topic, payload = _plain(packet), _topic(packet), bytes(packet.payload)
        lines = [f"topic: {topic}", *(f"{key}: {value}" for key, value in plain.user_properties)]
        if plain.content_type is not None:
            lines.append(f"content type: {plain.content_type}")
        if plain.correlation_data is not None:
            lines.append(f"correlation data: {plain.correlation_data.hex()}")
        raw = "\n".join(lines).encode(errors="replace") + b"\n\n" + payload
        attributes = readable_attributes(plain)
        message = None if attributes is None else UMessage.from_parts(attributes, payload)
        is_anothers = error.field == _ANOTHERS
        if attributes is not None and not is_anothers:
            try:
                is_anothers = topic != self.topic_of(attributes)
            except InvalidMessage:
                message = None  # nobody knows whose it is
        code = UCode.UNAUTHENTICATED if is_anothers else UCode.INVALID_ARGUMENT
        return Unreadable(raw, error.reason, code, message)


def _plain(packet: MQTTMessage) -> MqttProperties:
    found = packet.properties
    return MqttProperties(
        getattr(found, "UserProperty", ()),
        content_type=getattr(found, "ContentType", None),
        correlation_data=getattr(found, "CorrelationData", None),
        message_expiry=getattr(found, "MessageExpiryInterval", None),
    )


def _topic(packet: MQTTMessage) -> str:
    try:
        return packet.topic
    except UnicodeDecodeError:
        return ""
