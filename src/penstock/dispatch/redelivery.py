"""After a failed delivery, is the message tried again, and when?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.dispatch.routes import topic_of
from penstock.dispatch.settings import Delivery
from penstock.protocols.uprotocol import DeadLetterReason, InvalidMessage, UCode, UMessage, UUri

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from penstock.core.clock import Clock
    from penstock.dispatch.outbox import Item
    from penstock.dispatch.settings import Policies, Retry
    from penstock.protocols.uprotocol import UStatus

__all__ = ["RETRYABLE", "Attempts", "Tried", "Verdict"]

#: Codes worth a retry; any other makes a dead letter at once.
RETRYABLE: Final = frozenset(
    {
        UCode.UNAVAILABLE,
        UCode.DEADLINE_EXCEEDED,
        UCode.RESOURCE_EXHAUSTED,
        UCode.ABORTED,
        UCode.UNKNOWN,
        UCode.INTERNAL,
        UCode.CANCELLED,
    }
)
#: Codes that mean that the receiver was not reachable.
_AWAY: Final = frozenset(
    {UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.ABORTED, UCode.CANCELLED}
)
_MOST: Final = 65536


class Tried(NamedTuple):
    """The failed attempts of a message."""

    made: int = 0
    first_failure_ms: int = 0


class Verdict(NamedTuple):
    """The decision after a failed attempt."""

    #: When the message is retried (monotonic seconds); None: never.
    due: float | None
    code: UCode
    reason: DeadLetterReason
    text: str
    tried: Tried


_NEVER: Final = Tried()


class Attempts:
    """The failed attempts to deliver the messages of one receiver, kept in memory."""

    def __init__(self, policies: Policies, retry: Retry, clock: Clock, rng: random.Random) -> None:
        self._policies = policies
        self._retry = retry
        self._clock = clock
        self._rng = rng
        #: By class and number; only messages that failed and are still queued.
        self.tried: dict[tuple[int, int], Tried] = {}

    @property
    def total(self) -> int:
        """Number of failed attempts of the messages still queued."""
        return sum(tried.made for tried in list(self.tried.values()))

    def forget(self, items: Iterable[Item]) -> None:
        """Forget settled messages."""
        for item in items:
            self.tried.pop((item.priority, item.seq), None)

    def end(self, item: Item) -> Tried:
        """Forget a settled message; return its attempts."""
        return self.tried.pop((item.priority, item.seq), _NEVER)

    def fail(self, item: Item, status: UStatus) -> Verdict:
        """Count a failed attempt; decide whether to retry."""
        before = self.end(item)
        now_ms = self._clock.now_ns() // 1_000_000
        tried = Tried(before.made + 1, before.first_failure_ms or now_ms)
        text = f"{status.code.name}: {status.message}" if status.message else status.code.name
        if status.code not in RETRYABLE:
            return Verdict(None, status.code, DeadLetterReason.REFUSED, text, tried)
        code = UCode.UNAVAILABLE if status.code in _AWAY else status.code
        most = self._most(item)
        if most is not None and tried.made >= most:
            text = f"given up after {tried.made} attempts; {text}"
            return Verdict(None, code, DeadLetterReason.UNREACHABLE, text, tried)
        if len(self.tried) >= _MOST:
            self.tried.clear()  # mostly of messages that ended otherwise
        self.tried[item.priority, item.seq] = tried
        due = self._clock.monotonic() + self._retry.backoff.delay(tried.made, self._rng)
        return Verdict(due, code, DeadLetterReason.UNREACHABLE, text, tried)

    def _most(self, item: Item) -> int | None:
        """Return the number of attempts; None: until it expires."""
        try:
            attributes = UMessage.attributes_of(item.raw)
        except InvalidMessage:
            return 1
        policy = self._policies.of(topic_of(attributes) or UUri())
        if policy.delivery is Delivery.BEST_EFFORT:
            return 1
        if policy.max_attempts is None and attributes.ttl:
            return None
        return policy.max_attempts or self._retry.max_attempts
