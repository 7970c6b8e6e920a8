"""How do the bytes that a leg hands over become messages that are stored for their receivers?

A batch is split into groups of messages with equal attributes except the id. A decision about one
message applies to its group. When `take` returns, each message is stored for every receiver or is
a dead letter, and its leg may acknowledge it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import starmap
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import Closed
from penstock.dispatch._headers import scan
from penstock.dispatch.dead_letters import Failure
from penstock.dispatch.outbox import Columns, Part
from penstock.dispatch.plan import Refusal
from penstock.dispatch.settings import Rate
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    InvalidMessage,
    UCode,
    UMessage,
    UMessageType,
)
from penstock.protocols.uprotocol.message import ID_SIZE, tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.dead_letters import Quarantine
    from penstock.dispatch.delivery import Outlet
    from penstock.dispatch.failures import FailureHandler
    from penstock.dispatch.outlets import Outlets
    from penstock.dispatch.plan import Copy, Deadlines, Plan, Planner
    from penstock.dispatch.settings import Limits
    from penstock.protocols.uprotocol import UUri
    from penstock.protocols.uprotocol.transports import Unreadable

__all__ = ["DuplicateWindow", "Group", "Intake", "Rates", "groups_of"]

log = logging.getLogger(__name__)

_PUBLISH: Final = int(UMessageType.PUBLISH)
#: Undecodable bytes.
_NOTHING: Final = b"\xff"
#: Entities of a leg whose rate is tracked, at most. A forgotten one starts with a full bucket.
_MOST_SOURCES: Final = 65_536

#: A leg's number is below this one.
LEGS: Final = 1024

_EXPIRED: Final = Refusal(
    "expired_on_arrival",
    UCode.DEADLINE_EXCEEDED,
    DeadLetterReason.EXPIRED,
    "its time to live was over when it came",
)
_TOO_FAST: Final = Refusal(
    "rate_limited", UCode.RESOURCE_EXHAUSTED, DeadLetterReason.QUEUE_FULL, ""
)


class Group(NamedTuple):
    """Messages of a batch with equal attributes except the id."""

    #: Their indexes in the batch.
    places: Sequence[int]
    raws: Sequence[bytes]
    #: The ids in the form of `plan.id_key`, and their times (milliseconds since 1970 UTC).
    ids: Sequence[bytes]
    made_ms: Sequence[int]
    #: The offset of the attributes in each; 0 if the protobuf library must decode the message.
    attributes_begin: int
    attributes_end: int
    #: The attributes after the id.
    attributes: bytes
    has_payload: bool

    @property
    def is_found(self) -> bool:
        """Whether the attributes were found in their usual place."""
        return self.attributes_begin > 0

    def some(self, which: Sequence[int]) -> Group:
        """Return a group of some of its messages, given by their index in the group."""
        return self._replace(
            places=[self.places[at] for at in which],
            raws=[self.raws[at] for at in which],
            ids=[self.ids[at] for at in which],
            made_ms=[self.made_ms[at] for at in which],
        )

    def with_attributes(self, raw: bytes, attributes: bytes) -> bytes:
        """Return a message of the group with other attributes after the id."""
        id_end = self.attributes_begin + ID_SIZE
        tag = tagged(1, ID_SIZE + len(attributes))
        id = raw[self.attributes_begin : id_end]
        return b"".join((tag, id, attributes, raw[self.attributes_end :]))


def groups_of(messages: Sequence[bytes], largest: int) -> list[Group]:
    """Return the groups of a batch, in the order of their first messages.

    Messages of more than `largest` bytes are not parsed.
    """
    return list(starmap(Group, scan(messages, largest)))


@dataclass(slots=True)
class Batch:
    """Messages that arrived together, and what to do with them."""

    leg: str
    #: Messages to store for each receiver, in order of arrival.
    parts: dict[Outlet, list[Part]] = field(default_factory=dict)
    #: Messages that become dead letters, with their index in the batch.
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    #: Undecodable messages.
    strays: list[bytes] = field(default_factory=list)
    #: Keys in the duplicate window, to be removed if the batch fails.
    keys: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    #: The last publish of each topic, and its index in the batch.
    published: dict[UUri, tuple[int, bytes]] = field(default_factory=dict)

    def count(self, name: str, messages: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + messages

    def refuse(self, place: int, raw: bytes, refusal: Refusal) -> None:
        """Count a message as rejected, and make it a dead letter."""
        self.count(refusal.counter)
        self.fail(place, raw, refusal)

    def fail(self, place: int, raw: bytes, refusal: Refusal) -> None:
        """Make a message, or a copy of it, a dead letter."""
        failure = Failure(
            raw,
            refusal.code,
            refusal.reason,
            refusal.text,
            came_by=self.leg,
            receiver=refusal.receiver,
            header_only=refusal.counter == "too_large",
        )
        self.failures.append((place, failure))


class Intake:
    """Accepts the messages of legs. Thread-safe."""

    def __init__(
        self,
        legs: Sequence[str],
        planner: Planner,
        window: DuplicateWindow,
        deadlines: Deadlines,
        limits: Limits,
        outlets: Outlets,
        failures: FailureHandler,
        quarantine: Quarantine,
        ledger: Ledger,
        clock: Clock,
        *,
        on_publish: Callable[[Mapping[UUri, bytes]], None] | None = None,
    ) -> None:
        """Set up the intake.

        :param legs: the names of all legs
        :param window: the window of duplicates
        :param deadlines: told of requests
        :param on_publish: called with the last publish of each topic in a stored batch
        """
        self._numbers = {name: number for number, name in enumerate(legs)}
        self._planner = planner
        self._window = window
        self._rates = Rates(limits.leg_rates, clock)
        self._deadlines = deadlines
        self._largest = limits.message
        self._outlets = outlets
        self._failures = failures
        self._quarantine = quarantine
        self._ledger = ledger
        self._clock = clock
        self._on_publish = on_publish
        self._is_closed = False

    def take(self, leg: str, messages: Sequence[bytes | UMessage]) -> None:
        """Accept messages; return when each is stored for all receivers, or is a dead letter.

        :raises StorageError: the disk is full: the leg must not acknowledge them.
        :raises Closed: the dispatcher was stopped.
        """
        self._check_open()
        raws = [it if it.__class__ is bytes else _bytes_of(it) for it in messages]
        now_ms = self._clock.now_ns() // 1_000_000
        batch = Batch(leg)
        with self._window.lock:
            self._planner.notice_changes()
            self._window.make_room(len(raws))
            try:
                planned = self._plan(batch, groups_of(raws, self._largest))
                for plan, group in self._new_ones(batch, planned):
                    self._copy(batch, plan, group, now_ms)
            except BaseException:
                self._window.forget(batch.keys)
                raise
            self._window.begin(batch.keys)
        self._finish(batch, len(raws), now_ms)

    def take_unreadable(self, leg: str, what: Sequence[Unreadable]) -> None:
        """Turn invalid messages into dead letters; keep the bytes of undecodable ones.

        :raises StorageError: the disk is full: the leg must not acknowledge it.
        :raises Closed: the dispatcher was stopped.
        """
        self._check_open()
        batch = Batch(leg)
        for place, came in enumerate(what):
            raw = _NOTHING if came.message is None else _bytes_of(came.message)
            if raw == _NOTHING:
                batch.count("undecodable")
                batch.strays.append(came.raw)
                continue
            counter, reason = "invalid", DeadLetterReason.INVALID
            if came.code == UCode.UNAUTHENTICATED:
                counter, reason = "unauthenticated", DeadLetterReason.UNAUTHENTICATED
            batch.refuse(place, raw, Refusal(counter, came.code, reason, came.reason))
        self._finish(batch, len(what), self._clock.now_ns() // 1_000_000)

    def close(self) -> None:
        """Take no more messages."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the dispatcher takes no more messages")

    # --- what becomes of a group ----------------------------------------------------------------

    def _plan(self, batch: Batch, groups: Sequence[Group]) -> list[tuple[Plan, Group]]:
        """Return the plan of each group, except rejected ones."""
        planned: list[tuple[Plan, Group]] = []
        waiting = list(reversed(groups))
        while waiting:
            group = waiting.pop()
            plan = self._planner.plan(batch.leg, group, group.raws[0])
            if len(group.raws) > 1 and not (plan is not None and plan.is_lasting):
                # The plan applies to the first message only; plan the others one by one.
                waiting += (group.some([at]) for at in range(len(group.raws) - 1, 0, -1))
                group = group.some([0])
            if plan is None:
                batch.count("undecodable")
                batch.strays += group.raws
            elif plan.refusal is not None:
                for place, raw in zip(group.places, group.raws, strict=True):
                    batch.refuse(place, raw, plan.refusal)
            elif group.is_found:
                planned.append((plan, group))
            else:
                planned.append((plan, group._replace(ids=[plan.id], made_ms=[plan.made_ms])))
        return planned

    def _new_ones(
        self, batch: Batch, planned: list[tuple[Plan, Group]]
    ) -> list[tuple[Plan, Group]]:
        """Return the messages that are neither duplicates nor over the rate limit."""
        window, number = self._window, self._numbers[batch.leg]
        keys = [id + plan.source for plan, group in planned for id in group.ids]
        contents = [hash(raw) ^ number or 1 for _, group in planned for raw in group.raws]
        if not self._rates.bounds(batch.leg) and window.add_all(keys, contents):
            batch.keys = keys
            return planned
        # A duplicate is acknowledged when the first one is stored, not while another thread tries.
        window.await_stored(keys)
        # In order of arrival: the first of several duplicates is the new one.
        places = [place for _, group in planned for place in group.places]
        owners = [(plan, raw) for plan, group in planned for raw in group.raws]
        new: set[int] = set()
        for at in sorted(range(len(places)), key=places.__getitem__):
            key, content, (plan, raw) = keys[at], contents[at], owners[at]
            known = window.get(key)
            if known is not None:
                batch.count(_seen(known, content))
            elif (why := self._rates.refuses(batch.leg, plan.sender)) is not None:
                batch.refuse(places[at], raw, _TOO_FAST._replace(text=why))
            else:
                window.add(key, content)
                batch.keys.append(key)
                new.add(places[at])
        return [
            (plan, group.some(which))
            for plan, group in planned
            if (which := [at for at, place in enumerate(group.places) if place in new])
        ]

    def _copy(self, batch: Batch, plan: Plan, group: Group, now_ms: int) -> None:
        """Create the copies of a group's messages, except expired ones."""
        group, times = self._alive(batch, plan, group, now_ms)
        count = len(times)
        if not count:
            return
        if plan.type == _PUBLISH:
            last = group.places[-1], group.raws[-1]
            batch.published[plan.topic] = max(last, batch.published.get(plan.topic, last))
        for copy in plan.copies:
            self._add_copy(batch, plan, group, copy, times)
        for refusal in plan.refused_copies:
            for place, raw in zip(group.places, group.raws, strict=True):
                batch.fail(place, raw, refusal)
        if plan.copies or plan.refused_copies:
            batch.count("routed", count)
        else:
            batch.count("loops" if plan.is_delivered_already else "no_subscriber", count)

    def _alive(
        self, batch: Batch, plan: Plan, group: Group, now_ms: int
    ) -> tuple[Group, Sequence[int]]:
        """Return the messages not expired, and their expiry times; reject the others."""
        life = plan.lifetime
        if not life.ttl:  # the time in the id does not matter
            return group, (life.expires_ms(now_ms, now_ms),) * len(group.raws)
        times = [life.expires_ms(made_ms, now_ms) for made_ms in group.made_ms]
        if min(times) <= now_ms:
            for place, raw, ms in zip(group.places, group.raws, times, strict=True):
                if ms <= now_ms:
                    batch.refuse(place, raw, _EXPIRED)
            group = group.some([at for at, ms in enumerate(times) if ms > now_ms])
            times = [ms for ms in times if ms > now_ms]
        if life.is_request:
            for id, made_ms in zip(group.ids, group.made_ms, strict=True):
                self._deadlines.add(id, life.deadline_ms(made_ms, now_ms))
        return group, times

    def _add_copy(
        self, batch: Batch, plan: Plan, group: Group, copy: Copy, times: Sequence[int]
    ) -> None:
        """Add the copies for one receiver; those too large for its leg become dead letters."""
        places, raws = group.places, group.raws
        if copy.attributes is not None:
            raws = [copy.of(group, raw) for raw in raws]
        if copy.limit is not None and max(map(len, raws)) > copy.limit:
            for place, raw in zip(places, raws, strict=True):
                if len(raw) > copy.limit:
                    batch.fail(place, raw, _too_large_for(copy, len(raw)))
            fitting = [at for at, raw in enumerate(raws) if len(raw) <= copy.limit]
            places, raws = [places[at] for at in fitting], [raws[at] for at in fitting]
            times = [times[at] for at in fitting]
        count = len(raws)
        if not count:
            return
        columns = Columns(
            (plan.priority,) * count,
            (0,) * count,
            times,
            (plan.order,) * count,
            (plan.type,) * count,
            raws,
        )
        batch.parts.setdefault(copy.outlet, []).append(Part(places, columns, copy.latest))

    # --- what becomes of a batch ----------------------------------------------------------------

    def _finish(self, batch: Batch, count: int, now_ms: int) -> None:
        """Store the copies of a batch, and handle its failures."""
        failures = [failure for _, failure in sorted(batch.failures, key=itemgetter(0))]
        refused = sum([failure.receiver is not None for failure in failures])
        self._ledger.add(copies=refused, copies_refused=refused)
        done: list[Failure] = []
        try:
            for outlet, parts in batch.parts.items():
                failures += self._outlets.store(outlet, parts, batch.leg)
            if failures:
                self._failures.handle(failures, done)
        except BaseException:
            with self._window.lock:
                self._window.forget(batch.keys)
            self._undo(failures[len(done) :], done[: len(failures)])
            raise
        finally:
            with self._window.lock:
                self._window.end(batch.keys)
        if batch.strays:
            kept = self._quarantine.keep(batch.leg, batch.strays, now_ms)
            self._ledger.add(quarantined=kept)
        self._ledger.add(received=count, **batch.counts)
        if self._on_publish is not None and batch.published:
            try:
                self._on_publish({topic: raw for topic, (_, raw) in batch.published.items()})
            except Exception:  # the messages are stored in any case
                log.exception("somebody could not hear of publishes")

    def _undo(self, undone: Sequence[Failure], done: Sequence[Failure]) -> None:
        """Roll back a failed batch; copies already stored will be there twice after redelivery."""
        for failure in undone:
            if failure.stored is not None:
                failure.stored.outbox.give_back([failure.stored.item])
        # Rejected copies are counted already; those without a letter will be counted again.
        refused = sum(each.stored is None and each.receiver is not None for each in undone)
        in_vain = sum(each.stored is None and each.receiver is None for each in done)
        self._ledger.add(
            ingest_failures=1,
            copies=-refused,
            copies_refused=-refused,
            refused_in_vain=in_vain,
        )


