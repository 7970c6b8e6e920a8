"""How do messages get to their receivers, in order, whatever fails?"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.dispatch.dead_letters import Failure, Stored
from penstock.dispatch.outbox import Reason, in_order
from penstock.dispatch.routes import topic_of
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    InvalidMessage,
    UCode,
    UMessage,
    UMessageType,
    UStatus,
    UStatusError,
    UUri,
)
from penstock.protocols.uprotocol.transports import NOT_TRIED
from penstock.protocols.uprotocol.transports.interface import HandedOver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.outbox import Appended, Entry, Item, Order, Outbox, OutboxBooks, Part
    from penstock.dispatch.redelivery import Attempts, Verdict
    from penstock.dispatch.routes import Receiver, Routing
    from penstock.dispatch.scheduler import Scheduler
    from penstock.dispatch.settings import Limits
    from penstock.dispatch.switches import Switches
    from penstock.dispatch.ttl import ExpiryTimer
    from penstock.protocols.uprotocol import UAttributes
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["Kind", "Outlet", "Traffic"]

log = logging.getLogger(__name__)

#: Expired messages of one receiver handled before the next receiver.
_AT_ONCE: Final = 256
#: Sources of one receiver whose treatment is remembered, at most.
_MOST_KINDS: Final = 65536
_PUBLISH: Final = int(UMessageType.PUBLISH)


class Outlet:
    """The deliveries to one receiver. One thread delivers; others store, expire and stop."""

    def __init__(
        self,
        receiver: Receiver,
        leg: Leg,
        outbox: Outbox,
        order: Order,
        *,
        attempts: Attempts,
        traffic: Traffic,
        limits: Limits,
        longest_pause: float,
        ledger: Ledger,
        clock: Clock,
        scheduler: Scheduler,
        timer: ExpiryTimer,
    ) -> None:
        """Set up the deliveries to one receiver.

        :param order: the order of messages from before a restart
        :param longest_pause: seconds of pause after an internal error
        :param scheduler: woken when there is work
        :param timer: told when the first message expires
        """
        self.receiver = receiver
        self.outbox = outbox
        #: The counters of the outbox when this dispatcher was opened.
        self.before = outbox.books()
        self.order: Order = order
        self._leg = leg
        self._attempts = attempts
        self._traffic = traffic
        self._limits = limits
        self._longest_pause = longest_pause
        self._ledger = ledger
        self._clock = clock
        self._scheduler = scheduler
        self._timer = timer
        self._on_its_way: HandedOver[Item] = HandedOver(leg, clock)
        self._linger = Linger(outbox, limits)
        #: Until when messages are held back, by source or all of them (monotonic seconds).
        self._held: dict[int, float] = {}
        self._rests_until = 0.0
        #: When `deliver` last evaluated these.
        self._looked = 0.0
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._is_delivering = False
        #: Why the last delivery failed; empty after a success.
        self.trouble = ""
        #: Whether the receiver accepted the last message.
        self.took_last = False
        #: Held from the first to the last part of a `store`, and while the outbox is retired.
        self._storing = threading.RLock()
        #: Stored messages that the ledger has counted, with those from before.
        self._counted = self.before.stored

    # --- in -------------------------------------------------------------------------------------

    def store(self, parts: Sequence[Part], came_by: str = "") -> list[Failure]:
        """Store messages; return those rejected, and the queued ones evicted for them.

        :raises StorageError: the disk is full; some may be stored.
        """
        found: list[Appended] = []
        try:
            with self._storing:
                try:
                    for part in in_order(parts):
                        found += self._append(part)
                except BaseException:
                    stored = self.outbox.books().stored - self._counted
                    self._counted += stored
                    self._ledger.add(copies=stored, copies_stored=stored)
                    for appended in found:
                        self.outbox.give_back(appended.evicted)
                    raise
                stored = sum([appended.stored for appended in found])
                self._counted += stored
        finally:  # also for messages stored before an error
            if not self.outbox.is_closed:
                for part in parts:
                    self._tell_of_expiry(part.columns.times)
                self._scheduler.wake(self)
        evicted = [item for appended in found for item in appended.evicted]
        refused = [entry.raw for appended in found for entry in appended.refused]
        self._ledger.add(copies=stored, copies_stored=stored)
        self._release_callers(evicted)
        if any(appended.superseded for appended in found):
            # A message has the source of those that it supersedes.
            for part in parts:
                if part.latest is not None:
                    self._release_callers(part.columns.entries())
        return [*map(self._evicted, evicted), *self.refuse(refused, came_by)]

    def retire(self, remove: Callable[[OutboxBooks], None]) -> bool:
        """Close the outbox for good, unless messages are queued or being stored.

        :param remove: called with its counters before it is closed; if it raises, it stays open
        :returns: whether it was closed.
        """
        # Not between two parts of a `store`: its caller would store the first part again.
        if not self._storing.acquire(blocking=False):
            return False
        try:
            return self.outbox.close_if_empty(remove)
        finally:
            self._storing.release()

    def _append(self, part: Part) -> Iterator[Appended]:
        if part.latest is None:
            yield self.outbox.append(part.columns, settle=False)
            return
        key, most = part.latest
        for entry in part.columns.entries():
            yield self.outbox.append_latest(key, entry, most, settle=False)

    def refuse(self, raws: Sequence[bytes], came_by: str) -> list[Failure]:
        """Count rejected messages; return their failures."""
        if not raws:
            return []
        self._ledger.add(copies=len(raws), copies_refused=len(raws))
        code, reason = UCode.RESOURCE_EXHAUSTED, DeadLetterReason.QUEUE_FULL
        text = f"the queue to {self.receiver} is full"
        return [
            Failure(raw, code, reason, text, came_by=came_by, receiver=self.receiver)
            for raw in raws
        ]

    def _evicted(self, item: Item) -> Failure:
        return Failure(
            item.raw,
            UCode.RESOURCE_EXHAUSTED,
            DeadLetterReason.QUEUE_FULL,
            f"it made room for one of a higher class in the queue to {self.receiver}",
            receiver=self.receiver,
            stored=Stored(self.outbox, item, Reason.QUEUE_FULL),
        )

    def _tell_of_expiry(self, times: Sequence[int]) -> None:
        soonest = min(times, default=0) or min((ms for ms in times if ms), default=0)
        if soonest:
            self._timer.sooner(self, soonest)

    # --- out ------------------------------------------------------------------------------------

    def deliver(self) -> list[Failure] | None:
        """Deliver one batch; return the failures, or None if nothing was due."""
        if self.outbox.is_closed:
            return None
        now = self._clock.monotonic()
        if self._on_its_way:
            self._look_after()
        expired = self.expire(self._clock.now_ns() // 1_000_000)
        if expired:
            return expired
        with self._lock:
            self._looked = now
            if self._rests_until > now or self.outbox.is_closed or self._on_its_way.is_full:
                return None
            if self._linger.holds(now):
                return None
            blocked = self._blocked(now)
            limits = self._limits
            items = self.outbox.take(limits.batch, limits.batch_bytes, self.order, blocked)
            if not items:
                return None
            chosen = self._choose(items)
            self._is_delivering = bool(chosen)
        try:
            return self._deliver(chosen) if chosen else []
        except BaseException:
            self._give_back(items)  # only unsettled ones are requeued
            self.pause()
            raise
        finally:
            with self._lock:
                self._is_delivering = False
                self._quiet.notify_all()

    def pause(self) -> None:
        """Pause after an internal error."""
        with self._lock:
            self._rests_until = self._clock.monotonic() + self._longest_pause

    def _blocked(self, now: float) -> set[int]:
        if self._held:
            self._held = {source: due for source, due in self._held.items() if due > now}
        self._traffic.notice_changes()
        return {*self._held, *self._traffic.stopped}

    def _choose(self, items: list[Item]) -> list[Item]:
        """Return the messages to deliver now; settle or requeue the others."""
        traffic = self._traffic
        if traffic.is_plain(items):
            return items
        chosen: list[Item] = []
        gone: list[Item] = []
        back: list[Item] = []
        sampled: set[int] = set()
        for item in items:
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
        return chosen

    def _look_after(self) -> None:
        """Settle handed-over messages that arrived, and requeue those that may be lost."""
        arrived, again = self._on_its_way.take()
        if arrived:
            self._settle(arrived)
        if again:
            self._give_back(again)

    def _deliver(self, items: list[Item]) -> list[Failure]:
        links_lost = self._leg.links_lost
        statuses = self._hand_over(items)
        if len(statuses) == len(items) and statuses.count(None) == len(items):
            self._acknowledge(items, links_lost)
            return []
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
            self.trouble, self.took_last = verdict.text, False
            if verdict.due is None:
                failures.append(self._given_up(item, verdict))
            else:
                self._hold(item, verdict.due)
                back.append(item)
        self._give_back(back)
        return failures

    def _hand_over(self, items: Sequence[Item]) -> Sequence[UStatus | None]:
        messages = [parcel(item.raw) for item in items]
        try:
            return self._leg.deliver(self.receiver.address, messages)
        except UStatusError as error:
            return [error.status]
        except Exception as error:
            # any error of a leg means that nothing was delivered.
            log.warning("%s: %s", self.receiver, error, exc_info=True)
            return [UStatus(UCode.INTERNAL, f"{type(error).__name__}: {error}")]

    @property
    def is_unsure(self) -> bool:
        """Whether handed-over messages are not settled yet: a restart would redeliver them."""
        return len(self._on_its_way) > 0

    @property
    def failed_attempts(self) -> int:
        """Number of failed attempts of the messages still queued."""
        return self._attempts.total

    def _acknowledge(self, items: list[Item], links_lost: int) -> None:
        self.trouble, self.took_last = "", True
        if self._traffic.is_sampled:
            now = self._clock.monotonic()
            with self._lock:
                for item in items:
                    period = self._traffic.period(item)
                    if period:
                        self._held[item.source] = now + period
        if self._leg.settle_after:
            self._on_its_way.add(items, links_lost, sum(len(item.raw) for item in items))
        else:
            self._settle(items)

    def _settle(self, items: Sequence[Item]) -> None:
        self.outbox.settle(items, Reason.ACKED)
        if self._attempts.tried:
            self._attempts.forget(items)

    def _hold(self, item: Item, due: float) -> None:
        """Hold back the messages after a failed one, as far as their order requires."""
        # Of an authority, a single entity may be unreachable: hold back its source only.
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
            self._tell_of_expiry([item.expires_at_ms for item in items])

    def _release_callers(self, gone: Sequence[Item] | Sequence[Entry]) -> None:
        """Unblock callers whose request to a stopped method has left the queue.

        Only requests need this: one caller may call several methods; any other source sends on one
        topic.
        """
        callers = {item.source for item in gone if item.type == UMessageType.REQUEST}
        if not callers:
            return  # without the lock: a delivery holds it while it chooses its messages
        with self._lock:
            if callers.isdisjoint(self._traffic.stopped):
                return
            self._traffic.stopped -= callers
        self._scheduler.wake(self)

    # --- time -----------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return when the next delivery is due (monotonic seconds), or None."""
        with self._lock:
            if self.outbox.is_closed:
                return None
            arriving, waiting = self._on_its_way.next_due, self._next_attempt()
        return min((due for due in (arriving, waiting) if due is not None), default=None)

    def _next_attempt(self) -> float | None:
        if self.outbox.waiting == 0:
            return None
        if self._linger.until is not None and self._rests_until <= self._looked:
            return self._linger.until
        # Holds that were in force at the last `deliver`, including any that ended since.
        if self._rests_until > self._looked:
            return self._rests_until
        return min((due for due in self._held.values() if due > self._looked), default=None)

    def expire(self, now_ms: int) -> list[Failure]:
        """Take some expired messages; they are settled when their failures are handled."""
        # Not all at once, so that other receivers need not wait for the timer.
        due = self.outbox.next_expiry_ms()
        if due is None or due > now_ms:
            return []
        items = self.outbox.expire(now_ms, settle=False, enough=_AT_ONCE)
        self._release_callers(items)
        failures = [self._expired(item) for item in items]
        if any(failure.attempts for failure in failures):
            self.try_again()  # the back-off was for an expired message
        return failures

    def _expired(self, item: Item) -> Failure:
        tried = self._attempts.end(item)
        code, reason = UCode.DEADLINE_EXCEEDED, DeadLetterReason.EXPIRED
        text = f"its time was over before {self.receiver} had it"
        if item.type == UMessageType.REQUEST and self.trouble:
            # UNAVAILABLE tells the caller to retry: the request was not delivered.
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
        """Tell whether messages can be stored without an eviction."""
        limits = self._limits
        return (
            self.outbox.queued + messages <= limits.queue_messages
            and self.outbox.size + size <= limits.queue_bytes
        )

    def holds_ever(self, size: int) -> bool:
        """Tell whether an empty queue has room for a message of `size` bytes."""
        return size <= self._limits.queue_bytes

    def settle_down(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the current delivery; tell whether it ended."""
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._is_delivering, timeout)

    def drop(self, topic: UUri) -> int:
        """Drop the queued messages of matching topics, as ADMIN; return how many."""
        count = 0
        at: int | None = 0
        while at is not None:
            items, at = self.outbox.look(at)
            own = [item for item in items if topic.matches(_topic_of(item))]
            if own:
                count += self.outbox.settle(own, Reason.ADMIN)
                self._release_callers(own)
        self._scheduler.wake(self)  # letters may wait for the room that came
        return count

    def try_again(self) -> None:
        """Clear all back-off."""
        with self._lock:
            self._held.clear()
            self._rests_until = 0.0
        self._scheduler.wake(self)


class Kind(NamedTuple):
    """How the messages of one source and type are treated."""

    is_gone: bool = False
    is_stopped: bool = False
    #: Sample period (seconds).
    period: float = 0.0


_PLAIN: Final = Kind()


class Traffic:
    """A cache of how the sources of a receiver's messages are treated."""

    def __init__(self, receiver: Receiver, routing: Routing, switches: Switches) -> None:
        self._receiver = receiver
        self._routing = routing
        self._switches = switches
        self._kinds: dict[int, Kind] = {}
        self._generation = -1
        self._has_stops = False
        #: Sources with a waiting message of a stopped topic.
        self.stopped: set[int] = set()
        #: Whether any source is sampled.
        self.is_sampled = False

    def notice_changes(self) -> None:
        """Clear the cache after a change of subscriptions or stops."""
        generation = self._routing.subscriptions.generation + self._switches.generation
        if generation != self._generation or len(self._kinds) > _MOST_KINDS:
            self._generation = generation
            self._has_stops = bool(self._switches)
            self._kinds = {}
            self.stopped = set()
            self.is_sampled = False

    def is_plain(self, items: Sequence[Item]) -> bool:
        """Tell whether all of these are known to need no special treatment."""
        kinds = self._kinds
        return not self._has_stops and all(
            kinds.get(kind) is _PLAIN for kind in {item.source ^ item.type for item in items}
        )

    def period(self, item: Item) -> float:
        """Return the cached sample period of a message's source (seconds)."""
        return self._kinds.get(item.source ^ item.type, _PLAIN).period

    def of(self, item: Item) -> Kind:
        """Return how a message, and others of its source and type, are treated."""
        kind = item.source ^ item.type
        known = self._kinds.get(kind)
        if known is not None:
            return known
        try:
            attributes = UMessage.attributes_of(item.raw)
        except InvalidMessage:
            return _PLAIN  # its delivery will fail
        topic = topic_of(attributes) or UUri()
        known = _PLAIN
        if item.type == _PUBLISH:
            period = self._routing.period_of(self._receiver, topic, attributes.sink)
            known = Kind(is_gone=True) if period is None else Kind(period=period / 1000)
            self.is_sampled = self.is_sampled or known.period > 0
        if item.type != UMessageType.RESPONSE and self._switches.find(
            topic, self._receiver.address
        ):
            known = known._replace(is_stopped=True)
        if known == _PLAIN:
            known = _PLAIN
        if not (self._has_stops and item.type == UMessageType.REQUEST):
            self._kinds[kind] = known  # requests of one source may be for several methods
        return known


def _topic_of(item: Item) -> UUri:
    """Return the topic or the method of a stored message."""
    try:
        return topic_of(UMessage.attributes_of(item.raw)) or UUri()
    except InvalidMessage:
        return UUri()


class Linger:
    """Delays deliveries to one receiver, so that batches fill."""

    def __init__(self, outbox: Outbox, limits: Limits) -> None:
        self._outbox = outbox
        self._limits = limits
        #: End of the delay (monotonic seconds); None: no delay.
        self.until: float | None = None

    def holds(self, now: float) -> bool:
        """Tell whether the next delivery is delayed."""
        if not self._limits.linger:
            return False
        limits, waiting = self._limits, self._outbox.waiting
        is_full = waiting >= limits.batch or self._outbox.size >= limits.batch_bytes
        if self.until is None:
            self.until = now + limits.linger
        if not waiting or is_full or self.until <= now:
            self.until = None
        return self.until is not None


class Parcel(UMessage):
    """A message that is decoded on first access to its attributes or payload."""

    #: A slot: setting it is cheaper than an entry in the instance dictionary.
    __slots__ = ("_raw",)
    _raw: bytes

    @property
    def _whole(self) -> UMessage:
        whole: UMessage | None = self.__dict__.get("whole")
        if whole is None:
            whole = self.__dict__["whole"] = UMessage.from_bytes(self._raw)
        return whole

    @property
    def attributes(self) -> UAttributes:
        return self._whole.attributes

    @property
    def payload(self) -> bytes | None:
        return self._whole.payload

    def to_bytes(self) -> bytes:
        return self._raw

    def replace(self, **changes: Any) -> UMessage:
        return self._whole.replace(**changes)

    def with_attributes(self, **changes: Any) -> UMessage:
        return self._whole.with_attributes(**changes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Parcel):
            other = other._whole
        return self._whole == other

    def __hash__(self) -> int:
        return hash(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)


_blank = object.__new__
_set_raw = Parcel.__dict__["_raw"].__set__


def parcel(raw: bytes) -> Parcel:
    """Wrap the bytes of a valid message."""
    made: Parcel = _blank(Parcel)
    _set_raw(made, raw)
    return made
