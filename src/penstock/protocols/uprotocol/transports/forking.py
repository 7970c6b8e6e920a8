"""Whose is a link in a process that was forked?"""

from __future__ import annotations

import os
from typing import Final

from penstock.protocols.uprotocol.codes import UCode, UStatus

__all__ = ["Owner"]

_FORKED: Final = UStatus(
    UCode.FAILED_PRECONDITION,
    "it belongs to the process that this one was forked from: open another one here",
)


class Owner:
    """The process that opened a link.

    Its threads are not in a child, which shares its socket: what a child sent by it would be
    mistaken for what the parent sends, or never be sent at all.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    @property
    def why_not(self) -> UStatus | None:
        """What to tell whoever uses it in a child; None in the process that opened it."""
        return None if self.is_here else _FORKED
