"""How is a pool of threads ended, also by one of its own?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Workers"]


class Workers(ThreadPoolExecutor):
    """Threads that may be told to end by what runs in them, which does not wait for itself."""

    def __init__(self, most: int, name: str) -> None:
        self._here = threading.local()
        super().__init__(most, name, initializer=self._note)

    def _note(self) -> None:
        self._here.is_own = True

    def end(self, *, cancel: bool = False) -> None:
        """Take no more, and wait until all is done; `cancel`: what has not begun is not."""
        is_own = getattr(self._here, "is_own", False)
        self.shutdown(wait=not is_own, cancel_futures=cancel)
