"""How do several threads count together without losing one?"""

from __future__ import annotations

import threading

__all__ = ["Counts"]


class Counts:
    """Counters by name, all of them there from the beginning."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count one more, or several.

        :raises KeyError: there is no such counter.
        """
        with self._lock:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return all of them as they are at one moment."""
        with self._lock:
            return dict(self._counts)
