"""Which errors has only a stream on another machine?"""

from __future__ import annotations

from penstock.core.errors import PenstockError, ServerBusy

__all__ = ["AccessRefused", "HoldLost", "ServerBusy", "UnknownWriter"]


class AccessRefused(PenstockError, PermissionError):
    """The server wants a token, or another one, or does not allow this."""

    def __str__(self) -> str:
        return str(self.args[0])


class HoldLost(PenstockError):
    """The server does not hold this name for this reader any more."""

    def __init__(self, name: str, *, hint: str | None = None) -> None:
        super().__init__(f"the name {name!r} is not held for this reader any more", hint=hint)
        self.name = name


class UnknownWriter(PenstockError):
    """The server does not know this writer: it was started anew, or the writer was idle long."""
