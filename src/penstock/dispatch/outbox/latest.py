"""Which message of an outbox is the last of its key?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Latest", "LatestOnly"]

#: So many that are not queued any more are worth tidying up.
_TOO_MANY: Final = 1024


class Latest(NamedTuple):
    """The last message of a key."""

    arrival: int
    #: Its class, and its number in it.
    priority: int
    seq: int
    #: Bytes of the message.
    size: int


class LatestOnly:
    """The last message of every key, as far as they are known and may be queued."""

    def __init__(self) -> None:
        self._last: dict[int, Latest] = {}

    def __len__(self) -> int:
        return len(self._last)

    def add(self, key: int, message: Latest) -> None:
        """Note a message, unless a later one of its key is known."""
        if self._last.get(key, message) <= message:
            self._last[key] = message

    def find(self, key: int) -> Latest | None:
        return self._last.get(key)

    def tidy(self, queued: int, is_queued: Callable[[Latest], bool]) -> None:
        """Forget those that are not queued any more, if they are many."""
        if len(self._last) > 2 * queued + _TOO_MANY:
            self._last = {key: last for key, last in self._last.items() if is_queued(last)}
