"""What is a message of uProtocol, what are its bytes, and how are new ones made?

(docs/specs/uprotocol.md 3 and 10.2)

Decoded messages keep their bytes, so that a hop forwards unknown fields. The attributes of one
topic differ only in the id, which comes first on the wire: the rest is decoded once and cached.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import (
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
)
from penstock.protocols.uprotocol.errors import InvalidMessage, InvalidUUri
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check, validate

__all__ = [
    "DEFAULT_TTL_MS",
    "ID_SIZE",
    "UAttributes",
    "UMessage",
    "addresses",
    "encode_id",
    "error_response",
    "expires_at_ms",
    "is_expired",
    "kind_of",
    "notification",
    "publish",
    "request",
    "response",
    "tagged",
    "varint",
    "with_authorities",
]

#: The default ttl of a request.
DEFAULT_TTL_MS = 10_000

#: The tags of fields 1 and 2.
_ATTRIBUTES = 0x0A
_PAYLOAD = 0x12

#: Bytes of the id with its tags, as every encoder writes it: field 1 of 18 bytes, two fixed64.
#: They are the first of the attributes.
ID_SIZE: Final = 20
_ID: Final = struct.Struct("<3sQBQ")
_ID_BEGINS = b"\x0a\x12\x09"
_ID_MIDDLE = 11
_ID_SECOND = 0x11
_REMEMBERED = 4096
_LONGEST_REMEMBERED = 512


@dataclass(frozen=True)
class UAttributes:
    """The attributes of a message; None where an optional one is absent.

    They may violate the rules of their type; `validation.validate` names those. Decoded ones may
    also hold an address or an id that the constructors would reject.
    """

    id: UUID7 | None = None
    type: UMessageType = UMessageType.UNSPECIFIED
    source: UUri | None = None
    sink: UUri | None = None
    priority: UPriority = UPriority.UNSPECIFIED
    ttl: int | None = None
    permission_level: int | None = None
    commstatus: UCode | None = None
    reqid: UUID7 | None = None
    token: str | None = field(default=None, repr=False)
    traceparent: str | None = None
    payload_format: UPayloadFormat = UPayloadFormat.UNSPECIFIED
    #: The bytes that these were decoded from, and that changes apply to.
    _origin: bytes | None = field(default=None, repr=False, compare=False, kw_only=True)

    #: Whether they are unchanged since decoding.
    _intact: ClassVar[bool] = False
    #: Cache of the violated rules, without those of the id, with and without a payload.
    _violated: ClassVar[dict[bool, tuple[str, ...]] | None] = None

    @classmethod
    def from_bytes(cls, data: bytes) -> UAttributes:
        """Decode the protobuf form.

        :raises InvalidMessage: the bytes do not decode.
        """
        if type(data) is not bytes:
            data = bytes(data)
        rest = _after_id(data)
        if rest is not None:
            values = _remembered.get(rest)
            if values is None:
                values = _learn(rest)
            if values:
                made: UAttributes = _blank(cls)
                inside = made.__dict__
                inside.update(values)
                _, msb, _, lsb = _ID.unpack_from(data)
                inside["id"] = _unchecked_id(msb, lsb)
                inside["_origin"] = data
                return made
        return cls._from_any_bytes(data)

    @classmethod
    def _from_any_bytes(cls, data: bytes) -> UAttributes:
        """Decode attributes whose id is not in the usual place."""
        message = _decode(data)
        made: UAttributes = _blank(cls)
        made.__dict__.update(
            _values(message), id=_id(message.id) if message.HasField("id") else None, _origin=data
        )
        return made

    def to_bytes(self) -> bytes:
        """Encode in protobuf; unchanged attributes keep the bytes they were decoded from.

        :raises InvalidMessage: a value does not fit its field.
        """
        origin = self._origin
        if origin is not None and self._intact:
            return origin
        changed: Any = _FIELDS
        if origin is not None:
            was = UAttributes.from_bytes(origin)
            changed = [name for name in _FIELDS if getattr(was, name) != getattr(self, name)]
            if not changed:
                return origin
        message = _decode(origin or b"")
        for name in changed:
            self._put(message, name)
        data: bytes = message.SerializeToString(deterministic=True)
        return data

    def _put(self, message: Any, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            message.ClearField(name)
            return
        try:
            if name in _MESSAGES:
                inside = getattr(message, name)
                inside.CopyFrom(value.to_proto())
                inside.SetInParent()
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            shown = "…" if name == "token" else repr(value)[:80]
            raise InvalidMessage(f"{name} = {shown} does not fit", field=name) from error

    def replace(self, **changes: Any) -> UAttributes:
        """Return a copy with some attributes changed; unknown fields are kept."""
        if not _NAMES.issuperset(changes):
            return replace(self, **changes)  # says which is not a field
        made: UAttributes = _blank(UAttributes)
        inside = made.__dict__
        inside.update(self.__dict__)
        inside.update(changes)
        inside.update(_CHANGED)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return UAttributes.from_bytes, (self.to_bytes(),)

    @property
    def effective_priority(self) -> UPriority:
        return self.priority.effective


def _after_id(attributes: bytes) -> bytes | None:
    """Return the encoded attributes after the id; None if the id is not in its usual place."""
    is_usual = (
        attributes[:3] == _ID_BEGINS
        and len(attributes) >= ID_SIZE
        and attributes[_ID_MIDDLE] == _ID_SECOND
    )
    return attributes[ID_SIZE:] if is_usual else None


def kind_of(attributes: UAttributes) -> bytes | None:
    """Return the encoded attributes after the id, if others are likely to have the same.

    What is the same for all messages of a kind is worth to be remembered by it.
    """
    rest = _after_id(attributes.to_bytes())
    return rest if rest is not None and _comes_again(rest, attributes.__dict__) else None


def _comes_again(rest: bytes, values: dict[str, Any]) -> bool:
    return (
        values["reqid"] is None  # differs with every message, as a trace does
        and values["traceparent"] is None
        and values["token"] is None  # a secret is not kept longer than its message
        and len(rest) <= _LONGEST_REMEMBERED
    )


def encode_id(id: UUID7) -> bytes:
    """Encode an id as the first `ID_SIZE` bytes of attributes."""
    return _ID.pack(_ID_BEGINS, id.msb, _ID_SECOND, id.lsb)


_FIELDS: Final = (
    *("id", "type", "source", "sink", "priority", "ttl", "permission_level", "commstatus"),
    *("reqid", "token", "traceparent", "payload_format"),
)

_NAMES: Final = frozenset(_FIELDS)

_CHANGED: Final = {"_intact": False, "_violated": None}

_MESSAGES: Final = frozenset({"id", "source", "sink", "reqid"})

_blank = object.__new__

_unchecked_id = UUID7.unchecked

_remembered: dict[bytes, dict[str, Any]] = {}


def _decode(data: bytes) -> Any:
    try:
        return proto.UAttributes.FromString(data)
    except proto.UNDECODABLE as error:
        raise InvalidMessage("the attributes do not decode", field="attributes") from error


def _learn(rest: bytes) -> dict[str, Any] | None:
    """Decode the attributes after the id, and cache them if they are likely to be reused."""
    message = _decode(rest)
    if message.HasField("id"):
        return None  # a second id, of which protobuf takes the parts that it has
    values = _values(message)
    if _comes_again(rest, values):
        if len(_remembered) >= _REMEMBERED:
            _remembered.clear()
        _remembered[rest] = values
    return values


def _id(message: Any) -> UUID7:
    return UUID7.unchecked(message.msb, message.lsb)


def _values(message: Any) -> dict[str, Any]:
    has = message.HasField
    return {
        "type": UMessageType(message.type),
        "source": UUri.from_proto_unchecked(message.source) if has("source") else None,
        "sink": UUri.from_proto_unchecked(message.sink) if has("sink") else None,
        "priority": UPriority(message.priority),
        "ttl": message.ttl if has("ttl") else None,
        "permission_level": message.permission_level if has("permission_level") else None,
        "commstatus": UCode(message.commstatus) if has("commstatus") else None,
        "reqid": _id(message.reqid) if has("reqid") else None,
        "token": message.token if has("token") else None,
        "traceparent": message.traceparent if has("traceparent") else None,
        "payload_format": UPayloadFormat(message.payload_format),
        "_intact": True,
        "_violated": {},
    }


def addresses(attributes: UAttributes) -> tuple[UUri, UUri | None]:
    """Return the source and the sink that a transport addresses a message by.

    A publish is addressed by its topic alone, even if a streamer added a sink.

    :raises InvalidMessage: the source is missing, or an address is a pattern.
    """
    source, sink = attributes.source, attributes.sink
    if attributes.type == UMessageType.PUBLISH:
        sink = None
    elif sink is None:
        raise InvalidMessage("there is no sink to send it to", field="sink")
    if source is None:
        raise InvalidMessage("there is no source", field="source")
    for uri, name in ((source, "source"), (sink, "sink")):
        if uri is not None and (uri.has_wildcard or not uri.is_valid):
            raise InvalidMessage(
                f"the {name} {str(uri)[:200]} is not the address of one thing",
                rules=[f"{name}-wildcard" if uri.is_valid else f"{name}-uuri"],
                field=name,
            )
    return source, sink


def with_authorities(attributes: UAttributes, source: str, sink: str) -> UAttributes:
    """Fill in the authorities of local addresses, as the transport's own address names them.

    To its sender a local address means another authority than to its receiver.

    :raises InvalidMessage: no authority can have such a name.
    """
    from_, to = attributes.source, attributes.sink
    changes: dict[str, UUri] = {}
    try:
        if from_ is not None and from_.is_local and source:
            changes["source"] = from_.with_authority(source)
        if to is not None and to.is_local and sink:
            changes["sink"] = to.with_authority(sink)
    except InvalidUUri as error:
        raise InvalidMessage(str(error), field="source" if not changes else "sink") from error
    return attributes.replace(**changes) if changes else attributes


def expires_at_ms(what: UAttributes | UUID7, ttl: int | None = None) -> int | None:
    """Return the last millisecond before a message expires; None if it never does.

    :param what: the attributes of a message, or its id together with the ttl.
    """
    if isinstance(what, UAttributes):
        ttl = what.ttl
        if what.id is None:
            return None  # no id, no time: such a message is refused for that
        what = what.id
    return (what.msb >> 16) + ttl if ttl else None


def is_expired(what: UAttributes | UUID7, now_ms: int, ttl: int | None = None) -> bool:
    """Tell whether a message has expired; in its last millisecond it has not."""
    end = expires_at_ms(what, ttl)
    return end is not None and now_ms > end


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
        parts = [tagged(1, len(attributes)), attributes]
        if self.payload is not None:
            parts += [tagged(2, len(self.payload)), self.payload]
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


def tagged(field: int, length: int) -> bytes:
    """Return the tag and length of a bytes field in protobuf, with a number below 16."""
    return bytes((field << 3 | 2,)) + varint(length)


def varint(number: int) -> bytes:
    """Encode a number as protobuf and MQTT do: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - a varint goes on
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
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
    request: UMessage,
    code: UCode,
    message: str = "",
    *,
    details: tuple[bytes, ...] = (),
    id: UUID7 | None = None,
) -> UMessage:
    """Create the response to a request that failed, or cannot be delivered.

    (docs/specs/uprotocol.md 10.2)

    :param details: as in a `UStatus`.
    :raises InvalidMessage: it is not a request, or has no id, source or sink.
    """
    return response(
        request,
        UStatus(code, message, details).to_bytes(),
        payload_format=UPayloadFormat.PROTOBUF,
        commstatus=code,
        id=id,
    )
