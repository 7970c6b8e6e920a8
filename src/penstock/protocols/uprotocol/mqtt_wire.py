"""How does MQTT 5 carry a message: topics, properties and packets? (docs/specs/uprotocol.md 8.2)"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from penstock.protocols.uprotocol.codes import (
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
)
from penstock.protocols.uprotocol.errors import InvalidMessage, InvalidUUID, InvalidUUri
from penstock.protocols.uprotocol.message import (
    UAttributes,
    UMessage,
    addresses,
    encode_id,
    kind_of,
    varint,
    with_authorities,
)
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri, address_segments, authority_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paho.mqtt.client import MQTTMessage

__all__ = [
    "ANOTHERS",
    "REFUSED",
    "MqttProperties",
    "PackedProperties",
    "Packet",
    "Packing",
    "Topics",
    "attributes_of",
    "code_of_reason",
    "properties_in",
    "properties_of",
    "readable_attributes",
    "topic_d2d",
    "topic_e2e",
    "topic_filter_d2d",
    "topic_filter_e2e",
    "topic_in",
]

_VERSION: Final = ("uP", "1")
_DECIMAL = re.compile(r"[0-9]{1,10}")
_LARGEST = 0xFFFFFFFF
_LARGEST_ENUM = 0x7FFFFFFF
#: Prefix of errors reported by a broker, unlike those found before sending.
REFUSED: Final = "the broker refuses: reason"


@dataclass(frozen=True)
class MqttProperties:
    """The properties of a PUBLISH packet that hold a message's attributes."""

    user_properties: Sequence[tuple[str, str]] = ()
    #: The payload's format, as a decimal number.
    content_type: str | None = None
    #: The id of the request that this responds to: 16 bytes, most significant first.
    correlation_data: bytes | None = None
    #: Seconds; the broker subtracts the time it holds the message.
    message_expiry: int | None = None


def topic_e2e(attributes: UAttributes, local_authority: str) -> str:
    """Return the topic of a message within a vehicle.

    :raises InvalidMessage: its addresses are missing, or are patterns.
    """
    return topic_filter_e2e(*addresses(attributes), local_authority)


def topic_d2d(attributes: UAttributes, local_authority: str) -> str:
    """Return the topic of a message between devices, which has only their authorities.

    :raises InvalidMessage: the sink has no authority, as in a publish not sent by a streamer.
    """
    source, sink = attributes.source, attributes.sink
    for uri, name in ((source, "source"), (sink, "sink")):
        if uri is None:
            raise InvalidMessage(
                f"there is no {name} to take the authority of",
                field=name,
                hint="a publish between devices needs a sink of the authority and wildcards",
            )
        if uri.has_wildcard_authority or not uri.is_valid:
            raise InvalidMessage(
                f"the {name} {str(uri)[:200]} does not name one authority", field=name
            )
    assert source is not None
    return topic_filter_d2d(source, sink, local_authority)


def topic_filter_e2e(source: UUri, sink: UUri | None, local_authority: str) -> str:
    """Return the topic filter of matching messages; without a sink, of publishes."""
    topic = address_segments(source, local_authority, "+")
    return topic if sink is None else f"{topic}/{address_segments(sink, local_authority, '+')}"


def topic_filter_d2d(source: UUri, sink: UUri | None, local_authority: str) -> str:
    """Return the topic filter between devices; without a sink, of messages to this one."""
    to = local_authority if sink is None else authority_segment(sink, local_authority, "+")
    return f"{authority_segment(source, local_authority, '+')}/{to}"


