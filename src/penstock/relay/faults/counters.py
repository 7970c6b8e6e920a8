"""What passed through a router, and what happened to the rest?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from penstock.relay.faults.model import Direction

__all__ = ["ClientCounters", "Counters", "DirectionCounters"]


@dataclass(slots=True)
class DirectionCounters:
    """Counters of one direction: datagrams for UDP, bytes for TCP.

    `arrived` is the sum of `passed` to `held`. The later fields count faults among the passed
    ones.
    """

    #: Sent to the router.
    arrived: int = 0
    #: Forwarded, intact or garbled.
    passed: int = 0
    #: Dropped on purpose.
    dropped: int = 0
    #: Dropped by the kernel because the router did not keep up. UDP.
    overflowed: int = 0
    #: From a client beyond the limit. UDP.
    refused: int = 0
    #: Beyond the most that the router holds for delay or rate. UDP.
    congested: int = 0
    #: Could not be forwarded: the receiver is gone, or the operating system refused.
    failed: int = 0
    #: In transit when its client was cut off, or the router closed.
    discarded: int = 0
    #: In transit now.
    held: int = 0

    #: Duplicates forwarded, beside those in `passed`.
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
        """The sum of all outcomes of what arrived."""
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
    """Counters of the clients: `seen` is the sum of `refused` to `active`."""

    #: Clients (UDP: addresses) or connections (TCP) so far.
    seen: int = 0
    #: Refused: by the fault, or because of the limit.
    refused: int = 0
    #: The target could not be reached for them.
    unreachable: int = 0
    #: Cut off by the router.
    cut: int = 0
    #: Ended by the client, by the target, or with the router.
    ended: int = 0
    #: Idle for too long. UDP.
    expired: int = 0
    #: Active now.
    active: int = 0

    #: Made half open instead of being cut.
    silenced: int = 0

    @property
    def accounted(self) -> int:
        """The sum of all outcomes of clients."""
        return self.refused + self.unreachable + self.cut + self.ended + self.expired + self.active


@dataclass(slots=True)
class Counters:
    """Counters of a router."""

    #: The unit of `up` and `down`.
    unit: Literal["datagrams", "bytes"]
    up: DirectionCounters = field(default_factory=DirectionCounters)
    down: DirectionCounters = field(default_factory=DirectionCounters)
    clients: ClientCounters = field(default_factory=ClientCounters)

    def of(self, direction: Direction) -> DirectionCounters:
        """Return the counters of a direction."""
        return self.up if direction == "up" else self.down

    @property
    def adds_up(self) -> bool:
        """Whether nothing is unaccounted for."""
        return all(one.accounted == one.arrived for one in (self.up, self.down)) and (
            self.clients.accounted == self.clients.seen
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all counters for JSON."""
        return asdict(self)
