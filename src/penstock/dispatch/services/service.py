"""How does a service inside the dispatcher answer? (spec uprotocol 5, 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UStatusError,
    UUri,
    error_response,
    proto,
    response,
)

if TYPE_CHECKING:
    from penstock.core.clock import Clock

__all__ = ["Method", "Service", "decoded"]

#: Answers the payload of a request of an entity with that of a response.
Method = Callable[[UUri, bytes], bytes]


class Service:
    """An entity that answers requests. What it is asked at once it answers one after the other.

    Being asked twice, as may happen after a crash, does no harm.
    """

    service_id: ClassVar[int]
    version: ClassVar[int]
    name: ClassVar[str]

    def __init__(self, authority: str, clock: Clock) -> None:
        self.address = UUri(authority, self.service_id, self.version, 0)
        self.clock = clock
        self.methods: Mapping[int, Method] = {}

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def new_id(self) -> UUID7:
        """Return an id for a message of this moment."""
        return UUID7.new(self.now_ms)

    def receive(self, message: UMessage) -> list[UMessage]:
        """Act on a message; return what is to be sent, the answer first.

        :raises StorageError: what it has to keep could not be kept; the message comes again.
        """
        attributes = message.attributes
        if attributes.type != UMessageType.REQUEST:
            return []
        assert attributes.source is not None
        assert attributes.sink is not None
        try:
            method = self.method(attributes.sink)
            if method is None:
                raise UStatusError(  # noqa: TRY301 - like all that a method raises
                    UCode.UNIMPLEMENTED,
                    f"{self.name} version {self.version} at {self.address} has the methods "
                    f"{', '.join(f'{number:X}' for number in sorted(self.methods))}",
                )
            payload = method(attributes.source.with_resource(0), _payload(message))
        except UStatusError as error:
            return [error_response(message, error.code, error.message, id=self.new_id())]
        return [_answer(message, payload, self.new_id())]

    def method(self, address: UUri) -> Method | None:
        """Find a method by its address; None: there is none."""
        is_own = address.ue_version_major == self.version
        return self.methods.get(address.resource_id) if is_own else None

    def work(self) -> list[UMessage]:
        """Do what is due by now; return what is to be sent."""
        return []

    def next_due(self) -> float | None:
        """Return when there is something to do (monotonic seconds); None: only when asked."""
        return None

    def close(self) -> None:
        """Give everything back."""


def decoded(kind: Any, payload: bytes) -> Any:
    """Read a protobuf message.

    :raises UStatusError: INVALID_ARGUMENT, it is not one.
    """
    try:
        return kind.FromString(payload)
    except proto.UNDECODABLE as error:
        raise UStatusError(
            UCode.INVALID_ARGUMENT, f"the payload is not a {kind.DESCRIPTOR.name}"
        ) from error


def _payload(message: UMessage) -> bytes:
    payload = message.payload or b""
    if message.attributes.payload_format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
        value: bytes = decoded(proto.Any_, payload).value
        return value
    plain = (UPayloadFormat.PROTOBUF, UPayloadFormat.UNSPECIFIED)
    if payload and message.attributes.payload_format not in plain:
        raise UStatusError(UCode.INVALID_ARGUMENT, "the payload should be protobuf")
    return payload


def _answer(request: UMessage, payload: bytes, id: UUID7) -> UMessage:
    """Answer in the form that was asked in: wrapped, or plain."""
    wrapped = UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY
    if request.attributes.payload_format != wrapped:
        return response(request, payload, payload_format=UPayloadFormat.PROTOBUF, id=id)
    asked = decoded(proto.Any_, request.payload or b"").type_url
    url = asked.replace("Request", "Response") if asked.endswith("Request") else ""
    packed = proto.Any_(type_url=url, value=payload).SerializeToString()
    return response(request, packed, payload_format=wrapped, id=id)
