"""Which numbers does uProtocol give to types, classes, formats and outcomes?

(docs/specs/uprotocol.md 3.1)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from penstock.core.errors import PenstockError
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.errors import InvalidMessage

__all__ = [
    "DeadLetterReason",
    "SubscriptionStatus",
    "UCode",
    "UMessageType",
    "UPayloadFormat",
    "UPriority",
    "UStatus",
    "UStatusError",
]


class _Open(IntEnum):
    """An open protobuf enumeration: unknown numbers are kept."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member

    @property
    def is_known(self) -> bool:
        return self._value_ in type(self)._value2member_map_


class UCode(_Open):
    """The outcome of an operation; the numbers of google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class UMessageType(_Open):
    """The type of a message."""

    UNSPECIFIED = 0
    PUBLISH = 1
    REQUEST = 2
    RESPONSE = 3
    NOTIFICATION = 4

    @property
    def ce_name(self) -> str:
        """Its name in CloudEvents and MQTT; empty if it has none."""
        return _CE_NAMES.get(self, "")

    @classmethod
    def from_ce_name(cls, name: str) -> UMessageType:
        """Return the type with a name.

        :raises InvalidMessage: no type has this name.
        """
        found = _BY_CE_NAME.get(name)
        if found is None:
            raise InvalidMessage(
                f"{name[:40]!r} is not a type of message", rules=["type"], field="type"
            )
        return found


_CE_NAMES = {
    UMessageType.PUBLISH: "up-pub.v1",
    UMessageType.REQUEST: "up-req.v1",
    UMessageType.RESPONSE: "up-res.v1",
    UMessageType.NOTIFICATION: "up-not.v1",
}
_BY_CE_NAME = {name: type for type, name in _CE_NAMES.items()}


class UPriority(_Open):
    """The class of service; its number is one more than the class."""

    UNSPECIFIED = 0
    CS0 = 1
    CS1 = 2
    CS2 = 3
    CS3 = 4
    CS4 = 5
    CS5 = 6
    CS6 = 7

    @property
    def effective(self) -> UPriority:
        """The class in effect: CS1 if none is set, or an unknown one."""
        return self if self._value_ and self.is_known else UPriority.CS1

    @classmethod
    def from_name(cls, name: str) -> UPriority:
        """Return the class with a name, `CS0` to `CS6`.

        :raises InvalidMessage: no class has this name.
        """
        found = _BY_CLASS.get(name)
        if found is None:
            raise InvalidMessage(f"{name[:40]!r} is not a priority, CS0 to CS6", field="priority")
        return found


_BY_CLASS = {priority.name: priority for priority in UPriority if priority}


class UPayloadFormat(_Open):
    """The format of a payload."""

    UNSPECIFIED = 0
    PROTOBUF_WRAPPED_IN_ANY = 1
    PROTOBUF = 2
    JSON = 3
    SOMEIP = 4
    SOMEIP_TLV = 5
    RAW = 6
    TEXT = 7
    #: An address in the memory of one device.
    SHM = 8

    @property
    def mime_type(self) -> str:
        """Its media type; empty if it has none."""
        return _MIME_TYPES.get(self, "")


_MIME_TYPES = {
    UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY: "application/x-protobuf",
    UPayloadFormat.PROTOBUF: "application/protobuf",
    UPayloadFormat.JSON: "application/json",
    UPayloadFormat.SOMEIP: "application/x-someip",
    UPayloadFormat.SOMEIP_TLV: "application/x-someip_tlv",
    UPayloadFormat.RAW: "application/octet-stream",
    UPayloadFormat.TEXT: "text/plain",
    UPayloadFormat.SHM: "application/x-shm",
}


class SubscriptionStatus(_Open):
    """The status of a subscription (docs/specs/uprotocol.md 6.1)."""

    UNSPECIFIED = 0
    UNSUBSCRIBED = 1
    SUBSCRIBE_PENDING = 2
    SUBSCRIBED = 3
    UNSUBSCRIBE_PENDING = 4


class DeadLetterReason(_Open):
    """Why a message is on the dead-letter topic; see the .proto file for what each means."""

    UNSPECIFIED = 0
    EXPIRED = 1
    QUEUE_FULL = 2
    NO_ROUTE = 3
    UNREACHABLE = 4
    INVALID = 5
    FORBIDDEN = 6
    UNAUTHENTICATED = 7
    UNSUPPORTED = 8
    REFUSED = 9
    INTERNAL = 10
    ADMINISTRATOR = 11


@dataclass(frozen=True, slots=True)
class UStatus:
    """The outcome of an operation: a code, a text and perhaps details."""

    code: UCode = UCode.OK
    message: str = ""
    #: Further information: encoded messages google.protobuf.Any.
    details: tuple[bytes, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes) -> UStatus:
        """Decode the protobuf form.

        :raises InvalidMessage: the bytes do not decode.
        """
        try:
            return cls.from_proto(proto.UStatus.FromString(data))
        except proto.UNDECODABLE as error:
            raise InvalidMessage("a UStatus that does not decode", field="payload") from error

    @classmethod
    def from_proto(cls, message: Any) -> UStatus:
        details = tuple(one.SerializeToString(deterministic=True) for one in message.details)
        return cls(UCode(message.code), message.message, details)

    def to_proto(self) -> Any:
        # The text is optional on the wire: an empty one is omitted.
        details = [proto.Any_.FromString(one) for one in self.details]
        return proto.UStatus(code=int(self.code), message=self.message or None, details=details)

    def to_bytes(self) -> bytes:
        data: bytes = self.to_proto().SerializeToString(deterministic=True)
        return data

    @property
    def is_ok(self) -> bool:
        return self.code == UCode.OK


class UStatusError(PenstockError):
    """A failed operation of uProtocol, with the code for the peer."""

    def __init__(
        self,
        code: UCode,
        message: str = "",
        *,
        details: tuple[bytes, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}" if message else code.name, hint=hint)
        self.code = code
        self.message = message
        #: As `UStatus.details`.
        self.details = details

    @property
    def status(self) -> UStatus:
        return UStatus(self.code, self.message, self.details)
