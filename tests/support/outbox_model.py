"""An outbox as it should behave, without files, windows or blocks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.dispatch.outbox import Entry, Reason

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Known", "OutboxModel"]


@dataclass(slots=True)
class Known:
    """A message that was stored."""

    entry: Entry
    arrival: int
    #: Its number in the log.
    seq: int
    key: int | None = None
    in_flight: bool = False
    #: In flight to be settled: it has no room any more.
    leaving: bool = False
    settled: Reason | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.entry.priority, self.seq

    @property
    def waits(self) -> bool:
        return self.settled is None and not self.in_flight


@dataclass(slots=True)
class OutboxModel:
    """The messages that are queued, in a list, and how many there ever were."""

    max_messages: int
    max_bytes: int
    starvation: int
    all: list[Known] = field(default_factory=list)
    passed: int = 0
    last_arrival: int = 0
    stored: int = 0
    settled: Counter[Reason] = field(default_factory=Counter)

    def queued(self) -> list[Known]:
        return self.all

    def by_place(self) -> dict[tuple[int, int], Known]:
        return {known.place: known for known in self.all}

    def restart(self) -> None:
        """Let nothing be in flight."""
        for known in self.all:
            known.in_flight = known.leaving = False
        self.passed = 0

    def settle(self, several: Collection[Known], reason: Reason) -> None:
        for known in several:
            known.settled = reason
        self.settled[reason] += len(several)
        if several:
            self.all = [known for known in self.all if known.settled is None]

    def append(
        self,
        entry: Entry,
        count: int,
        key: int | None = None,
        most: int = 1,
        *,
        settle: bool = True,
    ) -> tuple[int, list[Known], list[Known]]:
        """Append a message so many times; return how many were stored, what was evicted and
        what was superseded."""
        stored = 0
        all_evicted: list[Known] = []
        superseded: list[Known] = []
        held = [len(known.entry.raw) for known in self.all if not known.leaving]
        messages, size = len(held), sum(held)
        lower = [k for k in self.all if k.waits and k.entry.priority < entry.priority]
        same = [] if key is None else [k for k in self.all if k.waits and k.key == key]
        if len(same) >= most:
            same.sort(key=lambda known: known.arrival)
            superseded = same[: len(same) - most + 1]
            messages -= len(superseded)
            size -= sum(len(old.entry.raw) for old in superseded)
            places = {old.place for old in superseded}
            lower = [known for known in lower if known.place not in places]
        lower.sort(key=lambda known: known.place, reverse=True)
        for _ in range(count):
            evicted: list[Known] = []
            left = list(lower) if messages >= self.max_messages or self._is_full(size) else lower
            over, over_size = messages + 1, size + len(entry.raw)
            while left and (over > self.max_messages or over_size > self.max_bytes):
                evicted.append(left.pop())
                over -= 1
                over_size -= len(evicted[-1].entry.raw)
            if over > self.max_messages or over_size > self.max_bytes:
                if not evicted:
                    break
                continue
            lower, messages, size = left, over, over_size
            all_evicted += evicted
            stored += 1
            self.last_arrival += 1
            known = Known(entry, self.last_arrival, self.stored, key)
            self.stored += 1
            self.all.append(known)
        self._remove(all_evicted, Reason.QUEUE_FULL, settle=settle)
        if stored:
            self.settle(superseded, Reason.SUPERSEDED)
        return stored, all_evicted, superseded if stored else []

    def _is_full(self, size: int) -> bool:
        return size + 1000 > self.max_bytes

    def take(
        self, limit: int, max_bytes: int | None, order: str, blocked: Collection[int]
    ) -> list[Known]:
        waiting = [k for k in self.all if k.waits and k.entry.source not in blocked]
        classes = sorted({known.entry.priority for known in waiting})
        lanes = {each: deque(k for k in waiting if k.entry.priority == each) for each in classes}
        taken: list[Known] = []
        size = 0
        while lanes and len(taken) < limit:
            if order == "arrival":
                chosen = min(lanes, key=lambda each: lanes[each][0].arrival)
            else:
                chosen = min(lanes) if self.passed >= self.starvation else max(lanes)
            known = lanes[chosen][0]
            size += len(known.entry.raw)
            if taken and max_bytes is not None and size > max_bytes:
                break
            if order == "priority":
                self.passed = 0 if chosen == min(lanes) else self.passed + 1
            lanes[chosen].popleft()
            if not lanes[chosen]:
                del lanes[chosen]
            known.in_flight = True
            taken.append(known)
        return taken

    def _remove(self, several: Collection[Known], reason: Reason, *, settle: bool) -> None:
        if settle:
            self.settle(several, reason)
        else:
            for known in several:
                known.in_flight = known.leaving = True

    def expire(self, now_ms: int, *, settle: bool = True) -> list[Known]:
        due = [k for k in self.all if k.waits and 0 < k.entry.expires_at_ms <= now_ms]
        self._remove(due, Reason.EXPIRED, settle=settle)
        return due