def _too_large_for(copy: Copy, size: int) -> Refusal:
    receiver, limit = copy.outlet.receiver, copy.limit
    text = f"{size:,} bytes; the leg {receiver.leg} carries {limit:,}"
    code, reason = UCode.RESOURCE_EXHAUSTED, DeadLetterReason.UNSUPPORTED
    return Refusal("", code, reason, text, receiver)


def _bytes_of(message: Any) -> bytes:
    if not isinstance(message, UMessage):
        return bytes(message)
    try:
        return message.to_bytes()
    except InvalidMessage:
        return _NOTHING  # a value does not fit its field: treat it as undecodable


def _seen(known: int, content: int) -> str:
    """Return the counter of a repeated message."""
    difference = known ^ content
    if not difference:
        return "duplicates"
    return "loops" if 0 < difference < LEGS else "conflicts"


class _Bucket:
    """A token bucket."""

    __slots__ = ("left", "looked")

    def __init__(self, rate: float, now: float) -> None:
        self.left = max(rate, 1.0)
        self.looked = now

    def fill(self, rate: float, now: float) -> None:
        """Add the tokens of the time since the last call."""
        # Ignore a clock that goes back.
        self.left = min(self.left + max(now - self.looked, 0.0) * rate, max(rate, 1.0))
        self.looked = now


