"""Which errors has only a stream on another machine?"""

from __future__ import annotations

from penstock.core.errors import PenstockError

__all__ = ["AccessRefused", "HoldLost", "ServerBusy"]


class AccessRefused(PenstockError, PermissionError):
    """The server wants a token, or another one, or does not allow this."""

    def __str__(self) -> str:
        return str(self.args[0])


class ServerBusy(PenstockError):
    """The server has as many clients as it takes."""

    def __init__(self, limit: int, *, hint: str | None = None) -> None:
        super().__init__(f"the server has {limit:,} clients, and takes no more", hint=hint)
        self.limit = limit


class HoldLost(PenstockError):
    """The server does not hold this name for this reader any more."""

    def __init__(self, name: str, *, hint: str | None = None) -> None:
        super().__init__(f"the name {name!r} is not held for this reader any more", hint=hint)
        self.name = name


class UnknownWriter(PenstockError):
    """The server does not know this writer: it was started anew, or the writer was idle long."""
