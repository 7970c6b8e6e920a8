"""After a failed delivery, is the message tried again, and when? (spec uprotocol 10.1, R3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.dispatch.plans import topic_of
from penstock.dispatch.policies import Delivery
from penstock.protocols.uprotocol import DeadLetterReason, InvalidMessage, UCode, UMessage, UUri

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.dispatch.outbox import Item
    from penstock.dispatch.surroundings import Surroundings
    from penstock.protocols.uprotocol import UStatus

__all__ = ["RETRYABLE", "Attempts", "Tried", "Verdict"]

#: What may work later (R3); everything else is a dead letter at once.
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
#: Nobody was there, whichever word the leg had for it.
_AWAY: Final = frozenset(
    {UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.ABORTED, UCode.CANCELLED}
)
_MOST: Final = 65536


class Tried(NamedTuple):
    """What was tried with a message."""

    made: int = 0
    first_failure_ms: int = 0


class Verdict(NamedTuple):
    """What a failure means."""

    #: When the message is tried again (monotonic seconds); None: never.
    due: float | None
    code: UCode
    reason: DeadLetterReason
    text: str
    tried: Tried


_NEVER: Final = Tried()


class Attempts:
    """The failed attempts to deliver the messages of one receiver, kept in memory."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._tried: dict[tuple[int, int], Tried] = {}

    def __bool__(self) -> bool:
        return bool(self._tried)

    @property
    def total(self) -> int:
        """How often messages that still wait were tried."""
        return sum(tried.made for tried in list(self._tried.values()))

    def forget(self, items: Iterable[Item]) -> None:
        """Hear that messages have ended."""
        for item in items:
            self._tried.pop((item.priority, item.seq), None)

    def end(self, item: Item) -> Tried:
        """Hear that a message has ended; return what was tried."""
        return self._tried.pop((item.priority, item.seq), _NEVER)

    def fail(self, item: Item, status: UStatus) -> Verdict:
        """Decide what a failure means."""
        around = self._around
        before = self.end(item)
        now_ms = around.clock.now_ns() // 1_000_000
        tried = Tried(before.made + 1, before.first_failure_ms or now_ms)
        text = f"{status.code.name}: {status.message}" if status.message else status.code.name
        if status.code not in RETRYABLE:
            return Verdict(None, status.code, DeadLetterReason.REFUSED, text, tried)
        code = UCode.UNAVAILABLE if status.code in _AWAY else status.code
        most = self._most(item)
        if most is not None and tried.made >= most:
            text = f"given up after {tried.made} attempts; {text}"
            return Verdict(None, code, DeadLetterReason.UNREACHABLE, text, tried)
        if len(self._tried) >= _MOST:
            self._tried.clear()  # mostly of messages that ended otherwise
        self._tried[item.priority, item.seq] = tried
        due = around.clock.monotonic() + around.retry.backoff.delay(tried.made, around.rng)
        return Verdict(due, code, DeadLetterReason.UNREACHABLE, text, tried)

    def _most(self, item: Item) -> int | None:
        """Return how often it is tried; None: for as long as it lives."""
        try:
            attributes = UMessage.attributes_of(item.raw)
        except InvalidMessage:
            return 1
        policy = self._around.policies.of(topic_of(attributes) or UUri())
        if policy.delivery is Delivery.BEST_EFFORT:
            return 1
        if policy.max_attempts is None and attributes.ttl:
            return None
        return policy.max_attempts or self._around.retry.max_attempts