class Rates:
    """Rate limits of all legs. The caller holds a lock."""

    def __init__(self, rates: Mapping[str, Rate], clock: Clock) -> None:
        self._rates = {name: rate for name, rate in rates.items() if rate != Rate()}
        self._clock = clock
        self._legs: dict[str, _Bucket] = {}
        self._sources: dict[str, OrderedDict[int, _Bucket]] = {}

    def bounds(self, leg: str) -> bool:
        """Tell whether a leg has a rate limit."""
        return leg in self._rates

    def refuses(self, leg: str, source: int) -> str | None:
        """Count a message; return why it exceeds a rate limit, or None."""
        if leg not in self._rates:
            return None
        rate, now = self._rates[leg], self._clock.monotonic()
        own = None if rate.source is None else self._of_source(leg, source, rate.source, now)
        if own is not None and own.left < 1:
            return f"its entity sends more than {rate.source:g} messages a second"
        if rate.leg is not None:
            every = self._legs.get(leg)
            if every is None:
                every = self._legs[leg] = _Bucket(rate.leg, now)
            every.fill(rate.leg, now)
            if every.left < 1:
                return f"more than {rate.leg:g} messages a second come by the leg {leg}"
            every.left -= 1
        if own is not None:
            own.left -= 1
        return None

    def _of_source(self, leg: str, source: int, rate: float, now: float) -> _Bucket:
        buckets = self._sources.setdefault(leg, OrderedDict())
        bucket = buckets.get(source)
        if bucket is None:
            if len(buckets) >= _MOST_SOURCES:
                buckets.popitem(last=False)
            bucket = buckets[source] = _Bucket(rate, now)
        else:
            buckets.move_to_end(source)
        bucket.fill(rate, now)
        return bucket


