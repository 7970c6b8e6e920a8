"""Which errors can only psi's bytes cause?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DamagedStore", "Truncated", "UnknownStream", "UnknownType", "WrongVersion"]


class Truncated(Malformed):
    """The bytes end within a record."""

    def __init__(self, what: str, where: str, needed: int, there: int) -> None:
        super().__init__(what, where, f"{needed:,} bytes", f"{there:,}")
        self.needed = needed
        self.there = there


class WrongVersion(Malformed):
    """The peer speaks another version of the protocol."""

    def __init__(self, what: str, expected: int, found: int) -> None:
        super().__init__(
            what, "version", expected, found, hint="see that both ends are of a psi that can talk"
        )
        self.version = found


class UnknownStream(Malformed):
    """A message's source was not announced, or no stream has that name."""

    def __init__(self, stream: int | str, known: str) -> None:
        super().__init__(
            "psi message",
            "stream",
            f"one of {known}" if known else "announced before its messages",
            repr(stream),
            hint="announce a stream by its metadata before you send its messages",
        )
        self.stream = stream


class DamagedStore(Malformed):
    """Files of a psi store are missing, truncated or overwritten."""

    def __init__(self, store: str, damage: Sequence[str]) -> None:
        more = f" (and {len(damage) - 1} more places)" if len(damage) > 1 else ""
        super().__init__(
            f"psi store {store}",
            "its files",
            "whole",
            f"damage: {damage[0]}{more}",
            hint="copy them again from where they were written; --salvage (in Python: "
            "salvage=True) takes what can be read",
        )
        self.store = store
        #: Each place and its fault.
        self.damage = tuple(damage)


class UnknownType(Malformed):
    """A payload holds a type that has no built-in codec and no schema."""

    def __init__(self, type_name: str) -> None:
        super().__init__(
            "psi payload",
            "type",
            "one with a schema",
            type_name,
            hint="take the payload as raw bytes, or give the type's schema",
        )
        self.type_name = type_name
