"""What became of the messages of a relay?"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.overflow import DropReason

__all__ = ["RelayStatistics"]


class RelayStatistics(NamedTuple):
    """Books of a relay: `read == copied + sum(dropped.values()) + held`, at any moment."""

    #: Messages taken from the source.
    read: int
    #: Messages that are in the target.
    copied: int
    #: Their payload bytes.
    bytes: int
    #: Messages left out, by reason: by the policy, or because the target will never take them.
    dropped: dict[DropReason, int]
    #: Messages taken and not yet in the target. A relay with a state reads them again; where the
    #: source gives each once, they are dropped as `abandoned` when the relay stops.
    held: int
    #: Messages that were gone before they could be read.
    lost: int
    #: Messages sent again that may be in the target already: it could not be asked.
    in_doubt: int
    #: How often a side was away.
    outages: int
    #: Messages in the source that were not reached yet, when it was last looked at.
    backlog: int

    @property
    def missing(self) -> int:
        """Messages that are gone and that nobody chose to leave out."""
        return self.lost + self.dropped.get(DropReason.ABANDONED, 0)
