"""How do several readers share the messages of one stream?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow as pa

from penstock.core.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.statistics import Loss

__all__ = ["Delivered", "GroupStatistics", "Grouped", "numbers_of_delivered"]

#: What `ack` and `nack` take: a message, some messages, or an Arrow batch of them.
Delivered: TypeAlias = "Message | Iterable[Message] | Batch"


class GroupStatistics(NamedTuple):
    """Books of a group, of all members. Every message is fresh, leased, waiting, or settled."""

    #: Readers that are open, in all processes.
    members: int
    #: Sequence number of the next message that nobody was given yet.
    next_seq: int
    #: All messages below this one are settled.
    floor: int
    #: Messages that are not settled.
    lag: int
    #: Messages that a member has and did not settle yet.
    leased: int
    #: Messages that wait to be delivered again, or for an earlier one of their key.
    waiting: int
    #: Messages that a member acknowledged.
    acked: int
    #: Deliveries of a message after its first.
    redelivered: int
    #: Messages that went to the dead-letter stream.
    dead: int
    #: Messages that the stream did not have any more, or whose bytes are damaged.
    lost: int
    #: Messages that were settled, and are no more: a power failure took them from the stream.
    reverted: int
    #: The latest lost ranges, oldest first.
    losses: tuple[Loss, ...]


class Grouped(ABC):
    """A reader that shares a stream with the others of its group.

    A read leases messages to this reader. Each is settled by `ack`. It is delivered again, to any
    member, after `nack`, when the lease runs out, when the reader is closed or its process dies.
    """

    @abstractmethod
    def ack(self, messages: Delivered) -> None:
        """Settle messages that this reader has leased: nobody gets them again.

        :raises LeaseLost: some are not leased to it any more; the others are settled.
        :raises StorageError: the operating system refuses.
        """

    @abstractmethod
    def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        """Give messages back, to be delivered again after some seconds.

        :raises LeaseLost: some are not leased to this reader any more; the others are given back.
        :raises StorageError: the operating system refuses.
        """

    @abstractmethod
    def group(self) -> GroupStatistics:
        """Return the books of the whole group."""


def numbers_of_delivered(messages: Delivered) -> list[int]:
    """Return the sequence numbers of what `ack` and `nack` take."""
    if isinstance(messages, Message):
        return [messages.seq]
    if isinstance(messages, pa.RecordBatch):
        numbers: list[int] = messages.column("seq").to_pylist()
        return numbers
    return [message.seq for message in messages]
