"""Until when may a message be delivered? (spec uprotocol 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocols.uprotocol.attributes import UAttributes

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.uuid7 import UUID7

__all__ = ["expires_at_ms", "is_expired"]


def expires_at_ms(what: UAttributes | UUID7, ttl: int | None = None) -> int | None:
    """Give the last millisecond in which the message is alive; None if it lives for ever.

    :param what: a message's attributes, or its id, which needs the ttl beside it.
    """
    if isinstance(what, UAttributes):
        ttl = what.ttl
        if what.id is None:
            return None  # no id, no time: such a message is refused for that
        what = what.id
    return (what.msb >> 16) + ttl if ttl else None


def is_expired(what: UAttributes | UUID7, now_ms: int, ttl: int | None = None) -> bool:
    """Tell whether the message must not be delivered any more; at the very end it still may."""
    end = expires_at_ms(what, ttl)
    return end is not None and now_ms > end
