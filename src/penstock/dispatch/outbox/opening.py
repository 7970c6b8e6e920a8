"""Where does a lane go on, whatever became of its log?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.dispatch.outbox.settled import Reason, Settled

if TYPE_CHECKING:
    from penstock.dispatch.outbox.lane_log import LaneLog
    from penstock.dispatch.outbox.state_file import LaneState

__all__ = ["where_to_go_on"]


def where_to_go_on(state: LaneState, log: LaneLog) -> tuple[Settled, str | None]:
    """Return what is settled, and what was found to be wrong.

    In doubt a message is not settled: it comes again.
    """
    settled = Settled(state.floor, state.below)
    known = log.successor(state.epoch, state.floor) if state.epoch else state.floor
    if known is None:
        settled.floor = log.oldest
        return settled, "it was created anew; what the one before held is gone"
    end = min(known, log.head)
    if settled.floor > end:
        # The machine went down. The numbers are given once more, and must not count as settled.
        lost = settled.floor - end
        settled.floor = end
        return settled, f"{lost} messages, which are settled, did not get to the disk"
    if settled.floor >= log.oldest:
        return settled, None
    lost = log.oldest - settled.floor
    settled.floor = log.oldest
    if not state.epoch:  # the state is a new one, and knows nothing of what is not there any more
        return settled, None
    settled.below[Reason.DAMAGED] += lost
    return settled, f"{lost} messages are not there any more"
