"""What is promised to the messages of a topic, and which numbers bound a dispatcher?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.errors import InvalidOption
from penstock.core.retry import Backoff
from penstock.protocols.uprotocol import UUri

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.dispatch.outbox import Order

__all__ = ["Delivery", "Limits", "Policies", "Policy", "Rate", "Retry"]

_LONGEST_LINGER: Final = 10.0


class Delivery(Enum):
    """Delivery guarantees."""

    #: Retry until the receiver's transport accepts it, or it becomes a dead letter.
    AT_LEAST_ONCE = "at-least-once"
    #: The same, but a newer message of the topic supersedes one still waiting.
    LATEST = "latest"
    #: One attempt.
    BEST_EFFORT = "best-effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The delivery policy of the topics that match a pattern.

    :raises InvalidOption: a number is out of its range.
    """

    #: A pattern of topics (publish, notification) or methods (request, response).
    topic: UUri = UUri.ANY
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    #: How many messages of a topic are queued per receiver, and how long: the overflow policies
    #: of streams, except those that block the sender. Excess messages are superseded, or expire.
    queue: DeliveryPolicy = DeliveryPolicy.UNLIMITED
    #: A receiver has one order: by priority, if any of its topics requires that.
    order: Order = "arrival"
    #: Seconds in a queue, at most, regardless of the ttl; None: no limit.
    max_age: float | None = None
    #: Attempts, at most. None: no limit for messages with a ttl; for others the dispatcher's
    #: `retry` applies.
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        if self.max_age is not None and not self.max_age > 0:
            raise InvalidOption("max_age", self.max_age, "must be above 0 seconds")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidOption("max_attempts", self.max_attempts, "must be at least 1")
        if self.queue.throttle_at is not None or self.queue.is_synchronous:
            raise InvalidOption(
                "queue",
                str(self.queue),
                "would make a sender wait for one of its receivers",
                hint="queue-size:N, latency:TIME, latest or unlimited",
            )
        if self.delivery is Delivery.LATEST and self.queue.max_size is not None:
            raise InvalidOption("queue", str(self.queue), "and delivery: latest are two limits")

    @property
    def most_waiting(self) -> int | None:
        """Messages of a topic queued per receiver, at most; None: no limit."""
        return 1 if self.delivery is Delivery.LATEST else self.queue.max_size

    @property
    def longest_wait(self) -> float | None:
        """Seconds in a queue, at most, regardless of the ttl; None: no limit."""
        limits = [it for it in (self.max_age, self.queue.max_latency) if it is not None]
        return min(limits, default=None)


class Policies:
    """All policies; the first match applies."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._policies = (*policies, Policy())

    def of(self, topic: UUri) -> Policy:
        return next(policy for policy in self._policies if policy.topic.matches(topic))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Limits in messages per second, which are also the burst sizes; None: no limit.

    :raises InvalidOption: a number is not positive.
    """

    #: For a leg as a whole, and for each entity that sends by it.
    leg: float | None = None
    source: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("rate", self.leg), ("source_rate", self.source)):
            if rate is not None and not 0 < rate < float("inf"):
                raise InvalidOption(name, rate, "must be more than 0 messages a second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of everything that comes from outside.

    :raises InvalidOption: a number is out of its range.
    """

    #: Bytes of a message, at most.
    message: int = 1 << 20
    #: Bytes of a message, at most, by name of the leg; other legs have no limit of their own.
    leg_messages: Mapping[str, int] = field(default_factory=dict)
    #: Rate limits by name of the leg; other legs have none.
    leg_rates: Mapping[str, Rate] = field(default_factory=dict)
    #: Messages and bytes queued for one receiver, at most.
    queue_messages: int = 1_000_000
    queue_bytes: int = 2 << 30
    #: Receivers with queued messages, at most.
    receivers: int = 1024
    #: Bytes of dead letters kept on the disk.
    dead: int = 256 << 20
    #: Bytes of undecodable messages kept on the disk; 0: none are kept.
    quarantine: int = 16 << 20
    #: Size of the duplicate window in messages, at least.
    dedupe: int = 100_000
    #: Messages and bytes per delivery.
    batch: int = 256
    batch_bytes: int = 1 << 20
    #: How long (seconds) a partial batch waits for more messages.
    linger: float = 0.0
    #: Tolerated clock skew (seconds): an id further in the future does not extend the ttl.
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
    """Back-off after a failed delivery, and number of attempts.

    :raises InvalidOption: a number is out of its range.
    """

    backoff: Backoff = field(default_factory=Backoff)
    #: Attempts for a message without a ttl; one with a ttl is retried until it expires.
    #: None: no limit: a message is discarded only when it expires or its queue is full.
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidOption("max_attempts", self.max_attempts, "must be at least 1")
