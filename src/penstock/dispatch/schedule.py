"""Which of many is due first?"""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

__all__ = ["Schedule"]

_Key = TypeVar("_Key")

#: Entries that hold no longer, beside as many as there are others.
_SPARE: Final = 64


class Schedule(Generic[_Key]):
    """One time for each of many keys. Whoever shares it between threads has a lock."""

    def __init__(self) -> None:
        self._times: dict[_Key, float] = {}
        #: The same in a heap, with some that hold no longer; the number tells equal ones apart.
        self._heap: list[tuple[float, int, _Key]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: _Key) -> bool:
        return key in self._times

    def get(self, key: _Key) -> float | None:
        return self._times.get(key)

    def set(self, key: _Key, time: float) -> bool:
        """Set the time of a key; tell whether it is the first of all."""
        self._times[key] = time
        heapq.heappush(self._heap, (time, next(self._count), key))
        if len(self._heap) > 2 * len(self._times) + _SPARE:
            self._heap = [(at, next(self._count), key) for key, at in self._times.items()]
            heapq.heapify(self._heap)
        return self._heap[0][0] >= time

    def discard(self, key: _Key) -> None:
        self._times.pop(key, None)

    def clear(self) -> None:
        self._times.clear()
        self._heap.clear()

    @property
    def first(self) -> float | None:
        """The first time of all; None: there is none."""
        while self._heap:
            time, _, key = self._heap[0]
            if self._times.get(key) == time:
                return time
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> list[_Key]:
        """Remove and return the keys that are due."""
        found: list[_Key] = []
        while (time := self.first) is not None and time <= now:
            found.append(self.take_first())
        return found

    def take_first(self) -> _Key:
        """Remove and return the key that is due first.

        :raises IndexError: there is none.
        """
        if self.first is None:
            raise IndexError("nothing is due")
        key = heapq.heappop(self._heap)[2]
        del self._times[key]
        return key
