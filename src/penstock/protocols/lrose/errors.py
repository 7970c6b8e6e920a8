"""Which errors have only LROSE's servers, and ours that speak like them?"""

from __future__ import annotations

from penstock.core.errors import PenstockError

__all__ = ["RequestRefused"]


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