def properties_of(attributes: UAttributes, *, exact_ttl: bool = False) -> MqttProperties:
    """Encode a message's attributes as properties.

    :param exact_ttl: always send the ttl in milliseconds; the specification does so only if it is
        not in whole seconds. A broker counts down the seconds, so that otherwise a ttl arrives
        smaller than it was sent.
    :raises InvalidMessage: id, type or source is missing, or has no text form.
    """
    id, source, ttl, priority = (
        attributes.id,
        attributes.source,
        attributes.ttl,
        attributes.priority,
    )
    if id is None:
        raise InvalidMessage("there is no id", rules=["id"], field="1")
    if not attributes.type.ce_name:
        raise InvalidMessage("the type is none of the four", rules=["type"], field="2")
    if source is None:
        raise InvalidMessage("there is no source", field="3")
    if not priority.is_known:
        raise InvalidMessage(f"priority {int(priority)} has no name", field="5")
    commstatus = attributes.commstatus
    values = (
        _VERSION,
        ("1", str(id)),
        ("2", attributes.type.ce_name),
        ("3", str(source)),
        ("4", attributes.sink),
        ("5", priority.name if priority else None),
        ("6", ttl if exact_ttl or (ttl or 0) % 1000 else None),
        ("7", attributes.permission_level),
        ("8", None if commstatus is None else int(commstatus)),
        ("10", attributes.token),
        ("11", attributes.traceparent),
    )
    found = [(key, str(value)) for key, value in values if value is not None]
    format, reqid = attributes.payload_format, attributes.reqid
    return MqttProperties(
        found,
        content_type=str(int(format)) if format else None,
        correlation_data=None if reqid is None else reqid.to_big_endian(),
        # An expiry of 0 ends at once, but a ttl of 0 means no limit.
        message_expiry=-(-ttl // 1000) if ttl else None,
    )


def attributes_of(properties: MqttProperties) -> UAttributes:
    """Decode a message's attributes from properties.

    :raises InvalidMessage: a property is missing, repeated or invalid.
    """
    found: dict[str, Any] = {}
    for key, value in _once(properties.user_properties).items():
        name = _KEYS[key]
        try:
            found[name] = _READERS[name](value)
        except (InvalidUUID, InvalidUUri, InvalidMessage) as error:
            why = error.reason if isinstance(error, InvalidMessage) else error
            raise InvalidMessage(f"user property {key} ({name}): {why}", field=key) from error
    if properties.message_expiry is not None and "ttl" not in found:
        found["ttl"] = _milliseconds(properties.message_expiry)
    if properties.content_type:
        number = _number(properties.content_type, _LARGEST_ENUM, "content type")
        found["payload_format"] = UPayloadFormat(number)
    if properties.correlation_data is not None:
        try:
            found["reqid"] = UUID7.from_big_endian(properties.correlation_data)
        except InvalidUUID as error:
            raise InvalidMessage(f"correlation data: {error}", field="correlation data") from error
    return UAttributes(**found)


def readable_attributes(properties: MqttProperties) -> UAttributes | None:
    """Decode the valid part of a message's attributes; None without id, type and source."""
    pairs = [(key, value) for key, value in properties.user_properties if key in _KEYS]
    keys = [key for key, _ in pairs]
    if dict(pairs).get(_VERSION[0]) != _VERSION[1]:
        return None
    found: dict[str, Any] = {}
    for key, value in pairs:
        name = _KEYS[key]
        if name in _READERS and keys.count(key) == 1:
            with suppress(InvalidUUID, InvalidUUri, InvalidMessage):
                found[name] = _READERS[name](value)
    with suppress(InvalidUUID):
        if properties.correlation_data is not None:
            found["reqid"] = UUID7.from_big_endian(properties.correlation_data)
    is_usable = all(name in found for name in ("id", "type", "source"))
    return UAttributes(**found) if is_usable else None


def _once(user_properties: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the properties of uProtocol; each must occur once."""
    found: dict[str, str] = {}
    for key, value in user_properties:
        if key in _KEYS:
            if key in found:
                raise InvalidMessage(f"user property {key} is there twice", field=key)
            found[key] = value
    if found.pop(_VERSION[0], None) != _VERSION[1]:
        raise InvalidMessage("user property uP is not 1", field="uP")
    for key in ("1", "2", "3"):
        if key not in found:
            raise InvalidMessage(f"there is no user property {key} ({_KEYS[key]})", field=key)
    return found


def _milliseconds(seconds: int) -> int:
    if not 0 <= seconds <= _LARGEST:
        raise InvalidMessage(f"a message expiry of {seconds} seconds", field="message expiry")
    # The largest ttl, 49 days, was rounded up to whole seconds: limit it.
    return min(seconds * 1000, _LARGEST)


def _number(text: str, largest: int, name: str) -> int:
    if _DECIMAL.fullmatch(text) is None or int(text) > largest:
        raise InvalidMessage(f"{text[:40]!r} is not a number up to {largest}", field=name)
    return int(text)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage("it is not text of Unicode") from error
    return text


_KEYS: Final = {
    "uP": "version",
    "1": "id",
    "2": "type",
    "3": "source",
    "4": "sink",
    "5": "priority",
    "6": "ttl",
    "7": "permission_level",
    "8": "commstatus",
    "10": "token",
    "11": "traceparent",
}

_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "id": UUID7.parse,
    "type": UMessageType.from_ce_name,
    "source": UUri.parse,
    "sink": UUri.parse,
    "priority": UPriority.from_name,
    "ttl": lambda text: _number(text, _LARGEST, "ttl"),
    "permission_level": lambda text: _number(text, _LARGEST, "permission level"),
    "commstatus": lambda text: UCode(_number(text, _LARGEST_ENUM, "commstatus")),
    "token": _text,
    "traceparent": _text,
}

_FIRST_FAILURE = 0x80

_CODES: Final = {
    0x86: UCode.UNAUTHENTICATED,
    0x87: UCode.PERMISSION_DENIED,
    0x88: UCode.UNAVAILABLE,
    0x89: UCode.UNAVAILABLE,
    0x8C: UCode.UNAUTHENTICATED,
    0x96: UCode.RESOURCE_EXHAUSTED,
    0x97: UCode.RESOURCE_EXHAUSTED,
    0x9F: UCode.RESOURCE_EXHAUSTED,
    0xA0: UCode.RESOURCE_EXHAUSTED,
}


def code_of_reason(reason: int) -> UCode:
    """Return the outcome of an MQTT reason code; 0x10 (no subscriber) is a success."""
    return UCode.OK if reason < _FIRST_FAILURE else _CODES.get(reason, UCode.INTERNAL)


# --- packets ----------------------------------------------------------------------------------

#: Topics within a vehicle name both entities, those between devices only their authorities.
Topics: TypeAlias = Literal["e2e", "d2d"]

#: The `field` of the error if a message does not match its topic.
ANOTHERS: Final = "topic"

#: Bytes of a PUBLISH packet without topic, properties and payload, at most.
_HEADER: Final = 16

#: The segment of the authority of the sink, by the kind of topics.
_E2E_SINK: Final = 5
_D2D_SINK: Final = 1

#: MQTT 5, 2.2.2.2: the properties that a message uses.
_EXPIRY: Final = b"\x02"
_CONTENT_TYPE: Final = b"\x03"
_CORRELATION: Final = b"\x09"
_USER: Final = b"\x26"

#: The user property of the id, the only one that differs between the messages of a topic.
_ID_KEY: Final = "1"
#: Kinds of messages that are remembered, at most, and the characters of their properties.
_MOST_KINDS: Final = 4096
_LONGEST: Final = 1024


class PackedProperties:
    """The properties of a packet, encoded ten times as fast as by the MQTT library.

    The library asks those of a packet to be sent only to `pack` themselves.
    """

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
        self._packed = varint(len(body)) + body

    def pack(self) -> bytes:
        return self._packed


def _sized(data: bytes) -> bytes:
    if len(data) > 0xFFFF:  # noqa: PLR2004 - two bytes tell the length
        raise InvalidMessage(f"an attribute of {len(data):,} bytes does not fit MQTT")
    return len(data).to_bytes(2) + data


class Packet(NamedTuple):
    """A packet to publish."""

    topic: str
    properties: PackedProperties
    payload: bytes
    #: Upper bound of its bytes on the wire.
    size: int
    #: Whether it fails without a subscriber to its topic.
    must_be_heard: bool = False


class _Kind(NamedTuple):
    """Messages that differ in the id and the payload only, such as those of one topic."""

    #: Their attributes after the id.
    rest: bytes
    topic: str

    def attributes(self, id: UUID7) -> UAttributes:
        return UAttributes.from_bytes(encode_id(id) + self.rest)


class Packing:
    """Encodes and decodes messages, with a kind of topics and an exact or inexact ttl."""

    def __init__(self, authority: str, topics: Topics = "e2e", *, exact_ttl: bool = True) -> None:
        self.authority = authority
        self.topics = topics
        self._exact_ttl = exact_ttl
        #: By all properties but the id.
        self._known: dict[tuple[object, ...], _Kind] = {}

    def topic_of(self, attributes: UAttributes) -> str:
        """Return the topic of a message.

        :raises InvalidMessage: it has no topic of this kind.
        """
        write = topic_e2e if self.topics == "e2e" else topic_d2d
        return write(attributes, self.authority)

    def named_by(self, topic: str, attributes: UAttributes) -> UAttributes:
        """Fill in the authorities of local addresses from the topic of their message.

        :raises InvalidMessage: no authority can have such a name.
        """
        segments = topic.split("/")
        at = _E2E_SINK if self.topics == "e2e" else _D2D_SINK
        return with_authorities(attributes, segments[0], "".join(segments[at : at + 1]))

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
        properties = PackedProperties(properties_of(attributes, exact_ttl=self._exact_ttl))
        size = _HEADER + len(topic) + len(properties.pack()) + len(payload)
        must_be_heard &= attributes.type != UMessageType.PUBLISH
        return Packet(topic, properties, payload, size, must_be_heard)

    def unpack(self, packet: MQTTMessage) -> UMessage:
        """Decode a packet.

        :raises InvalidMessage: it is not a message, or its source does not match its topic.
        """
        topic = topic_in(packet)
        attributes, own = self._decoded(properties_in(packet), topic)
        # Brokers authorize by topic: the addresses of the message must match it.
        if topic != own:
            raise InvalidMessage(
                f"it came at the topic {topic[:200]!r}, which is not its own", field=ANOTHERS
            )
        return UMessage.from_parts(attributes, bytes(packet.payload))

    def _decoded(self, plain: MqttProperties, at: str) -> tuple[UAttributes, str]:
        """Decode attributes that came at a topic; return them and the topic they belong to.

        The messages of a topic differ in the id: the rest is decoded once and remembered.
        """
        pairs = plain.user_properties
        ids = [value for key, value in pairs if key == _ID_KEY]
        others = tuple([pair for pair in pairs if pair[0] in _KEYS and pair[0] != _ID_KEY])
        properties = others, plain.content_type, plain.correlation_data, plain.message_expiry
        known = self._known.get(properties)
        if known is not None and len(ids) == 1:
            with suppress(InvalidUUID):
                return known.attributes(UUID7.parse(ids[0])), known.topic
        decoded = attributes_of(plain)
        attributes = self.named_by(at, decoded)
        topic = self.topic_of(attributes)
        # The same properties may come at another topic, and then mean other addresses.
        kind = kind_of(attributes) if attributes is decoded else None
        if kind is not None and sum(len(value) for _, value in others) <= _LONGEST:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            self._known[properties] = _Kind(kind, topic)
        return attributes, topic


def properties_in(packet: MQTTMessage) -> MqttProperties:
    """Return the properties of a received packet."""
    found = packet.properties
    return MqttProperties(
        getattr(found, "UserProperty", ()),
        content_type=getattr(found, "ContentType", None),
        correlation_data=getattr(found, "CorrelationData", None),
        message_expiry=getattr(found, "MessageExpiryInterval", None),
    )


def topic_in(packet: MQTTMessage) -> str:
    """Return the topic of a received packet; empty if it is not text."""
    try:
        return packet.topic
    except UnicodeDecodeError:
        return ""
