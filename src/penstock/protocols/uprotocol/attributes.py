"""What does a message of uProtocol say of itself? (spec uprotocol 3.1).

Attributes that came from outside keep their bytes, so that a hop forwards what it does not know.
They are also read for every message, and those of one topic differ only in the id, which comes
first on the wire: what follows the id is decoded once and remembered.
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

__all__ = ["UAttributes"]

# Field 1 of 18 bytes, which are two fixed64: how every encoder writes the id.
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

    They may break the rules of their type: `validation.validate` tells which. Those that came
    from outside may also hold an address or an id that the classes' constructors would refuse.
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
    #: The bytes that these were made from, and that a change is applied to.
    _origin: bytes | None = field(default=None, repr=False, compare=False, kw_only=True)

    #: Whether nothing was changed since the bytes were read.
    _intact: ClassVar[bool] = False
    #: The rules that are violated by all but the id, with and without a payload.
    _violated: ClassVar[dict[bool, tuple[str, ...]] | None] = None

    @classmethod
    def from_bytes(cls, data: bytes) -> UAttributes:
        """Read the protobuf form.

        :raises InvalidMessage: it does not decode.
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
        """Read bytes in which the id is not where it usually is."""
        message = _decode(data)
        made: UAttributes = _blank(cls)
        made.__dict__.update(
            _values(message), id=_id(message.id) if message.HasField("id") else None, _origin=data
        )
        return made

    def to_bytes(self) -> bytes:
        """Write the protobuf form; the very bytes that were read, unless something is changed.

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
        """Make others with some changed; fields that are not known here are kept."""
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
    """Decode what follows the id, and remember it if it is likely to come again."""
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
