"""How does a stored message look to a leg that may need only its bytes?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.protocols.uprotocol import UMessage

if TYPE_CHECKING:
    from penstock.protocols.uprotocol import UAttributes

__all__ = ["Parcel", "parcel"]


class Parcel(UMessage):
    """A message that is decoded when somebody asks for its attributes or its payload."""

    #: Beside the fields, since setting one costs less than their dictionary.
    __slots__ = ("_raw",)
    _raw: bytes

    @property
    def _whole(self) -> UMessage:
        whole: UMessage | None = self.__dict__.get("whole")
        if whole is None:
            whole = self.__dict__["whole"] = UMessage.from_bytes(self._raw)
        return whole

    @property
    def attributes(self) -> UAttributes:
        return self._whole.attributes

    @property
    def payload(self) -> bytes | None:
        return self._whole.payload

    def to_bytes(self) -> bytes:
        return self._raw

    def replace(self, **changes: Any) -> UMessage:
        return self._whole.replace(**changes)

    def with_attributes(self, **changes: Any) -> UMessage:
        return self._whole.with_attributes(**changes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Parcel):
            other = other._whole
        return self._whole == other

    def __hash__(self) -> int:
        return hash(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)


_blank = object.__new__
_set_raw = Parcel.__dict__["_raw"].__set__


def parcel(raw: bytes) -> Parcel:
    """Wrap the bytes of a message that is known to decode."""
    made: Parcel = _blank(Parcel)
    _set_raw(made, raw)
    return made
