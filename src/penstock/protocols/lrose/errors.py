"""Which errors have only LROSE's servers, and ours that speak like them?"""

from __future__ import annotations

from penstock.core.errors import PenstockError

__all__ = ["ConnectionLost", "RequestRefused", "Unacknowledged"]


class ConnectionLost(PenstockError, ConnectionError):
    """The server cannot be reached, or the connection to it broke."""

    def __init__(self, server: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{server} cannot be reached: {reason}", hint=hint)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class RequestRefused(PenstockError):
    """The server answered that it could not do that."""

    def __init__(
        self, server: str, code: int, text: str | None, *, hint: str | None = None
    ) -> None:
        said = " ".join(text.split()) if text else f"error {code & 0xFFFFFFFF:#x}"
        super().__init__(f"{server} refused: {said}", hint=hint)
        self.server = server
        #: `DsMessage.error`: -1, or one of `ErrorCode`.
        self.code = code
        #: What the server said, if anything.
        self.text = text


class Unacknowledged(ConnectionLost):
    """No answer came to a write, and nobody knows what became of its messages."""

    def __init__(
        self, server: str, reason: str, *, acknowledged: int, in_doubt: int, hint: str | None = None
    ) -> None:
        super().__init__(
            server,
            f"{reason}; of this call {acknowledged:,} messages are appended, and of {in_doubt:,} "
            "it is not known",
            hint=hint
            or "look at the end of the queue before you write them again, or open the writer with "
            "doubt=again, which may append them twice",
        )
        #: Messages of the call that were surely appended: its first ones.
        self.acknowledged = acknowledged
        #: Messages after those that may have been appended, none, some or all of them.
        self.in_doubt = in_doubt
