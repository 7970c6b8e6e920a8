"""Which messages of an outbox have the same key, and which is the oldest of them that waits?"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Keyed", "Latest"]

#: So many keys of which nothing is queued any more are worth tidying up.
_TOO_MANY: Final = 1024


class Latest(NamedTuple):
    """A message that has a key."""

    arrival: int
    #: Its class, and its number in it.
    priority: int
    seq: int
    #: Bytes of the message.
    size: int


class Keyed:
    """The messages of every key, as far as they are known and may be queued."""

    def __init__(self) -> None:
        self._of_key: dict[int, list[Latest]] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def add(self, key: int, message: Latest) -> None:
        """Note a message, which may be known already."""
        known = self._of_key.setdefault(key, [])
        if message not in known[-1:]:
            insort(known, message)

    def oldest_above(
        self,
        key: int,
        most: int,
        is_queued: Callable[[Latest], bool],
        is_waiting: Callable[[Latest], bool],
    ) -> Latest | None:
        """Return the oldest that waits, if one more would be too many; None: it would not."""
        known = self._of_key.get(key)
        if known is None or len(known) < most:
            return None
        known[:] = [message for message in dict.fromkeys(known) if is_queued(message)]
        waiting = [message for message in known if is_waiting(message)]
        return waiting[0] if len(waiting) >= most else None

    def tidy(self, queued: int, is_queued: Callable[[Latest], bool]) -> None:
        """Forget keys of which nothing is queued any more, if they are many."""
        if len(self._of_key) > 2 * queued + _TOO_MANY:
            self._of_key = {
                key: known for key, known in self._of_key.items() if any(map(is_queued, known))
            }
