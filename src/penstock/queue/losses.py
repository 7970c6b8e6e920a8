"""How does a reader keep book of what it lost, and say so without flooding the log?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.core.statistics import LossLedger

if TYPE_CHECKING:
    import logging

    from penstock.core.statistics import Loss

__all__ = ["LoggedLosses"]

#: A reader that is overrun again and again says so this often (seconds).
_BETWEEN_WARNINGS: Final = 1.0


class LoggedLosses(LossLedger):
    """Losses that are counted, each, and logged, once in a while."""

    def __init__(self, url: str, log: logging.Logger) -> None:
        super().__init__()
        self._url = url
        self._log = log
        self._silent_until = 0.0

    def add(self, loss: Loss) -> None:
        super().add(loss)
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _BETWEEN_WARNINGS
            self._log.warning("%s: %s; %s in all", self._url, loss, f"{self.total:,}")
