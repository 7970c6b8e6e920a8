"""Which requests are answered with an error, how, and how often? (spec uprotocol 10.2)."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from penstock.dispatch.duplicates import Window
from penstock.protocols.uprotocol import (
    UUID7,
    InvalidMessage,
    UCode,
    UMessage,
    UMessageType,
    error_response,
)

if TYPE_CHECKING:
    from penstock.protocols.uprotocol import UAttributes

__all__ = ["COMMSTATUS", "Answers", "commstatus", "is_answerable"]

#: The codes that a dispatcher answers a request with.
COMMSTATUS: Final = frozenset(
    {
        UCode.UNAVAILABLE,
        UCode.DEADLINE_EXCEEDED,
        UCode.PERMISSION_DENIED,
        UCode.UNAUTHENTICATED,
        UCode.RESOURCE_EXHAUSTED,
        UCode.INVALID_ARGUMENT,
        UCode.UNKNOWN,
        UCode.INTERNAL,
    }
)

#: What the other codes of a leg mean to whoever made the request.
_MEANS: Final = {
    UCode.NOT_FOUND: UCode.UNAVAILABLE,  # nobody is registered there
    UCode.CANCELLED: UCode.UNAVAILABLE,
    UCode.ABORTED: UCode.UNAVAILABLE,
    UCode.FAILED_PRECONDITION: UCode.UNAVAILABLE,
    UCode.UNIMPLEMENTED: UCode.INVALID_ARGUMENT,  # the leg cannot carry such a message
    UCode.OUT_OF_RANGE: UCode.INVALID_ARGUMENT,
    UCode.DATA_LOSS: UCode.INTERNAL,
}

_REMEMBERED: Final = 10_000
_VERSION: Final = 0x7000
_VARIANT: Final = 0b10 << 62


def commstatus(code: UCode) -> UCode:
    """Return the code that a request is answered with."""
    return code if code in COMMSTATUS else _MEANS.get(code, UCode.UNKNOWN)


class Answers:
    """Error responses: one for each request, whatever becomes of it, and for nothing else."""

    def __init__(self) -> None:
        self._answered = Window(_REMEMBERED)

    def to(self, attributes: UAttributes, code: UCode, text: str, now_ms: int) -> UMessage | None:
        """Make the response to a request that was not delivered.

        :returns: None for what is not a request, cannot be answered, or was already.
        """
        if attributes.type != UMessageType.REQUEST or not is_answerable(attributes):
            return None
        key = _key(attributes)
        if not self._answered.is_new(key):
            return None
        request = UMessage(attributes)
        try:
            return error_response(request, commstatus(code), text, id=_id_of(key, now_ms))
        except InvalidMessage:
            return None


def is_answerable(attributes: UAttributes) -> bool:
    """Tell whether there is an id and somebody to answer to, and something that answers."""
    id, source, sink = attributes.id, attributes.source, attributes.sink
    return (
        id is not None
        and id.is_valid
        and source is not None
        and source.is_valid
        and source.is_rpc_response
        and not source.has_wildcard
        and sink is not None
        and sink.is_valid
        and sink.is_rpc_method
        and not sink.has_wildcard
    )


def _key(attributes: UAttributes) -> bytes:
    assert attributes.id is not None
    assert attributes.source is not None
    return attributes.id.to_big_endian() + attributes.source.to_bytes()


def _id_of(key: bytes, now_ms: int) -> UUID7:
    """Make an id of this moment whose chance is the request's.

    After a crash a request may be answered a second time; that the two are one can be seen.
    """
    chance = int.from_bytes(blake2b(key, digest_size=10, person=b"rpc-error").digest())
    return UUID7.unchecked(
        now_ms << 16 | _VERSION | chance >> 68, _VARIANT | chance & ((1 << 62) - 1)
    )
