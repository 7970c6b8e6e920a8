"""How does one uSubscription subscribe at another, for as long as it takes?"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.retry import Backoff
from penstock.protocols.uprotocol import (
    UUID7,
    SubscriptionStatus,
    UCode,
    UMessage,
    UPayloadFormat,
    UUri,
    proto,
    request,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.services.subscriptions import Record

__all__ = ["CALL_TIMEOUT", "Outcome", "RemoteTopics", "Wish", "Wishes"]

SUBSCRIBE: Final = 1
UNSUBSCRIBE: Final = 2
#: Timeout of a call (seconds).
CALL_TIMEOUT: Final = 300.0

#: Back-off after a failed call. Retries do not end while the topic is wanted.
_BACKOFF: Final = Backoff(initial=1.0, factor=2.0, maximum=60.0, jitter=0.2)


@dataclass(slots=True)
class Wish:
    """The desired state of our subscription to a topic at another uSubscription."""

    topic: UUri
    is_wanted: bool
    period_ms: int | None
    #: What the other side answered; None: it is to be asked.
    status: SubscriptionStatus | None = None
    attempts: int = 0
    due: float = 0.0
    reqid: UUID7 | None = None
    #: What the other side notified since the call: it may overtake the answer.
    notified: SubscriptionStatus | None = None

    @property
    def is_granted(self) -> bool:
        """Whether the other side says that we are subscribed."""
        return self.status == SubscriptionStatus.SUBSCRIBED

    def to_record(self) -> Record:
        """Return what is saved of it: after a restart, one that was not granted is asked again."""
        return {
            "is_wanted": self.is_wanted,
            "period_ms": self.period_ms,
            "is_granted": self.is_granted,
        }


#: Changed wishes by topic; None: the wish is over.
Wishes: TypeAlias = "Mapping[UUri, Wish | None]"


class Outcome(NamedTuple):
    """The answer of another uSubscription."""

    topic: UUri
    status: SubscriptionStatus
    #: What changes by it, to be saved and adopted.
    wishes: Wishes


class RemoteTopics:
    """The topics of other authorities with subscribers here. The caller holds the table's lock.

    A change is returned, for the caller to save it together with the subscriptions that it follows
    from, and to `adopt` it then.
    """

    def __init__(self, address: UUri, notes: Mapping[UUri, Record], clock: Clock) -> None:
        """Resume with the saved state.

        :param address: our own uSubscription, which is the subscriber at the other side
        """
        self._address = address
        self._clock = clock
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._wishes: dict[UUri, Wish] = {
            topic: Wish(
                topic,
                bool(note.get("is_wanted")),
                note.get("period_ms"),
                SubscriptionStatus.SUBSCRIBED if note.get("is_granted") else None,
            )
            for topic, note in notes.items()
        }

    def is_granted(self, topic: UUri) -> bool:
        wish = self._wishes.get(topic)
        return wish is not None and wish.is_wanted and wish.is_granted

    def is_answered(self, topic: UUri) -> bool:
        """Tell whether the other side answered a subscription, perhaps that it is pending."""
        wish = self._wishes.get(topic)
        return wish is not None and wish.is_wanted and wish.status is not None

    def note_notified(self, topic: UUri, status: SubscriptionStatus) -> None:
        """Note what the other side notified, in case the answer to the call comes later."""
        wish = self._wishes.get(topic)
        if wish is not None:
            wish.notified = status

    def granted(self, topic: UUri) -> Wishes:
        """Return what changes when the other side grants what was pending there."""
        if self.is_granted(topic):
            return {}
        return {topic: replace(self._wishes[topic], status=SubscriptionStatus.SUBSCRIBED)}

    def following(self, topic: UUri, periods_ms: Sequence[int | None]) -> Wishes:
        """Return what changes when a topic has subscribers with these sample periods here."""
        wish = self._wishes.get(topic)
        if not periods_ms:
            if wish is None or not wish.is_wanted:
                return {}
            return {topic: Wish(topic, is_wanted=False, period_ms=None)}
        all_have = [period for period in periods_ms if period]
        period_ms = min(all_have) if len(all_have) == len(periods_ms) else None
        if wish is not None and wish.is_wanted and wish.period_ms == period_ms:
            return {}
        return {topic: Wish(topic, is_wanted=True, period_ms=period_ms)}

    def again(self, topic: UUri) -> Wishes:
        """Return what changes when the other side forgot the subscription: it is made anew."""
        wish = self._wishes.get(topic)
        if wish is None or not self.is_answered(topic):
            return {}
        due = self._clock.monotonic() + _BACKOFF.delay(1, self._rng)
        return {topic: Wish(topic, is_wanted=True, period_ms=wish.period_ms, due=due)}

    def adopt(self, wishes: Wishes) -> None:
        """Follow changed wishes, which are saved."""
        # An earlier call in progress needs no answer: the new call follows it in the same queue.
        for topic, wish in wishes.items():
            if wish is None:
                del self._wishes[topic]
            else:
                wish.due = max(wish.due, self._clock.monotonic())
                self._wishes[topic] = wish

    # --- calls ------------------------------------------------------------------------------------

    def work(self) -> list[UMessage]:
        """Return the calls that are due."""
        now = self._clock.monotonic()
        calls = []
        for wish in self._wishes.values():
            if wish.status is not None or wish.due > now:
                continue
            if wish.reqid is not None:  # the last call timed out
                wish.attempts += 1
            call = self._call(wish)
            wish.reqid, wish.notified = call.attributes.id, None
            # The dispatcher answers for a silent receiver; this timeout covers its crash.
            wish.due = now + CALL_TIMEOUT + _BACKOFF.delay(wish.attempts + 1, self._rng)
            calls.append(call)
        return calls

    def next_due(self) -> float | None:
        return min((it.due for it in self._wishes.values() if it.status is None), default=None)

    def _call(self, wish: Wish) -> UMessage:
        if wish.is_wanted:
            asked = proto.SubscribeRequest(
                topic=wish.topic.to_proto(), sample_period=wish.period_ms
            )
            method = SUBSCRIBE
        else:
            asked = proto.UnsubscribeRequest(topic=wish.topic.to_proto())
            method = UNSUBSCRIBE
        there = UUri(
            wish.topic.authority_name, self._address.ue_id, self._address.ue_version_major, method
        )
        return request(
            self._address,
            there,
            asked.SerializeToString(),
            payload_format=UPayloadFormat.PROTOBUF,
            ttl=int(CALL_TIMEOUT * 1000),
            id=UUID7.new(self._clock.now_ns() // 1_000_000),
        )

    def answered(self, response: UMessage) -> Outcome | None:
        """Process an answer; return its outcome, or None."""
        attributes = response.attributes
        wish = next(
            (it for it in self._wishes.values() if it.reqid and it.reqid == attributes.reqid), None
        )
        source = attributes.source
        if wish is None or source is None:
            return None
        if source.authority_name != wish.topic.authority_name:
            return None  # the answer is from another sender
        status = self._granted(response, wish)
        if status is None:
            wish.reqid = None
            wish.attempts += 1
            wish.due = self._clock.monotonic() + _BACKOFF.delay(wish.attempts, self._rng)
            return None
        is_pending = status == SubscriptionStatus.SUBSCRIBE_PENDING
        if is_pending and wish.notified == SubscriptionStatus.SUBSCRIBED:
            status = wish.notified
        answered = None
        if wish.is_wanted and status != SubscriptionStatus.UNSUBSCRIBED:
            answered = Wish(wish.topic, is_wanted=True, period_ms=wish.period_ms, status=status)
        return Outcome(wish.topic, status, {wish.topic: answered})

    @staticmethod
    def _granted(response: UMessage, wish: Wish) -> SubscriptionStatus | None:
        """Return the status in an answer, or None if the call failed."""
        attributes = response.attributes
        if attributes.commstatus not in (None, UCode.OK):
            return None
        if not wish.is_wanted:
            return SubscriptionStatus.UNSUBSCRIBED
        payload = response.payload or b""
        try:
            if attributes.payload_format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
                payload = proto.Any_.FromString(payload).value
            status = SubscriptionStatus(proto.SubscribeResponse.FromString(payload).status)
        except proto.UNDECODABLE:
            return None
        return status if status != SubscriptionStatus.UNSPECIFIED else None
