"""Which messages of a class are in memory, and which of them are next?"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from penstock.dispatch.outbox.backlog import Backlog
    from penstock.dispatch.outbox.log import Item

__all__ = ["Lane", "Supply", "Window", "in_order_of_arrival", "in_order_of_priority"]

#: Messages that are read from the log at a time.
_AT_ONCE: Final = 512
#: Number of settled entries in `_waiting` from which they are removed.
_TOO_MANY: Final = 256


class Supply(Protocol):
    """The source of a window's messages."""

    @property
    def head(self) -> int:
        """The number after the newest message."""

    def read(self, which: str, at: int, count: int) -> tuple[list[Item], int]:
        """Return unsettled messages from `at` on, at most `count`, and where to continue."""

    def affordable(self, at: int, size: int) -> int:
        """Return how many messages from `at` on have about `size` bytes; at least 1."""


class Window:
    """The unsettled messages below `loaded_to`, and some above it (`ahead`).

    Messages ahead are loaded when all sources below `loaded_to` are blocked; they are of other
    sources. A source that was skipped while looking ahead stays skipped until `loaded_to` has
    caught up, so that each source keeps its order.
    """

    def __init__(self, supply: Supply, start: int, most: int, most_bytes: int) -> None:
        self._supply = supply
        self._most = most
        self._most_bytes = most_bytes
        #: All messages in memory by number, and the numbers of those in flight.
        self.loaded: dict[int, Item] = {}
        self.taken: set[int] = set()
        self.bytes = 0
        self.loaded_to = start
        #: Waiting messages in order, among them `_gone` that are settled already.
        self._waiting: deque[Item] = deque()
        self._gone = 0
        #: All waiting messages are of these sources; None: unknown.
        self._only_of: frozenset[int] | None = None
        self._ahead: dict[int, Item] = {}
        self._ahead_to = start
        self._passed_over: set[int] = set()

    # --- coming in ------------------------------------------------------------------------------

    def wants(self, count: int) -> bool:
        """Tell whether `count` newly appended messages should be kept in memory."""
        return (
            self.loaded_to >= self._supply.head
            and len(self._waiting) - self._gone + count <= self._most
            and self.bytes < self._most_bytes
        )

    def offer(self, items: Sequence[Item], size: int) -> None:
        """Add newly appended messages."""
        self.loaded.update(zip((item.seq for item in items), items, strict=True))
        self._waiting.extend(items)
        self._only_of = None
        self.bytes += size
        self.go_to(items[-1].seq + 1)

    def _room(self, on_their_way: int = 0) -> int:
        """Return how many more may be loaded if `on_their_way` of the waiting ones are taken."""
        room = self._most - (len(self._waiting) - self._gone - on_their_way)
        size = max(1, self._most_bytes - self.bytes)
        return min(room, _AT_ONCE, self._supply.affordable(self.loaded_to, size))

    def _load(self, count: int) -> None:
        items, end = self._supply.read("next", self.loaded_to, count)
        loaded = self.loaded
        self._only_of = None
        for item in items:
            seq = item.seq
            if seq not in loaded:
                loaded[seq] = item
                self._waiting.append(item)
                self.bytes += len(item.raw)
            elif seq in self._ahead:
                self._waiting.append(self._ahead.pop(seq))
        self.go_to(end)

    def go_to(self, seq: int) -> None:
        """Note that all messages below `seq` are in memory or settled."""
        self.loaded_to = max(self.loaded_to, seq)
        if self._ahead_to <= self.loaded_to:
            self._passed_over.clear()

    def _look_ahead(self, blocked: Collection[int]) -> list[Item] | None:
        """Load messages ahead, of sources not blocked; return None at the head."""
        start = max(self._ahead_to, self.loaded_to)
        if start >= self._supply.head:
            return None
        count = min(_AT_ONCE, self._supply.affordable(start, self._most_bytes))
        items, self._ahead_to = self._supply.read("any", start, count)
        found = []
        for item in items:
            if item.source in blocked:
                self._passed_over.add(item.source)
            elif item.source not in self._passed_over and item.seq not in self.loaded:
                self.loaded[item.seq] = item
                self.bytes += len(item.raw)
                found.append(item)
        self._add_ahead(found)
        return found

    def _add_ahead(self, items: list[Item]) -> None:
        if items and self._ahead and items[0].seq < next(reversed(self._ahead)):
            items = sorted([*self._ahead.values(), *items], key=_number)
            self._ahead = {}
        self._ahead.update((item.seq, item) for item in items)

    def _begin_ahead(self, blocked: Collection[int]) -> None:
        """Adapt the messages ahead to a changed set of blocked sources."""
        if self._passed_over <= set(blocked):
            self._forget([item for item in self._ahead.values() if item.source in blocked])
            return
        self._forget(list(self._ahead.values()))
        self._ahead_to = self.loaded_to
        self._passed_over.clear()

    def _forget(self, items: list[Item]) -> None:
        """Remove messages ahead from memory; they are read again later."""
        for item in items:
            self._ahead.pop(item.seq, None)
            del self.loaded[item.seq]
            self.bytes -= len(item.raw)
            self._passed_over.add(item.source)

    # --- going out ------------------------------------------------------------------------------

    def available(self, blocked: Collection[int], wanted: int) -> Iterator[Item]:
        """Yield the messages that can be taken, in order. All but the last must be taken.

        Call nothing else of this window until the iteration ends.
        """
        self._fill(wanted)
        if not blocked and not self._gone:
            yield from self._waiting
            taken = len(self._waiting)
        elif self._only_of is not None and self._only_of <= set(blocked):
            taken = 0
        else:
            taken = 0
            for item in self._free(self._waiting, blocked):
                yield item
                taken += 1
            if not taken:
                self._only_of = frozenset(blocked)
        while self.loaded_to < self._supply.head:
            room = self._room(taken)
            if room <= 0:
                break
            known = len(self._waiting)
            self._load(room)
            for item in self._free(list(islice(self._waiting, known, None)), blocked):
                yield item
                taken += 1
        if self.loaded_to < self._supply.head:
            yield from self._available_ahead(blocked)

    def _available_ahead(self, blocked: Collection[int]) -> Iterator[Item]:
        self._begin_ahead(blocked)
        yield from list(self._ahead.values())
        while (found := self._look_ahead(blocked)) is not None:
            yield from found

    def _free(self, items: Iterable[Item], blocked: Collection[int]) -> Iterator[Item]:
        loaded = self.loaded
        return (item for item in items if item.seq in loaded and item.source not in blocked)

    def _fill(self, wanted: int) -> None:
        """Load messages until `wanted` wait, as far as there is room."""
        waiting = self._waiting
        while self._gone and waiting and waiting[0].seq not in self.loaded:
            waiting.popleft()
            self._gone -= 1
        while len(waiting) - self._gone < wanted and self.loaded_to < self._supply.head:
            room = self._room()
            if room <= 0 or (self.bytes >= self._most_bytes and len(waiting) > self._gone):
                return
            self._load(room)

    def take(self, items: Sequence[Item], *, in_order: bool) -> None:
        """Mark messages as in flight; `in_order`: they are the first of those waiting."""
        seqs = [item.seq for item in items]
        waiting = self._waiting
        self.taken.update(seqs)
        if not in_order:
            in_order = [item.seq for item in islice(waiting, len(seqs))] == seqs
        if in_order and not self._gone:
            if len(seqs) == len(waiting):
                waiting.clear()
            else:
                for _ in seqs:
                    waiting.popleft()
        else:
            if seqs and seqs[0] < self.loaded_to:
                self._tidy()
            for seq in seqs:
                self._ahead.pop(seq, None)

    def give_back(self, items: Iterable[Item]) -> None:
        """Requeue messages in flight at their old positions."""
        back = sorted((item for item in items if item.seq in self.taken), key=_number)
        self.taken.difference_update([item.seq for item in back])
        ahead = [item for item in back if item.seq >= self.loaded_to]
        del back[len(back) - len(ahead) :]
        self._only_of = None
        waiting = self._waiting
        if waiting and back and back[-1].seq > waiting[0].seq:
            waiting = self._waiting = deque(sorted([*waiting, *back], key=_number))
        else:
            waiting.extendleft(reversed(back))
        # A message of a skipped source must not overtake others of that source.
        is_next = [n.seq < self._ahead_to and n.source not in self._passed_over for n in ahead]
        self._forget([item for item, yes in zip(ahead, is_next, strict=True) if not yes])
        self._add_ahead([item for item, yes in zip(ahead, is_next, strict=True) if yes])

    def drop(self, seqs: Sequence[int], size: int) -> None:
        """Remove settled messages from memory."""
        loaded, taken = self.loaded, self.taken
        if taken.issuperset(seqs):
            taken.difference_update(seqs)
            for seq in seqs:
                del loaded[seq]
        else:
            for seq in seqs:
                del loaded[seq]
                if seq in taken:
                    taken.discard(seq)
                elif self._ahead.pop(seq, None) is None:
                    self._gone += 1
        self.bytes -= size
        if self._gone > _TOO_MANY and self._gone > len(self._waiting) // 2:
            self._tidy()

    def _tidy(self) -> None:
        loaded, taken = self.loaded, self.taken
        self._waiting = deque(
            item for item in self._waiting if item.seq in loaded and item.seq not in taken
        )
        self._gone = 0


