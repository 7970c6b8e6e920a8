"""How do the messages of one receiver get to it, in order, whatever fails? (uprotocol 10.1)."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.dispatch.attempts import Attempts
from penstock.dispatch.giving_up import Failure, Stored
from penstock.dispatch.lingering import Lingering
from penstock.dispatch.outbox import Columns, Reason
from penstock.dispatch.outbox.records import CLASSES
from penstock.dispatch.parcels import parcel
from penstock.dispatch.storing import Storing
from penstock.dispatch.traffic import Traffic, topic_of_item
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    UCode,
    UMessageType,
    UStatus,
    UStatusError,
    UUri,
)
from penstock.protocols.uprotocol.transports import NOT_TRIED
from penstock.protocols.uprotocol.transports.handed_over import HandedOver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.dispatch.attempts import Verdict
    from penstock.dispatch.outbox import Entry, Item, Order, Outbox
    from penstock.dispatch.receivers import Receiver
    from penstock.dispatch.storing import Keys
    from penstock.dispatch.surroundings import Surroundings
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["Outlet"]

log = logging.getLogger(__name__)

#: Messages whose time is over, until it is the turn of another receiver's.
_AT_ONCE: Final = 256


class Outlet:
    """The deliveries to one receiver. One thread delivers; others store, expire and stop."""

    def __init__(self, receiver: Receiver, leg: Leg, outbox: Outbox, around: Surroundings) -> None:
        self.receiver = receiver
        self.outbox = outbox
        #: What it had when this dispatcher was opened.
        self.before = outbox.books()
        # What is there from before a restart goes by the policy of all topics, if there is one.
        self.order: Order = around.policies.of(UUri.ANY).order
        self._leg = leg
        self._around = around
        self._attempts = Attempts(around)
        self._traffic = Traffic(receiver, around)
        self._on_its_way: HandedOver[Item] = HandedOver(leg, around.clock)
        self._lingering = Lingering(outbox, around.limits)
        #: Until when the messages of a source, or all of them, wait (monotonic seconds).
        self._held: dict[int, float] = {}
        self._rests_until = 0.0
        #: When `work` looked last which of them do.
        self._looked = 0.0
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._is_delivering = False
        #: Why the last delivery failed; empty after one that did not.
        self.trouble = ""
        #: Whether it took the last message that it was given.
        self.is_there = False
        #: Called when messages were delivered, by whoever waits for their room.
        self.on_room: Callable[[Outlet], None] | None = None
        self._storing = Storing(receiver, outbox, self.before.stored, around.ledger)

    # --- in -------------------------------------------------------------------------------------

    def store(
        self,
        entries: Sequence[Entry] | Columns,
        latest: Keys | None = None,
        came_by: str = "",
    ) -> list[Failure]:
        """Store messages; return those that there was no room for, and those that made it.

        :param latest: which of them take the place of others
        :raises StorageError: there is no space; some may be stored.
        """
        try:
            return self._storing.store(entries, latest, came_by)
        finally:  # also of those that were stored before there was no more space
            if not self.outbox.is_closed:
                self._tell_of_expiry(
                    entries.times
                    if isinstance(entries, Columns)
                    else [entry[2] for entry in entries]
                )
                self._around.wake(self)

    def refuse(self, entries: Sequence[Entry] | Columns, came_by: str) -> list[Failure]:
        """Count messages that there is no outbox for; return what they are."""
        return self._storing.refuse(entries, came_by)

    def _tell_of_expiry(self, times: Sequence[int]) -> None:
        soonest = min(times, default=0) or min((ms for ms in times if ms), default=0)
        if soonest:
            self._around.expires(self, soonest)

    # --- out ------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Deliver what is due, one batch; tell whether there was something.

        :raises StorageError: a dead letter could not be written; the message waits again.
        """
        around = self._around
        now = around.clock.monotonic()
        if self._on_its_way:
            self._look_after()
        with self._lock:
            self._looked = now
            if self._rests_until > now or self.outbox.is_closed or self._on_its_way.is_full:
                return False
            if around.limits.linger and self._lingering.holds(now):
                return False
            blocked = self._blocked(now)
            items = self.outbox.take(
                around.limits.batch, around.limits.batch_bytes, self.order, blocked
            )
            if not items:
                return False
            chosen, failures = self._choose(items)
            self._is_delivering = bool(chosen)
        try:
            if failures:
                around.giving_up.give_up(failures)
            if chosen:
                self._deliver(chosen)
        except BaseException:
            self._give_back(items)  # those that are not settled
            with self._lock:
                self._rests_until = now + around.retry.backoff.maximum
            raise
        finally:
            with self._lock:
                self._is_delivering = False
                self._quiet.notify_all()
        return True

    def _blocked(self, now: float) -> set[int]:
        if self._held:
            self._held = {source: due for source, due in self._held.items() if due > now}
        self._traffic.notice_changes()
        return {*self._held, *self._traffic.stopped}

    def _choose(self, items: list[Item]) -> tuple[list[Item], list[Failure]]:
        """Find out which of the messages that were taken are to be delivered.

        The others are settled or given back, except for those that are dead letters.
        """
        now_ms = self._around.clock.now_ns() // 1_000_000
        traffic = self._traffic
        if traffic.is_plain(items) and not any(
            [item[3] and item[3] <= now_ms for item in items]  # noqa: C419 - faster
        ):
            return items, []
        chosen: list[Item] = []
        failures: list[Failure] = []
        gone: list[Item] = []
        back: list[Item] = []
        sampled: set[int] = set()
        for item in items:
            if item.expires_at_ms and item.expires_at_ms <= now_ms:
                failures.append(self._expired(item))
                continue
            known = traffic.of(item)
            if known.is_gone:
                gone.append(item)
            elif known.is_stopped:
                traffic.stopped.add(item.source)
                back.append(item)
            elif item.source in traffic.stopped or item.source in sampled:
                back.append(item)
            else:
                chosen.append(item)
                if known.period:
                    sampled.add(item.source)
        if gone:
            self.outbox.settle(gone, Reason.GONE)
        if back:
            self._give_back(back)
        return chosen, failures

    def _look_after(self) -> None:
        """Settle what has arrived by now, or deliver again what may not have."""
        arrived, again = self._on_its_way.take()
        if arrived:
            self._settle(arrived)
        if again:
            self._give_back(again)

    def _deliver(self, items: list[Item]) -> None:
        links_lost = self._leg.links_lost
        statuses = self._hand_over(items)
        if len(statuses) == len(items) and statuses.count(None) == len(items):
            self._acknowledge(items, links_lost)
            return
        statuses = [*statuses, *[NOT_TRIED] * (len(items) - len(statuses))]
        acked: list[Item] = []
        failed: list[tuple[Item, UStatus]] = []
        back: list[Item] = []
        for item, status in zip(items, statuses, strict=False):
            if status is None or status.is_ok:
                acked.append(item)
            elif status is NOT_TRIED:
                back.append(item)
            else:
                failed.append((item, status))
        if acked:
            self._acknowledge(acked, links_lost)
        failures = []
        for item, status in failed:
            verdict = self._attempts.fail(item, status)
            self.trouble, self.is_there = verdict.text, False
            if verdict.due is None:
                failures.append(self._given_up(item, verdict))
            else:
                self._hold(item, verdict.due)
                back.append(item)
        self._give_back(back)
        if failures:
            self._around.giving_up.give_up(failures)

    def _hand_over(self, items: Sequence[Item]) -> Sequence[UStatus | None]:
        messages = [parcel(item[7]) for item in items]
        try:
            return self._leg.deliver(self.receiver.address, messages)
        except UStatusError as error:
            return [error.status]
        except Exception as error:
            # E16: whatever a leg raises is a message that was not delivered.
            log.warning("%s: %s", self.receiver, error, exc_info=True)
            return [UStatus(UCode.INTERNAL, f"{type(error).__name__}: {error}")]

    @property
    def is_unsure(self) -> bool:
        """Whether there are messages on their way that a restart would deliver again."""
        return len(self._on_its_way) > 0

    @property
    def failed_attempts(self) -> int:
        """How often messages that still wait were tried."""
        return self._attempts.total

    def _acknowledge(self, items: list[Item], links_lost: int) -> None:
        self.trouble, self.is_there = "", True
        if self._traffic.is_sampled:
            now = self._around.clock.monotonic()
            with self._lock:
                for item in items:
                    period = self._traffic.period(item)
                    if period:
                        self._held[item.source] = now + period
        if self._leg.settle_after:
            self._on_its_way.add(items, links_lost, sum(len(item[7]) for item in items))
        else:
            self._settle(items)

    def _settle(self, items: Sequence[Item]) -> None:
        self.outbox.settle(items, Reason.ACKED)
        if self._attempts:
            self._attempts.forget(items)
        if self.on_room is not None:
            self.on_room(self)

    def _hold(self, item: Item, due: float) -> None:
        """Let the messages behind one that failed wait, as far as their order asks for it."""
        # At an authority it may be one of many entities that is away, not all of them.
        is_alone = self._leg.scope == "authority" and self._leg.is_up
        with self._lock:
            if self.order == "arrival" and not is_alone:
                self._rests_until = due
            else:
                self._held[item.source] = due

    def _given_up(self, item: Item, verdict: Verdict) -> Failure:
        return Failure(
            item.raw,
            verdict.code,
            verdict.reason,
            verdict.text,
            receiver=self.receiver,
            stored=Stored(self.outbox, item, Reason.PERMANENT),
            attempts=verdict.tried.made,
            first_failure_ms=verdict.tried.first_failure_ms,
        )

    def _give_back(self, items: Sequence[Item]) -> None:
        if items:
            self.outbox.give_back(items)
            self._tell_of_expiry([item[3] for item in items])

    # --- time -----------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return when there is something to deliver again (monotonic seconds); None: nothing."""
        with self._lock:
            if self.outbox.is_closed:
                return None
            arriving, waiting = self._on_its_way.next_due, self._next_attempt()
        return min((due for due in (arriving, waiting) if due is not None), default=None)

    def _next_attempt(self) -> float | None:
        if self.outbox.waiting == 0:
            return None
        if self._lingering.until is not None and self._rests_until <= self._looked:
            return self._lingering.until
        # Of those that waited when `work` looked: also one whose time has come since then.
        if self._rests_until > self._looked:
            return self._rests_until
        return min((due for due in self._held.values() if due > self._looked), default=None)

    def expire(self, now_ms: int) -> bool:
        """Give up messages whose time is over; tell whether there were some, and may be more."""
        # Not all at once: the next who waits for the timer may be of another receiver.
        items = self.outbox.expire(now_ms, settle=False, enough=_AT_ONCE)
        if items:
            failures = [self._expired(item) for item in items]
            self._around.giving_up.give_up(failures)
            if any(failure.attempts for failure in failures):
                self.try_again()  # the pause was for one of them, not for those behind it
        return bool(items)

    def _expired(self, item: Item) -> Failure:
        tried = self._attempts.end(item)
        code, reason = UCode.DEADLINE_EXCEEDED, DeadLetterReason.EXPIRED
        text = f"its time was over before {self.receiver} had it"
        if item.type == UMessageType.REQUEST and self.trouble:
            # Whoever called may try again: it was not that nobody answered in time.
            code, reason = UCode.UNAVAILABLE, DeadLetterReason.UNREACHABLE
            text = f"{text}: {self.trouble}"
        return Failure(
            item.raw,
            code,
            reason,
            text,
            receiver=self.receiver,
            stored=Stored(self.outbox, item, Reason.EXPIRED),
            attempts=tried.made,
            first_failure_ms=tried.first_failure_ms,
        )

    # --- from outside ---------------------------------------------------------------------------

    def has_room(self, messages: int, size: int) -> bool:
        """Tell whether messages can be stored without another having to go."""
        limits = self._around.limits
        return (
            self.outbox.queued + messages <= limits.queue_messages
            and self.outbox.size + size <= limits.queue_bytes
        )

    def settle_down(self, timeout: float) -> bool:
        """Wait until no delivery is under way that began before; tell whether that is so."""
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._is_delivering, timeout)

    def drop(self, topic: UUri) -> int:
        """Settle what waits of the topics that match, as somebody asked; return how many."""
        count = 0
        for priority in range(CLASSES):
            at: int | None = 0
            while at is not None:
                items, at = self.outbox.look(priority, at)
                own = [item for item in items if topic.matches(topic_of_item(item))]
                if own:
                    count += self.outbox.settle(own, Reason.ADMIN)
        return count

    def try_again(self) -> None:
        """Forget all back-off."""
        with self._lock:
            self._held.clear()
            self._rests_until = 0.0
        self._around.wake(self)
