"""What became of all messages that were ever stored in an outbox?"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OutboxBooks"]


class OutboxBooks(NamedTuple):
    """`stored` is the sum of all others, at every moment and after every crash."""

    #: Messages that were stored.
    stored: int
    #: Those settled, by their `Reason`.
    acked: int
    expired: int
    queue_full: int
    permanent: int
    admin: int
    gone: int
    superseded: int
    damaged: int
    #: Those that are not settled: waiting, or in flight.
    queued: int

    @property
    def settled(self) -> int:
        return self.stored - self.queued