class DuplicateWindow:
    """The keys of the latest messages, to find duplicates and loops.

    It holds at least `size` keys, and about twice as many at most. The caller holds `lock` for a
    whole batch.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self._size = size
        #: By id and source: a hash of the contents, XORed with the number of the leg.
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        #: The keys of the batches that are being stored.
        self._coming: list[Sequence[bytes]] = []
        self._ended = threading.Condition(self.lock)

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def make_room(self, count: int) -> None:
        """Remove the oldest keys if `count` more would exceed the size."""
        if len(self._new) + count > self._size and self._new:
            self._old, self._new = self._new, {}

    def get(self, key: bytes) -> int | None:
        """Return the value of a key, or None if it is new."""
        return self._new.get(key) or self._old.get(key)

    def add(self, key: bytes, content: int) -> None:
        """Add a new key."""
        if self._size:
            self._new[key] = content

    def add_all(self, keys: Sequence[bytes], contents: Iterable[int]) -> bool:
        """Add keys if all are new; tell whether they are."""
        if not self._size:
            return True
        is_new = self._new.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)
        if not is_new or len(set(keys)) < len(keys):
            return False
        self._new.update(zip(keys, contents, strict=True))
        return True

    def is_new(self, key: bytes) -> bool:
        """Add a key; tell whether it is new. Takes `lock` itself."""
        with self.lock:
            if key in self._new or key in self._old:
                return False
            self.make_room(1)
            self._new[key] = 1
            return True

    def begin(self, keys: Sequence[bytes]) -> None:
        """Note that a batch with these new keys is being stored, until `end`."""
        self._coming.append(keys)

    def end(self, keys: Sequence[bytes]) -> None:
        """Note that a batch is stored, or has failed and its keys are removed."""
        self._coming = [each for each in self._coming if each is not keys]
        self._ended.notify_all()

    def await_stored(self, keys: Iterable[bytes]) -> None:
        """Wait, without the lock, until no batch with one of these keys is being stored."""
        wanted = set(keys)
        while not all(map(wanted.isdisjoint, self._coming)):
            self._ended.wait()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove the keys of a failed batch."""
        for key in keys:
            if self._new.pop(key, None) is None:
                self._old.pop(key, None)
