"""Was this message here before, and did it come by another leg? (spec uprotocol 10.4, E1, E2)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LEGS", "Window"]

#: A leg's number is below this one.
LEGS: Final = 1024


class Window:
    """The keys of the latest messages: at least `size` of them, about twice as many at most.

    Whoever takes `lock` for a batch looks into `new` and `old` himself: a call for each message
    would cost more than the looking.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.size = size
        #: By id and source: a hash of the contents, with the number of the leg in its lowest bits.
        self.new: dict[bytes, int] = {}
        self.old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    def make_room(self, count: int) -> None:
        """Let the oldest go, if so many more are too many."""
        if len(self.new) + count > self.size and self.new:
            self.old, self.new = self.new, {}

    def is_new(self, key: bytes) -> bool:
        """Remember a key; tell whether it was not there yet."""
        with self.lock:
            if key in self.new or key in self.old:
                return False
            self.make_room(1)
            self.new[key] = 1
            return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let these be new again: what was remembered of them did not come about."""
        for key in keys:
            if self.new.pop(key, None) is None:
                self.old.pop(key, None)
