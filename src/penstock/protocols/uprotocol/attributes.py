"""What does a message of uProtocol say of itself, and when does it expire?

(docs/specs/uprotocol.md 3.1 and 3.3)

Decoded attributes keep their bytes, so that a hop forwards unknown fields. The attributes of one
topic differ only in the id, which comes first on the wire: the rest is decoded once and cached.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["UAttributes", "addresses", "expires_at_ms", "is_expired"]

# Field 1 of 18 bytes, two fixed64: the id as every encoder writes it.
_ID: Final = struct.Struct("<QxQ")
_ID_BEGINS = b"\x0a\x12\x09"
_ID_MIDDLE = 11
_ID_SECOND = 0x11
_ID_SIZE = 20
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
        if data[:3] == _ID_BEGINS and len(data) >= _ID_SIZE and data[_ID_MIDDLE] == _ID_SECOND:
            rest = data[_ID_SIZE:]
            values = _remembered.get(rest)
            if values is None:
                values = _learn(rest)
            if values:
                made: UAttributes = _blank(cls)
                inside = made.__dict__
                inside.update(values)
                inside["id"] = _unchecked_id(*_ID.unpack_from(data, 3))
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
    if (
        values["reqid"] is None  # differs with every message, as a trace does
        and values["traceparent"] is None
        and values["token"] is None  # a secret is not kept longer than its message
        and len(rest) <= _LONGEST_REMEMBERED
    ):
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
