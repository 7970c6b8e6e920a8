"""Which numbers bound a dispatcher, and when does it try again?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption
from penstock.core.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.dispatch.rates import Rate

__all__ = ["Limits", "Retry"]

_LONGEST_LINGER: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What comes from outside is bounded by these.

    :raises InvalidOption: a number is out of its range.
    """

    #: Bytes of a message at most.
    message: int = 1 << 20
    #: Bytes of a message at most that a leg carries, by the leg's name; the others have no own.
    leg_messages: Mapping[str, int] = field(default_factory=dict)
    #: How fast messages may come by a leg, by the leg's name; the others have no bound.
    leg_rates: Mapping[str, Rate] = field(default_factory=dict)
    #: Messages and bytes that may wait for one receiver.
    queue_messages: int = 1_000_000
    queue_bytes: int = 2 << 30
    #: Receivers that messages may wait for.
    receivers: int = 1024
    #: Bytes of dead letters that are kept on the disk.
    dead: int = 256 << 20
    #: Bytes on the disk of what came and could not be decoded; 0: nothing of it is kept.
    quarantine: int = 16 << 20
    #: Messages, at least, in which one that comes again is found.
    dedupe: int = 100_000
    #: Messages and bytes of one delivery.
    batch: int = 256
    batch_bytes: int = 1 << 20
    #: How long (seconds) a delivery that is not full yet waits for more messages.
    linger: float = 0.0
    #: An id that is this many seconds in the future does not make its message live longer.
    clock_skew: float = 60.0

    def __post_init__(self) -> None:
        numbers = ("message", "queue_messages", "queue_bytes", "receivers", "dead", "batch")
        for name in (*numbers, "batch_bytes"):
            if getattr(self, name) < 1:
                raise InvalidOption(name, getattr(self, name), "must be at least 1")
        for name in ("dedupe", "quarantine", "clock_skew"):
            if not getattr(self, name) >= 0:
                raise InvalidOption(name, getattr(self, name), "must not be negative")
        if not 0 <= self.linger <= _LONGEST_LINGER:
            raise InvalidOption("linger", self.linger, f"must be 0 to {_LONGEST_LINGER:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to wait after a failed delivery, and how often to try.

    :raises InvalidOption: a number is out of its range.
    """

    backoff: Backoff = field(default_factory=Backoff)
    #: Attempts in all for a message that never expires; one with a ttl has as many as it needs.
    #: None: without limit, for it may be discarded only when it is expired or its queue is full.
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidOption("max_attempts", self.max_attempts, "must be at least 1")
