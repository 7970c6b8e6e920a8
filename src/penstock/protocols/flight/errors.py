"""Which errors has only a stream on another machine?"""

from __future__ import annotations

from penstock.core.errors import PenstockError

__all__ = ["AccessRefused", "ConnectionLost", "HoldLost", "ServerBusy", "Unacknowledged"]


class ConnectionLost(PenstockError, ConnectionError):
    """The server cannot be reached, or the connection to it broke."""

    def __init__(self, server: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{server} cannot be reached: {reason}", hint=hint)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Unacknowledged(ConnectionLost):
    """The connection broke during a write, and nobody knows what became of its last messages."""

    def __init__(
        self, server: str, reason: str, *, acknowledged: int, in_doubt: int, hint: str | None = None
    ) -> None:
        super().__init__(
            server,
            f"{reason}; of this call {acknowledged:,} messages are appended, and of {in_doubt:,} "
            "it is not known",
            hint=hint or "look at the end of the stream before you write them again",
        )
        #: Messages of the call that were surely appended: its first ones.
        self.acknowledged = acknowledged
        #: Messages after those that may have been appended, none, some or all of them.
        self.in_doubt = in_doubt


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
