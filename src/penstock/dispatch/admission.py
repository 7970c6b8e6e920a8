"""Which messages are taken in, and for whom? (spec uprotocol 10).

The messages of a topic differ in their id and their payload only. What is decided about one is
therefore remembered by the bytes of its attributes behind the id, and holds for all that have the
same, until the subscriptions or the switches change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.dispatch.deadlines import Deadlines, id_key, too_late_ms
from penstock.dispatch.duplicates import LEGS
from penstock.dispatch.giving_up import Failure
from penstock.dispatch.headers import ID_SIZE, places, with_attributes
from penstock.dispatch.outbox import Columns, Entry
from penstock.dispatch.plans import FOR_EVER, Refusal
from penstock.dispatch.runs import LEAST, expiries_of, is_uniform, keys_of
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    InvalidMessage,
    UCode,
    UMessage,
    UMessageType,
)
from penstock.protocols.uprotocol.transports import Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.dispatch.delivering import Outlet
    from penstock.dispatch.duplicates import Window
    from penstock.dispatch.plans import Copy, Plan, Planner
    from penstock.dispatch.rates import Rates
    from penstock.dispatch.settings import Limits
    from penstock.protocols.uprotocol import UUri

__all__ = ["Admission", "Admitted", "Intake"]

_PLANS: Final = 8192
_PUBLISH: Final = int(UMessageType.PUBLISH)
_REQUEST: Final = int(UMessageType.REQUEST)
#: The beginning of 2020: a clock that shows less is not set.
_CLOCK_IS_SET_MS: Final = 1_577_836_800_000
#: Bytes that decode to nothing.
_NOTHING: Final = b"\xff"


@dataclass(slots=True)
class Intake:
    """What is remembered of the messages of a leg."""

    leg: str
    number: int
    generation: int = -1
    #: With a payload and without.
    plans: tuple[dict[bytes, Plan], dict[bytes, Plan]] = field(default_factory=lambda: ({}, {}))


@dataclass(slots=True)
class Admitted:
    """What is to be done with a batch."""

    #: What is stored for each receiver, in the order of arrival.
    entries: dict[Outlet, list[Entry]] = field(default_factory=dict)
    #: The same where a whole batch is alike.
    columns: dict[Outlet, Columns] = field(default_factory=dict)
    #: Which of these take the place of others, by their index: the key, and if how many wait.
    latest: dict[Outlet, dict[int, tuple[bytes, int]]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    #: What could not be decoded.
    strays: list[bytes] = field(default_factory=list)
    #: Of the window of duplicates, in case that nothing comes of it.
    keys: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    #: The last publish of each topic.
    published: dict[UUri, bytes] = field(default_factory=dict)

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


class Admission:
    """Decides about messages that come."""

    def __init__(
        self,
        planner: Planner,
        window: Window,
        limits: Limits,
        rates: Rates | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._planner = planner
        self._deadlines = deadlines or Deadlines()
        self._rates = rates
        self._window = window
        self._limits = limits
        self._skew_ms = int(limits.clock_skew * 1000)

    def admit(self, intake: Intake, messages: Sequence[Any], now_ms: int) -> Admitted:
        """Decide about a batch. It is remembered; `forget` undoes that."""
        generation = self._planner.generation
        if intake.generation != generation or max(map(len, intake.plans)) > _PLANS:
            intake.plans = ({}, {})
            intake.generation = generation
        found = Admitted()
        with self._window.lock:
            try:
                first = self._shape_of_run(intake, messages)
                if first is None or not self._admit_run(intake, messages, now_ms, found, first):
                    self._admit(intake, messages, now_ms, found, first)
            except BaseException:
                self._window.forget(found.keys)
                raise
        return found

    def forget(self, admitted: Admitted) -> None:
        """Let the messages of a batch be new again."""
        with self._window.lock:
            self._window.forget(admitted.keys)

    def _shape_of_run(self, intake: Intake, messages: Sequence[Any]) -> _Shape | None:
        """Return what the messages of a batch are that look alike; None: they do not."""
        count = len(messages)
        if count < LEAST or not is_uniform(messages) or len(messages[0]) > self._limits.message:
            return None
        if self._rates is not None and self._rates.bounds(intake.leg):
            return None
        return self._shape(intake, messages[0], len(messages[0]))

    def _admit_run(
        self,
        intake: Intake,
        messages: Sequence[Any],
        now_ms: int,
        found: Admitted,
        shape: _Shape,
    ) -> bool:
        """Decide about a batch of messages that are alike and new, at once; tell whether it is one.

        The same as below, at a third of its time.
        """
        count, plan = len(messages), shape.plan
        if plan is None or not (shape.begin and shape.is_lasting and plan.is_run):
            return False
        keys = keys_of(messages, shape.begin, shape.head, shape.rest, plan.source_bytes)
        if keys is None:
            return False
        copy = plan.copies[0]
        ends = _ends(now_ms, copy.max_age_ms)
        times: Sequence[int] = (ends,) * count
        if plan.ttl:
            times = expiries_of(keys, plan.ttl, now_ms, self._skew_ms, ends)
            if min(times) <= now_ms:
                return False
        window = self._window
        if window.size > 0:
            window.make_room(count)
            is_new = window.new.keys().isdisjoint(keys) and window.old.keys().isdisjoint(keys)
            if not is_new or len(set(keys)) != count:
                return False
            hashes = map(hash, messages)
            leg = intake.number
            window.new.update(zip(keys, (h ^ leg for h in hashes) if leg else hashes, strict=True))
            found.keys = keys
        if plan.type == _PUBLISH:
            found.published[plan.topic] = messages[-1]
        found.columns[copy.outlet] = Columns(
            (plan.priority,) * count,
            (0,) * count,
            times,
            (plan.order,) * count,
            (plan.type,) * count,
            messages,
        )
        found.counts["routed"] = count
        return True

    def _admit(  # noqa: C901, PLR0912, PLR0915 - once for every message: calls cost more than lines
        self,
        intake: Intake,
        messages: Sequence[Any],
        now_ms: int,
        found: Admitted,
        first: _Shape | None,
    ) -> None:
        entries, keys, published = found.entries, found.keys, found.published
        leg, largest = intake.number, self._limits.message
        window = self._window
        window.make_room(len(messages))
        new, old, is_on = window.new, window.old, window.size > 0
        rates = self._rates
        if rates is not None and not rates.bounds(intake.leg):
            rates = None
        new_entry, entry = tuple.__new__, Entry
        routed = 0
        # Of the message before: most are of the same topic and have the same size.
        shape = _NO_SHAPE
        size_before, begin, head, rest = -1, 0, b"", b""
        version = middle = variant = end_of_id = 0
        add: Any = None
        for message in messages:
            raw = message
            if raw.__class__ is not bytes:
                if raw.__class__ is Unreadable:
                    self._refuse_unreadable(raw, intake.leg, found)
                    continue
                raw = _bytes_of(message)
            size = len(raw)
            if not (
                size == size_before
                and raw.startswith(head)
                and raw.startswith(rest, end_of_id)
                and raw[version] >> 4 == 7  # noqa: PLR2004 - of the id, as is the variant
                and raw[middle] == 0x11  # noqa: PLR2004
                and raw[variant] >> 6 == 2  # noqa: PLR2004
            ):
                # Of the first one it may be known: a token is looked at once.
                shape = first or self._shape(intake, raw, size if size <= largest else 0)
                first, plan = None, shape.plan
                if plan is None:
                    found.count("undecodable")
                    found.strays.append(raw)
                    size_before = -1
                    continue
                begin, head, rest = shape.begin, shape.head, shape.rest
                size_before = size if shape.is_lasting else -1
                version, middle, variant = begin + 4, begin + 11, begin + 19
                end_of_id = begin + ID_SIZE
                add = None
                if plan.is_simple and not plan.ttl:
                    copy = plan.copies[0]
                    ends = _ends(now_ms, copy.max_age_ms)
                    add = entries.setdefault(copy.outlet, []).append
                priority, order, kind = plan.priority, plan.order, plan.type
                source_bytes, topic, refusal = plan.source_bytes, plan.topic, plan.refusal
                sender = plan.sender
            if refusal is not None:
                found.count(refusal.counter)
                found.failures.append(_refused(raw, refusal, intake.leg))
                continue
            id = raw[begin + 3 : end_of_id] if begin else shape.id
            if is_on:
                key = id + source_bytes
                content = hash(raw) ^ leg
                known = new.get(key) or old.get(key)
                if known is not None:
                    found.count(_seen(known, content))
                    continue
            if rates is not None and (why := rates.refuses(intake.leg, sender)) is not None:
                found.count(_TOO_FAST.counter)
                found.failures.append(_refused(raw, _TOO_FAST._replace(text=why), intake.leg))
                continue
            if is_on:
                new[key] = content or 1
                keys.append(key)
            if kind == _PUBLISH:
                published[topic] = raw
            if add is not None:
                add(new_entry(entry, (priority, 0, ends, order, kind, raw)))
                routed += 1
            elif self._copy(raw, id, shape, now_ms, intake.leg, found):
                routed += 1
        if routed:
            found.counts["routed"] = routed
            if not all(entries.values()):
                found.entries = {outlet: own for outlet, own in entries.items() if own}

    def _refuse_unreadable(self, came: Unreadable, leg: str, found: Admitted) -> None:
        """Make a letter of what is not a message as it should be, or keep its bytes."""
        raw = _NOTHING if came.message is None else _bytes_of(came.message)
        if raw == _NOTHING:
            found.count("undecodable")
            found.strays.append(came.raw)
            return
        is_anothers = came.code == UCode.UNAUTHENTICATED
        counter = "unauthenticated" if is_anothers else "invalid"
        reason = DeadLetterReason.UNAUTHENTICATED if is_anothers else DeadLetterReason.INVALID
        found.count(counter)
        refusal = Refusal(counter, came.code, reason, came.reason)
        found.failures.append(_refused(raw, refusal, leg))

    def _copy(
        self, raw: bytes, id: bytes, shape: _Shape, now_ms: int, leg: str, found: Admitted
    ) -> bool:
        """Make the copies of a message; tell whether it goes to somebody, or should."""
        plan = shape.plan
        assert plan is not None
        expires = 0
        if plan.ttl:
            id_ms = int.from_bytes(id[2:8], "little")
            created = now_ms if id_ms > now_ms + self._skew_ms else id_ms
            expires = created + plan.ttl + 1
            if expires <= now_ms:
                found.count(_EXPIRED.counter)
                found.failures.append(_refused(raw, _EXPIRED, leg))
                return False
        if plan.type == _REQUEST and expires:
            self._deadlines.add(id, expires - 1)
            expires = too_late_ms(now_ms, expires, plan.ttl)
        for copy in plan.copies:
            ends = _ends(now_ms, copy.max_age_ms)
            if expires and (not ends or expires < ends):
                ends = expires
            own = raw
            if copy.attributes is not None:
                own = shape.with_attributes(raw, copy)
            if len(own) > copy.limit:
                found.failures.append(_too_large_for(copy, own, leg))
                continue
            of_outlet = found.entries.setdefault(copy.outlet, [])
            if copy.latest is not None:
                found.latest.setdefault(copy.outlet, {})[len(of_outlet)] = copy.latest, copy.most
            of_outlet.append(Entry(plan.priority, 0, ends, plan.order, plan.type, own))
        found.failures += [_refused(raw, refusal, leg) for refusal in plan.refused_copies]
        if plan.copies or plan.refused_copies:
            return True
        found.count("loops" if plan.is_there else "no_subscriber")
        return False

    # --- what is done once for many messages ------------------------------------------------------

    def _shape(self, intake: Intake, raw: bytes, size: int) -> _Shape:
        """Find out what a message is; a size of 0 is one that is too large."""
        found = places(raw) if size else None
        if found is None:
            return self._unusual(intake.leg, raw)
        begin, end, payload = found
        plans = intake.plans[1 if payload else 0]
        attributes = raw[begin + ID_SIZE : end]
        plan = plans.get(attributes)
        is_lasting = True
        if plan is None:
            plan, is_lasting = self._planner.plan(intake.leg, raw)
            if is_lasting and plan is not None:
                plans[attributes] = plan
        rest = raw[begin + ID_SIZE : payload or end]
        return _Shape(plan, begin, end, raw[: begin + 3], rest, b"", is_lasting)

    def _unusual(self, leg: str, raw: bytes) -> _Shape:
        """Decide about a message of which the id is elsewhere, or wrong, or that is too large."""
        plan, _ = self._planner.plan(leg, raw)
        if plan is None or plan.refusal is not None:
            return _NO_SHAPE._replace(plan=plan)
        id = UMessage.attributes_of(raw).id
        assert id is not None
        return _NO_SHAPE._replace(plan=plan, id=id_key(id))


_EXPIRED: Final = Refusal(
    "expired_on_arrival",
    UCode.DEADLINE_EXCEEDED,
    DeadLetterReason.EXPIRED,
    "its time to live was over when it came",
)


_TOO_FAST: Final = Refusal(
    "rate_limited", UCode.RESOURCE_EXHAUSTED, DeadLetterReason.QUEUE_FULL, ""
)


def _refused(raw: bytes, refusal: Refusal, leg: str) -> Failure:
    return Failure(
        raw,
        refusal.code,
        refusal.reason,
        refusal.text,
        came_by=leg,
        receiver=refusal.receiver,
        header_only=refusal.counter == "too_large",
    )


def _too_large_for(copy: Copy, raw: bytes, leg: str) -> Failure:
    receiver = copy.outlet.receiver
    text = f"{len(raw):,} bytes; the leg {receiver.leg} carries {copy.limit:,}"
    code, reason = UCode.RESOURCE_EXHAUSTED, DeadLetterReason.UNSUPPORTED
    return Failure(raw, code, reason, text, came_by=leg, receiver=receiver)


def _bytes_of(message: Any) -> bytes:
    if not isinstance(message, UMessage):
        return bytes(message)
    try:
        return message.to_bytes()
    except InvalidMessage:
        return _NOTHING  # a value does not fit: it is as undecodable as such bytes


def _ends(now_ms: int, max_age_ms: int) -> int:
    """Return when a message that comes now has been there for too long; 0: never."""
    # A device that has just booted may not know the time yet: when it does, nothing is too old.
    if max_age_ms >= FOR_EVER or now_ms < _CLOCK_IS_SET_MS:
        return 0
    return now_ms + max_age_ms


def _seen(known: int, content: int) -> str:
    """Return the count of a message that was here before (E1, E2)."""
    difference = known ^ (content or 1)
    if not difference:
        return "duplicates"
    return "loops" if 0 < difference < LEGS else "conflicts"


class _Shape(NamedTuple):
    """Where everything is in a message, and what is done with all that look the same."""

    plan: Plan | None
    #: Where the attributes are; 0 where they are not in the usual place.
    begin: int
    end: int
    #: All bytes before the id, and those between the id and the payload.
    head: bytes
    rest: bytes
    #: The id, where it is not in the usual place.
    id: bytes
    is_lasting: bool

    def with_attributes(self, raw: bytes, copy: Copy) -> bytes:
        """Return a message with the addresses of a copy."""
        if not self.begin or copy.attributes is None:
            message = UMessage.from_bytes(raw)
            changed = message.with_attributes(source=copy.source, sink=copy.sink, ttl=copy.ttl)
            return changed.to_bytes()
        return with_attributes(raw, self.begin, self.end, copy.attributes)


_NO_SHAPE: Final = _Shape(None, 0, 0, b"", b"", b"", is_lasting=False)
