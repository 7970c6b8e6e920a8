"""What passed through a router, and what became of the rest?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from penstock.relay.faults.model import Direction

__all__ = ["ClientCounters", "Counters", "DirectionCounters"]


@dataclass(slots=True)
class DirectionCounters:
    """Books of one direction: datagrams for UDP, bytes for TCP.

    `arrived` is the sum of `passed` to `held`. Those after it say what happened on the way to
    some of the passed ones.
    """

    #: Sent to the router.
    arrived: int = 0
    #: Handed on, whole or garbled.
    passed: int = 0
    #: Not handed on, because a drop was asked for.
    dropped: int = 0
    #: Thrown away by the kernel because the router did not keep up. UDP.
    overflowed: int = 0
    #: From a client for whom there was no room. UDP.
    refused: int = 0
    #: More under way (by delay or rate) than the router keeps. UDP.
    congested: int = 0
    #: Could not be handed on: the receiver is gone, or the operating system refused.
    failed: int = 0
    #: Under way when its client was cut off, or the router closed.
    discarded: int = 0
    #: Under way now.
    held: int = 0

    #: Copies made and handed on, beside those in `passed`.
    duplicated: int = 0
    #: Held back for a delay.
    delayed: int = 0
    #: Held back until others had overtaken.
    reordered: int = 0
    #: Had a byte changed.
    garbled: int = 0
    #: Bytes in what arrived, without the overflowed.
    arrived_bytes: int = 0
    #: Bytes in what was passed.
    passed_bytes: int = 0

    @property
    def accounted(self) -> int:
        """The sum of all that can become of what arrived."""
        return (
            self.passed
            + self.dropped
            + self.overflowed
            + self.refused
            + self.congested
            + self.failed
            + self.discarded
            + self.held
        )


@dataclass(slots=True)
class ClientCounters:
    """Books of the clients: `seen` is the sum of `refused` to `active`."""

    #: Clients (UDP: addresses) or connections (TCP) that came.
    seen: int = 0
    #: Turned away: by the fault, or because there was no room.
    refused: int = 0
    #: The target could not be reached for them.
    unreachable: int = 0
    #: Cut off by the router.
    cut: int = 0
    #: Ended by themselves or by the target, or with the router.
    ended: int = 0
    #: Not heard of for too long. UDP.
    expired: int = 0
    #: Here now.
    active: int = 0

    #: Made half open in place of being cut.
    silenced: int = 0

    @property
    def accounted(self) -> int:
        """The sum of all that can become of a client."""
        return self.refused + self.unreachable + self.cut + self.ended + self.expired + self.active


@dataclass(slots=True)
class Counters:
    """Books of a router."""

    #: What `up` and `down` count.
    unit: Literal["datagrams", "bytes"]
    up: DirectionCounters = field(default_factory=DirectionCounters)
    down: DirectionCounters = field(default_factory=DirectionCounters)
    clients: ClientCounters = field(default_factory=ClientCounters)

    def of(self, direction: Direction) -> DirectionCounters:
        """Return the books of a direction."""
        return self.up if direction == "up" else self.down

    @property
    def adds_up(self) -> bool:
        """Whether nothing is unaccounted for."""
        return all(one.accounted == one.arrived for one in (self.up, self.down)) and (
            self.clients.accounted == self.clients.seen
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self)
