"""What can a queue be told, and what does it report?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from penstock.core.errors import InvalidOption
from penstock.core.overflow import DropReason, OverflowPolicy
from penstock.queue.log.endpoint import names_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.datagrams import Address

__all__ = ["CommandQueue", "Commands", "QueueSettings", "QueueStatistics", "Send"]

#: Neighbouring commands of one verb: what follows its colon in each, and who asked.
Commands: TypeAlias = "tuple[bytes, list[bytes], list[Address]]"
#: Takes answers to where they were asked.
Send: TypeAlias = "Callable[[Sequence[tuple[bytes, Address]]], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Capacity, policy and lease time of a queue."""

    #: Messages and bytes that are not done.
    capacity: int = 1_000_000
    capacity_bytes: int = 128 << 20
    policy: OverflowPolicy = OverflowPolicy.FAIL
    #: The URL of a log that outlives the queue.
    journal: str | None = None
    #: Seconds that a client has a message before it comes again.
    lease: float = 30.0
    #: After so many deliveries a message goes to this stream.
    deliveries: int | None = None
    dead: str | None = None

    def __post_init__(self) -> None:
        if self.policy is OverflowPolicy.BLOCK:
            raise InvalidOption("policy", self.policy, "a queue of datagrams cannot make them wait")
        if self.journal is not None and not names_log(self.journal):
            raise InvalidOption("journal", self.journal, "must be a log: log:/path/name")
        if self.capacity < 1 or self.capacity_bytes < 1:
            raise InvalidOption("capacity", self.capacity, "must be at least 1")
        if not self.lease > 0:
            raise InvalidOption("lease", self.lease, "must be above 0 seconds")


class QueueStatistics(NamedTuple):
    """Counters of a queue.

    commands = puts + gets + sizes + reliable + unknown; and of messages
    recovered + offered = refused + dropped + repeated + taken + acked + dead + lost + held.
    """

    #: Commands that were whole frames.
    commands: int
    puts: int
    gets: int
    sizes: int
    #: Requests of the reliable mode, and those of them that are not as they should be.
    reliable: int
    bad_requests: int
    #: Commands that are not answered: no verb of the protocol, or no text.
    unknown: int
    #: Messages in the journal from before.
    recovered: int
    #: Messages in commands to store them.
    offered: int
    #: Messages that were stored.
    queued: int
    #: Messages not stored, by reason. A reliable sender gets an error, a legacy PUT no reply.
    refused: dict[str, int]
    #: Messages that made room, or found none, by the queue's policy.
    dropped: dict[DropReason, int]
    #: Messages that were stored before, and are not again.
    repeated: int
    #: Messages that a legacy GET took.
    taken: int
    #: Such GETs that nobody answered: the next message does not fit a datagram.
    unanswered: int
    #: Messages that clients acknowledged.
    acked: int
    #: Messages that came again.
    redelivered: int
    #: Messages that went to the dead letters.
    dead: int
    #: Messages that the journal lost.
    lost: int
    #: Messages that are not done; those of them that a client has, and the bytes of all.
    held: int
    leased: int
    held_bytes: int
    #: Requests that wait for a message now.
    waiting: int
    #: Clients that were forgotten before their time, to make room for others.
    forgotten: int


class CommandQueue(Protocol):
    """What a server passes commands to: a queue, or a balancer in front of several."""

    def handle(
        self, commands: Sequence[Commands], send: Send, largest: int
    ) -> tuple[list[tuple[bytes, Address]], int]:
        """Execute commands; return the replies, and how many more will follow later.

        :param send: sends the replies to requests that wait for a message
        :param largest: the largest reply, in bytes
        """

    def forget(self, send: Send) -> None:
        """Drop the waiting requests whose replies would go through `send`."""

    def statistics(self) -> QueueStatistics: ...

    def close(self) -> None: ...