def _number(item: Item) -> int:
    return item.seq


class Lane:
    """The messages of one priority class, and the window of those in memory."""

    def __init__(self, backlog: Backlog, priority: int, start: int, end: int) -> None:
        self.priority = priority
        self._backlog = backlog
        #: Bytes of the unsettled messages.
        self.bytes = 0
        #: The number after the newest message of the class, or a larger one.
        self.head = end
        options = backlog.options
        self.window = Window(self, start, options.window, options.window_bytes)

    @property
    def queued(self) -> int:
        """Number of unsettled messages."""
        return self._backlog.marks.queued[self.priority]

    @property
    def waiting(self) -> int:
        """Number of unsettled messages not in flight."""
        return self._backlog.marks.queued[self.priority] - len(self.window.taken)

    @property
    def waiting_bytes(self) -> int:
        loaded = self.window.loaded
        return self.bytes - sum(len(loaded[seq].raw) for seq in self.window.taken)

    def affordable(self, at: int, size: int) -> int:
        """Return how many messages from `at` on have about `size` bytes."""
        return self._backlog.affordable(at, size, self.priority)

    def read(self, which: str, at: int, count: int) -> tuple[list[Item], int]:
        """Return unsettled messages from `at` on, at most `count`, and where to continue."""
        return self._backlog.read_class(which, self.priority, at, count)

    def enter(
        self, seqs: Sequence[int], size: int, items: Callable[[Sequence[int]], list[Item]]
    ) -> None:
        """Add appended messages; `items` returns those of some numbers."""
        self.bytes += size
        if self.window.wants(len(seqs)):
            self.window.offer(items(seqs), size)
        self.head = seqs[-1] + 1


