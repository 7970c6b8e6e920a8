"""Which errors have only uProtocol's addresses, ids and messages?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["InvalidMessage", "InvalidUUID", "InvalidUUri"]

_SHOWN = 200


class _Invalid(PenstockError, ValueError):
    """Base class: the value, and the rule that it violates."""

    _what = "value"

    def __init__(self, value: object, rule: str, *, hint: str | None = None) -> None:
        shown = value.hex() if isinstance(value, bytes) else str(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        super().__init__(f"{shown!r} is not a {self._what}: {rule}", hint=hint)
        self.value = value
        self.rule = rule


class InvalidUUri(_Invalid):
    """Text, bytes or numbers are not a uProtocol URI (docs/specs/uprotocol.md 1)."""

    _what = "uProtocol URI"


class InvalidUUID(_Invalid):
    """Text, bytes or numbers are not a UUID of version 7 (docs/specs/uprotocol.md 2)."""

    _what = "UUID of version 7"


class InvalidMessage(PenstockError, ValueError):
    """A message, its attributes or their encoding on a transport are invalid."""

    def __init__(
        self, reason: str, *, rules: Sequence[str] = (), field: str = "", hint: str | None = None
    ) -> None:
        super().__init__(f"not a uProtocol message: {reason}", hint=hint)
        self.reason = reason
        #: The violated rules of `validation`; empty if it could not be decoded.
        self.rules = tuple(rules)
        #: The invalid attribute or property, by its name on the transport.
        self.field = field
