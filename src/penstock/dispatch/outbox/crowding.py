"""Who makes room for a message when there is none?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.dispatch.outbox.lane import Lane
    from penstock.dispatch.outbox.lanes import Lanes
    from penstock.dispatch.outbox.latest import Latest
    from penstock.dispatch.outbox.records import Entry, Item

__all__ = ["Limits", "make_room"]


class Limits(NamedTuple):
    """What an outbox holds at most."""

    messages: int
    bytes: int


def make_room(
    lanes: Lanes, entry: Entry, limits: Limits, superseded: tuple[Lane, Latest] | None
) -> list[Item] | None:
    """Let the messages leave that have to, for a new one, and return them.

    They are of lower classes, the lowest first and the oldest first; none is in flight, and none is
    the one that is `superseded`, which makes room by itself. None when all of them are not enough:
    then none leaves.
    """
    messages, size = lanes.held()
    messages += 1 - limits.messages
    size += len(entry.raw) - limits.bytes
    lower = [lane for lane in lanes if lane.priority < entry.priority]
    leaves = leaves_size = 0
    if superseded is not None:
        lane, last = superseded
        messages -= 1
        size -= last.size
        if lane in lower:
            leaves, leaves_size = 1, last.size
    if messages <= 0 and size <= 0:
        return []
    if messages > sum(lane.waiting for lane in lower) - leaves:
        return None
    if size > 0 and size > sum(lane.waiting_bytes for lane in lower) - leaves_size:
        return None
    evicted: list[Item] = []
    for lane in lower:
        victims: list[Item] = []
        for item in lane.window.available((), 1):
            if messages <= 0 and size <= 0:
                break
            if superseded and superseded[1][1:3] == item[:2]:
                continue
            victims.append(item)
            messages -= 1
            size -= len(item.raw)
        lane.leave(victims)
        evicted += victims
    return evicted
