"""What has a worker done so far, even if it was killed just now?

The counters are in a small file that the worker and its supervisor both map. A restarted worker
continues the counts of its predecessor.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.interfaces import Closable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WorkerCounters", "WorkerStatistics"]

_NAMES: Final = ("taken", "done", "failed", "lost_leases")
_SIZE: Final = 8


class WorkerStatistics(NamedTuple):
    """Counters of the workers of a vertex.

    taken = done + failed + lost_leases + what they hold now, or held when they were killed.
    """

    #: Messages that they were given.
    taken: int
    #: Messages whose results are stored, and which are acknowledged.
    done: int
    #: Messages that they gave back: the function failed, or the results could not be stored.
    failed: int
    #: Messages that were done when their lease had run out: another worker does them again.
    lost_leases: int
    #: Results that are stored, by edge; one that was killed at that moment did not count its last.
    given: dict[str, int]

    @property
    def held(self) -> int:
        """Messages that they hold now, or held when they were killed."""
        return self.taken - self.done - self.failed - self.lost_leases


class WorkerCounters(Closable):
    """The counters of one worker over all its restarts."""

    def __init__(self, path: str, edges: Sequence[str]) -> None:
        """Open or create the file."""
        self.path = path
        self._edges = {edge: len(_NAMES) + i for i, edge in enumerate(edges)}
        size = _SIZE * (len(_NAMES) + len(edges))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._numbers = memoryview(self._map).cast("Q")

    def add(self, name: str, count: int) -> None:
        """Count what became of messages: the name of a field of `WorkerStatistics`."""
        self._numbers[_NAMES.index(name)] += count

    def give(self, edge: str, count: int) -> None:
        """Count results that are stored."""
        self._numbers[self._edges[edge]] += count

    def statistics(self) -> WorkerStatistics:
        numbers = self._numbers.tolist()
        taken, done, failed, lost_leases = numbers[: len(_NAMES)]
        given = {edge: numbers[at] for edge, at in self._edges.items()}
        return WorkerStatistics(taken, done, failed, lost_leases, given)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._numbers.release()
        self._map.close()