# --- which messages are next, of all classes ---------------------------------------------------


class _Picking:
    """A batch being picked, up to its limits of messages and bytes."""

    def __init__(self, limit: int, max_bytes: int | None, blocked: Collection[int]) -> None:
        self._left = limit
        self._bytes_left = max_bytes
        self.blocked = blocked
        self.items: list[Item] = []
        self._by_lane: dict[int, list[Item]] = {}
        self.is_over = False

    @property
    def wanted(self) -> int:
        return self._left

    def pick(self, lane: Lane, item: Item) -> bool:
        """Add a message to the batch; return False if it exceeds the byte limit."""
        if self._bytes_left is not None:
            if self.items and len(item.raw) > self._bytes_left:
                self.is_over = True
                return False
            self._bytes_left -= len(item.raw)
        self.items.append(item)
        self._by_lane.setdefault(lane.priority, []).append(item)
        self._left -= 1
        self.is_over = not self._left
        return True

    def take(self, lanes: Sequence[Lane]) -> list[Item]:
        for lane in lanes:
            own = self._by_lane.get(lane.priority)
            if own:
                lane.window.take(own, in_order=not self.blocked)
        return self.items


def in_order_of_arrival(
    lanes: Sequence[Lane], limit: int, max_bytes: int | None, blocked: Collection[int]
) -> list[Item]:
    """Take messages in order of arrival, across classes."""
    if len(lanes) == 1 and not blocked:
        return _from_one(lanes[0], limit, max_bytes)
    picking = _Picking(limit, max_bytes, blocked)
    heads: list[tuple[Item, Lane, Iterator[Item]]] = []
    for lane in lanes:
        waiting = lane.window.available(blocked, limit)
        item = next(waiting, None)
        if item is not None:
            heads.append((item, lane, waiting))
    while heads:
        heads.sort(key=lambda head: head[0].seq, reverse=True)
        item, lane, waiting = heads.pop()
        others = heads[-1][0].seq if heads else None
        following: Item | None = item
        while following is not None and (others is None or following.seq <= others):
            if not picking.pick(lane, following) or picking.is_over:
                return picking.take(lanes)
            following = next(waiting, None)
        if following is not None:
            heads.append((following, lane, waiting))
    return picking.take(lanes)


def _from_one(lane: Lane, limit: int, max_bytes: int | None) -> list[Item]:
    """Take in order of arrival from a single lane: the fast path."""
    items = list(islice(lane.window.available((), limit), limit))
    sizes = [len(item.raw) for item in items]
    if max_bytes is not None and sum(sizes) > max_bytes:
        del items[max(1, bisect_right(list(accumulate(sizes)), max_bytes)) :]
    lane.window.take(items, in_order=True)
    return items


def in_order_of_priority(
    lanes: Sequence[Lane],
    limit: int,
    max_bytes: int | None,
    blocked: Collection[int],
    passed: int,
    starvation: int,
) -> tuple[list[Item], int]:
    """Take the highest class first, but one of the lowest after every `starvation` others.

    `passed` is the number of messages taken since one of the lowest class; its new value is
    returned with the messages.
    """
    picking = _Picking(limit, max_bytes, blocked)
    heads: list[tuple[Item, Lane, Iterator[Item]]] = []
    for lane in lanes:  # the lowest class first
        waiting = lane.window.available(blocked, limit)
        item = next(waiting, None)
        if item is not None:
            heads.append((item, lane, waiting))
    while heads and not picking.is_over:
        turn = 0 if passed >= starvation else -1
        item, lane, waiting = heads[turn]
        if not picking.pick(lane, item):
            break
        passed = 0 if turn == 0 or len(heads) == 1 else passed + 1
        following = next(waiting, None)
        if following is None:
            del heads[turn]
        else:
            heads[turn] = following, lane, waiting
    return picking.take(lanes), passed
