"""What is promised to the messages of a topic, and in which order do they go?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from penstock.core.delivery import DeliveryPolicy
from penstock.core.errors import InvalidOption
from penstock.protocols.uprotocol import UUri

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.dispatch.outbox import Order

__all__ = ["Delivery", "Policies", "Policy"]


class Delivery(Enum):
    """What is promised."""

    #: It is tried until the receiver's transport has it, or it is a dead letter.
    AT_LEAST_ONCE = "at-least-once"
    #: The same, but a newer message of the topic takes the place of one that still waits.
    LATEST = "latest"
    #: It is tried once.
    BEST_EFFORT = "best-effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The promise to the topics that match a pattern.

    :raises InvalidOption: a number is out of its range.
    """

    #: Of the topic of a publish or a notification, of the method of a request or a response.
    topic: UUri = UUri.ANY
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    #: How many of a topic wait for a receiver, and how long: the policies of all streams, but for
    #: those that make the sender wait. What has to leave does so as with `latest`, or expires.
    queue: DeliveryPolicy = DeliveryPolicy.UNLIMITED
    #: A receiver has one order: that of priority, if a topic that goes to it asks for that.
    order: Order = "arrival"
    #: Seconds in a queue at most, whatever the ttl says; None is no limit.
    max_age: float | None = None
    #: Attempts at most. None: without limit for messages that have a ttl, for the others as many
    #: as the dispatcher's `retry` says.
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
        """How many of a topic wait for a receiver at most; None: no limit."""
        return 1 if self.delivery is Delivery.LATEST else self.queue.max_size

    @property
    def longest_wait(self) -> float | None:
        """Seconds in a queue at most, whatever the ttl says; None: no limit."""
        limits = [it for it in (self.max_age, self.queue.max_latency) if it is not None]
        return min(limits, default=None)


class Policies:
    """All policies; the first that matches counts."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._policies = (*policies, Policy())

    def of(self, topic: UUri) -> Policy:
        return next(policy for policy in self._policies if policy.topic.matches(topic))
