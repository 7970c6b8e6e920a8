"""Which messages of an outbox are next, over its lanes?"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.dispatch.outbox.lane import Lane
    from penstock.dispatch.outbox.records import Item

__all__ = ["in_order_of_arrival", "in_order_of_priority"]


class _Picking:
    """Messages that are picked, until there are enough."""

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
        """Pick a message, if there is room for it."""
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
    """Take the messages that arrived first."""
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
        heads.sort(key=_arrival, reverse=True)
        item, lane, waiting = heads.pop()
        others = heads[-1][0].arrival if heads else None
        following: Item | None = item
        while following is not None and (others is None or following.arrival <= others):
            if not picking.pick(lane, following) or picking.is_over:
                return picking.take(lanes)
            following = next(waiting, None)
        if following is not None:
            heads.append((following, lane, waiting))
    return picking.take(lanes)


def _from_one(lane: Lane, limit: int, max_bytes: int | None) -> list[Item]:
    """Take from the one lane that has messages: the same, only faster."""
    items = list(islice(lane.window.available((), limit), limit))
    sizes = [len(item[7]) for item in items]
    if max_bytes is not None and sum(sizes) > max_bytes:
        del items[max(1, bisect_right(list(accumulate(sizes)), max_bytes)) :]
    lane.window.take(items, in_order=True)
    return items


def _arrival(head: tuple[Item, Lane, Iterator[Item]]) -> int:
    return head[0].arrival


def in_order_of_priority(
    lanes: Sequence[Lane],
    limit: int,
    max_bytes: int | None,
    blocked: Collection[int],
    passed: int,
    starvation: int,
) -> tuple[list[Item], int]:
    """Take the highest class first, and one of the lowest after `starvation` of higher ones.

    `passed` says how many of higher ones there were since, and is returned with the messages.
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
