"""How does a message look on the wire, and how are new ones made?

(docs/specs/uprotocol.md 3, 10.2)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.attributes import UAttributes
from penstock.protocols.uprotocol.codes import (
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
)
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.validation import check, validate

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = [
    "DEFAULT_TTL_MS",
    "UMessage",
    "error_response",
    "notification",
    "publish",
    "request",
    "response",
]

#: The default ttl of a request.
DEFAULT_TTL_MS = 10_000

_ATTRIBUTES = 0x0A
_PAYLOAD = 0x12


@dataclass(frozen=True)
class UMessage:
    """A message: attributes and an opaque payload."""

    attributes: UAttributes
    payload: bytes | None = None
    #: The bytes that it was decoded from.
    _origin: bytes | None = field(default=None, repr=False, compare=False, kw_only=True)

    #: Whether it is unchanged since decoding.
    _intact: ClassVar[bool] = False

    @classmethod
    def from_bytes(cls, data: bytes) -> UMessage:
        """Decode the protobuf form.

        :raises InvalidMessage: the bytes do not decode.
        """
        if type(data) is not bytes:
            data = bytes(data)
        made: UMessage = _blank(cls)
        inside = made.__dict__
        parts = _split(data)
        if parts is None:
            inside["attributes"], inside["payload"] = _decoded(data)
        else:
            begin, end, payload = parts
            inside["attributes"] = _attributes_from(data[begin:end])
            inside["payload"] = data[payload:] if payload else None
        inside["_origin"] = data
        inside["_intact"] = True
        return made

    @classmethod
    def from_parts(cls, attributes: UAttributes, payload: bytes) -> UMessage:
        """Combine attributes and payload that a transport carries separately.

        Transports do not distinguish an empty payload from none: a payload format means empty.
        """
        there = payload or attributes.payload_format != UPayloadFormat.UNSPECIFIED
        return cls(attributes, bytes(payload) if there else None)

    @staticmethod
    def attributes_of(data: bytes) -> UAttributes:
        """Decode only the attributes of a message, without copying the payload.

        :raises InvalidMessage: the bytes do not decode.
        """
        parts = _split(data)
        if parts is None:
            return _decoded(bytes(data))[0]
        return _attributes_from(data[parts[0] : parts[1]])

    def to_bytes(self) -> bytes:
        """Encode in protobuf; an unchanged message keeps the bytes it was decoded from.

        :raises InvalidMessage: a value does not fit its field.
        """
        origin = self._origin
        if origin is not None and self._intact:
            return origin
        attributes = self.attributes.to_bytes()
        rest = b""
        if origin is not None and _split(origin) is None:
            was = UMessage.from_bytes(origin)
            if was.payload == self.payload and was.attributes.to_bytes() == attributes:
                return origin
            unknown = proto.UMessage.FromString(origin)
            unknown.ClearField("attributes")
            unknown.ClearField("payload")
            rest = unknown.SerializeToString()
        parts = [_length(_ATTRIBUTES, len(attributes)), attributes]
        if self.payload is not None:
            parts += [_length(_PAYLOAD, len(self.payload)), self.payload]
        return b"".join([*parts, rest])

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return len(self.payload) if self.payload is not None else 0

    def replace(self, **changes: Any) -> UMessage:
        """Return a copy with some fields changed; unknown fields are kept."""
        return replace(self, **changes)

    def with_attributes(self, **changes: Any) -> UMessage:
        """Return a copy with some attributes changed, such as `sink=None`."""
        return UMessage(self.attributes.replace(**changes), self.payload, _origin=self._origin)

    def validate(self) -> list[str]:
        """Return the names of the violated rules; empty if it is valid."""
        return validate(self.attributes, self.payload is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return UMessage.from_bytes, (self.to_bytes(),)


_blank = object.__new__
_attributes_from = UAttributes.from_bytes


def _split(data: bytes) -> tuple[int, int, int] | None:
    """Find the attributes and the payload in bytes that have just these fields, in this order.

    :returns: start and end of the attributes, and start of the payload (0: none); None if the
        bytes have another structure, which the protobuf library must decode.
    """
    size = len(data)
    if size < 2 or data[0] != _ATTRIBUTES:  # noqa: PLR2004 - a tag and a length
        return None
    length, begin = data[1], 2
    if length > 0x7F:  # noqa: PLR2004 - a varint goes on
        if size == 2 or data[2] > 0x7F:  # noqa: PLR2004
            return None
        length, begin = length & 0x7F | data[2] << 7, 3
    end = begin + length
    if end >= size:
        return (begin, end, 0) if end == size else None
    if data[end] != _PAYLOAD:
        return None
    at = end + 1
    length = shift = 0
    while at < size and shift < 35:  # noqa: PLR2004 - five bytes hold the longest length
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004
            return (begin, end, at) if at + length == size else None
        shift += 7
    return None


def _decoded(data: bytes) -> tuple[UAttributes, bytes | None]:
    try:
        message = proto.UMessage.FromString(data)
    except proto.UNDECODABLE as error:
        raise InvalidMessage("the bytes do not decode") from error
    attributes = message.attributes.SerializeToString()
    return _attributes_from(attributes), message.payload if message.HasField("payload") else None


def _length(tag: int, length: int) -> bytes:
    found = bytearray([tag])
    while length > 0x7F:  # noqa: PLR2004 - a varint goes on
        found.append(length & 0x7F | 0x80)
        length >>= 7
    found.append(length)
    return bytes(found)


# --- new ones -------------------------------------------------------------------------------


def _made(payload: bytes | None, id: UUID7 | None, **others: Any) -> UMessage:
    attributes = UAttributes(id=id or UUID7.new(), **others)
    check(attributes, payload is not None)
    return UMessage(attributes, payload)


def publish(
    topic: UUri,
    payload: bytes | None = None,
    *,
    payload_format: UPayloadFormat = UPayloadFormat.UNSPECIFIED,
    priority: UPriority = UPriority.UNSPECIFIED,
    ttl: int | None = None,
    traceparent: str | None = None,
    sink: UUri | None = None,
    id: UUID7 | None = None,
) -> UMessage:
    """Create a message to all subscribers of a topic.

    :raises InvalidMessage: the message would violate a rule.
    """
    return _made(
        payload,
        id,
        type=UMessageType.PUBLISH,
        source=topic,
        sink=sink,
        priority=priority,
        ttl=ttl,
        traceparent=traceparent,
        payload_format=payload_format,
    )


def notification(
    source: UUri,
    sink: UUri,
    payload: bytes | None = None,
    *,
    payload_format: UPayloadFormat = UPayloadFormat.UNSPECIFIED,
    priority: UPriority = UPriority.UNSPECIFIED,
    ttl: int | None = None,
    traceparent: str | None = None,
    id: UUID7 | None = None,
) -> UMessage:
    """Create a message of a topic to one entity.

    :raises InvalidMessage: the message would violate a rule.
    """
    return _made(
        payload,
        id,
        type=UMessageType.NOTIFICATION,
        source=source,
        sink=sink,
        priority=priority,
        ttl=ttl,
        traceparent=traceparent,
        payload_format=payload_format,
    )


def request(
    source: UUri,
    method: UUri,
    payload: bytes | None = None,
    *,
    payload_format: UPayloadFormat = UPayloadFormat.UNSPECIFIED,
    priority: UPriority = UPriority.CS4,
    ttl: int = DEFAULT_TTL_MS,
    permission_level: int | None = None,
    token: str | None = None,
    traceparent: str | None = None,
    id: UUID7 | None = None,
) -> UMessage:
    """Create a call of a method; the response goes to `source`.

    :raises InvalidMessage: the message would violate a rule.
    """
    return _made(
        payload,
        id,
        type=UMessageType.REQUEST,
        source=source,
        sink=method,
        priority=priority,
        ttl=ttl,
        permission_level=permission_level,
        token=token,
        traceparent=traceparent,
        payload_format=payload_format,
    )


def response(
    request: UMessage,
    payload: bytes | None = None,
    *,
    payload_format: UPayloadFormat = UPayloadFormat.UNSPECIFIED,
    commstatus: UCode | None = None,
    traceparent: str | None = None,
    id: UUID7 | None = None,
) -> UMessage:
    """Create the response to a request, with its priority, its ttl, and its id as `reqid`.

    If the priority or ttl of the request is invalid, the response gets the smallest valid one.

    :raises InvalidMessage: it is not a request, or has no id, source or sink.
    """
    asked = request.attributes
    if asked.type != UMessageType.REQUEST:
        raise InvalidMessage(
            f"only a request is answered, not a {asked.type.name}", rules=["type"], field="type"
        )
    usable = UPriority.CS4 <= asked.priority <= UPriority.CS6
    return _made(
        payload,
        id,
        type=UMessageType.RESPONSE,
        source=asked.sink,
        sink=asked.source,
        priority=asked.priority if usable else UPriority.CS4,
        ttl=asked.ttl or DEFAULT_TTL_MS,
        commstatus=commstatus,
        reqid=asked.id,
        traceparent=traceparent,
        payload_format=payload_format,
    )


def error_response(
    request: UMessage, code: UCode, message: str = "", *, id: UUID7 | None = None
) -> UMessage:
    """Create the response to a request that cannot be delivered (docs/specs/uprotocol.md 10.2).

    :raises InvalidMessage: it is not a request, or has no id, source or sink.
    """
    return response(
        request,
        UStatus(code, message).to_bytes(),
        payload_format=UPayloadFormat.PROTOBUF,
        commstatus=code,
        id=id,
    )
