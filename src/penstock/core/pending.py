"""How are items held for a reader, so that an interrupted call takes none of them?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """Items in the order of their arrival. One thread takes them; others may add some meanwhile.

    To take items is to look at the `first` ones, to do with them what may be interrupted, and to
    `drop` them last, before statements that call nothing: no signal handler runs between these.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        #: How many of the first items are dropped. They are removed many at once, as that moves
        #: all the others.
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._items) - self._dropped

    def extend(self, items: Iterable[T]) -> None:
        self._items.extend(items)

    def first(self, limit: int) -> list[T]:
        """Return up to `limit` items; they stay."""
        return self._items[self._dropped : self._dropped + limit]

    def drop(self, count: int) -> None:
        """Remove the first `count` items."""
        size = len(self._items)
        dropped = self._dropped + count
        # No call from here on.
        if dropped * 2 < size:
            self._dropped = dropped
        else:
            del self._items[:dropped]
            self._dropped = 0

    def put_back(self, items: list[T]) -> None:
        """Return items to the front."""
        self._items[: self._dropped] = items
        self._dropped = 0
