"""Who gets a message, may they, and until when? Once for all that have the same attributes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue
from penstock.dispatch.access import Access, Tokens
from penstock.dispatch.outbox import key_of
from penstock.dispatch.outlets import NoRoom
from penstock.dispatch.routes import topic_of
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    InvalidMessage,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UUri,
    validate,
)
from penstock.protocols.uprotocol.message import ID_SIZE, encode_id
from penstock.protocols.uprotocol.validation import RULES

if TYPE_CHECKING:
    from penstock.dispatch.delivery import Outlet
    from penstock.dispatch.intake import Group
    from penstock.dispatch.outlets import Outlets
    from penstock.dispatch.routes import Receiver, Routing
    from penstock.dispatch.settings import Limits, Policies
    from penstock.dispatch.switches import Switches
    from penstock.protocols.uprotocol import UUID7, UAttributes

__all__ = [
    "ENDLESS",
    "Copy",
    "Deadlines",
    "Lifetime",
    "Plan",
    "Planner",
    "Refusal",
    "class_of",
    "id_key",
    "order_of",
]

#: Cached plans per leg, at most.
_MOST_PLANS: Final = 8192
#: The start of 2020: a clock before that is not set.
_CLOCK_IS_SET_MS: Final = 1_577_836_800_000
#: A request expires before its ttl ends, so that the error response reaches the caller in time: a
#: tenth of the ttl earlier, at most this (milliseconds).
_LONGEST_NOTICE_MS: Final = 100
#: Number of requests whose deadlines are kept, at least.
_REMEMBERED: Final = 50_000
#: The ttl assumed for an unknown request: the default of SDKs (milliseconds).
_USUAL_MS: Final = 10_000
#: The tags before an id in the attributes.
_ID_BEGIN: Final = 3


def id_key(id: UUID7) -> bytes:
    """Return an id as in the attributes of a message, without the tags before it."""
    return encode_id(id)[_ID_BEGIN:]


class Lifetime(NamedTuple):
    """The lifetime of messages of a kind. All times are milliseconds."""

    #: From the time in the id; 0: no limit.
    ttl: int = 0
    #: From the arrival; 0: no limit.
    max_age: int = 0
    #: An id further than this in the future counts as created now; None: no check.
    skew: int | None = None
    is_request: bool = False

    def deadline_ms(self, made_ms: int, now_ms: int) -> int:
        """Return when the ttl of a message that arrives now ends."""
        if self.skew is not None and made_ms > now_ms + self.skew:
            made_ms = now_ms
        return made_ms + self.ttl

    def expires_ms(self, made_ms: int, now_ms: int) -> int:
        """Return when a message that arrives now expires; 0: never."""
        # Before the clock is set there is no max_age: setting it would make all messages too old.
        ends = now_ms + self.max_age if self.max_age and now_ms >= _CLOCK_IS_SET_MS else 0
        if not self.ttl:
            return ends
        expires = self.deadline_ms(made_ms, now_ms) + 1
        if self.is_request:
            notice = expires - min(self.ttl // 10, _LONGEST_NOTICE_MS)
            expires = notice if notice > now_ms else expires
        return min(expires, ends) if ends else expires


#: The lifetime of messages that never expire.
ENDLESS: Final = Lifetime()


class Deadlines:
    """The ends of the ttl of the latest requests. Thread-safe."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def add(self, key: bytes, expires_ms: int) -> None:
        """Add a request by its id."""
        with self._lock:
            if len(self._new) >= self._size:
                self._old, self._new = self._new, {}
            self._new[key] = expires_ms

    def left_for(self, response: UAttributes) -> int:
        """Return the ttl for a response without one: the remaining ttl of its request."""
        id, reqid = response.id, response.reqid
        if id is None or reqid is None:
            return _USUAL_MS
        key = id_key(reqid)
        expires = self._new.get(key) or self._old.get(key) or reqid.time_ms + _USUAL_MS
        return expires - id.time_ms


class Refusal(NamedTuple):
    """Why a message, or a copy of it, is rejected."""

    counter: str
    code: UCode
    reason: DeadLetterReason
    text: str
    receiver: Receiver | None = None


class Copy(NamedTuple):
    """How to store a message for one receiver."""

    outlet: Outlet
    #: Bytes that its leg carries, at most; None: no limit.
    limit: int | None
    #: Key, and number of waiting messages from which it supersedes the oldest; None: never.
    latest: tuple[bytes, int] | None
    #: The new attributes after the id; None: unchanged.
    attributes: bytes | None
    source: UUri
    sink: UUri | None
    ttl: int | None

    def of(self, group: Group, raw: bytes) -> bytes:
        """Return a message of a group with the attributes of this copy."""
        if self.attributes is None:
            return raw
        if group.is_found:
            return group.with_attributes(raw, self.attributes)
        message = UMessage.from_bytes(raw)
        changed = message.with_attributes(source=self.source, sink=self.sink, ttl=self.ttl)
        return changed.to_bytes()


@dataclass(slots=True)
class Plan:
    """What to do with messages that have equal attributes except the id."""

    type: int
    topic: UUri
    #: Whether it applies to all messages with equal attributes, until a change.
    is_lasting: bool = False
    #: The id of the message that it was created for, and its time.
    id: bytes = b""
    made_ms: int = 0
    lifetime: Lifetime = ENDLESS
    priority: int = 1
    #: Ordering key: one source to one entity, or to all subscribers.
    order: int = 0
    #: The sending entity, and the source address in keys of the duplicate window.
    sender: int = 0
    source: bytes = b""
    copies: tuple[Copy, ...] = ()
    #: Why the message is rejected, and which copies are.
    refusal: Refusal | None = None
    refused_copies: tuple[Refusal, ...] = ()
    #: Whether the transport has delivered it already.
    is_delivered_already: bool = False


def class_of(attributes: UAttributes) -> int:
    """Return the priority class of a message in an outbox."""
    return attributes.effective_priority - 1


def order_of(attributes: UAttributes) -> int:
    """Return the ordering key of a message: messages with the same key keep their order."""
    source = b"" if attributes.source is None else attributes.source.to_bytes()
    if attributes.sink is not None and attributes.type != UMessageType.PUBLISH:
        source += attributes.sink.with_resource(0).to_bytes()
    return key_of(source)


class Planner:
    """Validates, authorizes and routes messages. The caller holds a lock."""

    def __init__(
        self,
        routing: Routing,
        access: Access,
        policies: Policies,
        switches: Switches,
        limits: Limits,
        outlets: Outlets,
        *,
        tokens: Tokens | None = None,
        is_trusted: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Set up the planner; with `is_trusted` it does not check the sender's rights."""
        self._deadlines = deadlines or Deadlines()
        self._tokens = tokens or Tokens()
        self._routing = routing
        self._access = access
        self._policies = policies
        self._switches = switches
        self._limits = limits
        self._outlets = outlets
        self._is_trusted = is_trusted
        self._generation = -1
        #: By leg, and then by the attributes after the id and whether there is a payload.
        self._plans: dict[str, dict[tuple[bytes, bool], Plan]] = {}

    def notice_changes(self) -> None:
        """Drop the cached plans after a change of routes, switches or outlets."""
        generation = (
            self._routing.subscriptions.generation
            + self._switches.generation
            + self._outlets.generation
        )
        if generation != self._generation:
            self._generation = generation
            self._plans = {}

    def plan(self, leg: str, group: Group, raw: bytes) -> Plan | None:
        """Return the plan for a message of a group, or None if it is undecodable."""
        if not group.is_found:
            return self._new_plan(leg, raw)
        plans = self._plans.setdefault(leg, {})
        key = group.attributes, group.has_payload
        plan = plans.get(key)
        if plan is None:
            plan = self._new_plan(leg, raw)
            if plan is not None and plan.is_lasting:
                if len(plans) >= _MOST_PLANS:
                    plans.clear()
                plans[key] = plan
        return plan

    def _new_plan(self, leg: str, raw: bytes) -> Plan | None:
        try:
            if len(raw) > self._limits.message:
                attributes, has_payload = UMessage.attributes_of(raw), True
            else:
                message = UMessage.from_bytes(raw)
                attributes, has_payload = message.attributes, message.payload is not None
        except InvalidMessage:
            return None
        plan = Plan(int(attributes.type), topic_of(attributes) or UUri())
        if attributes.id is not None:
            plan.id, plan.made_ms = id_key(attributes.id), attributes.id.time_ms
        try:
            plan.refusal = self._refusal(leg, attributes, has_payload, len(raw))
            if plan.refusal is None:
                self._route(plan, leg, attributes)
        except DamagedQueue as error:
            plan.refusal = Refusal(
                "internal", UCode.INTERNAL, DeadLetterReason.INTERNAL, str(error)
            )
            return plan
        plan.is_lasting = (
            attributes.reqid is None
            and attributes.traceparent is None
            and attributes.token is None
            and len(raw) <= self._limits.message
            and attributes.id is not None
            and attributes.id.is_valid
            and not plan.refused_copies
        )
        return plan

    def _refusal(
        self, leg: str, attributes: UAttributes, has_payload: bool, size: int
    ) -> Refusal | None:
        if size > self._limits.message:
            return Refusal(
                "too_large",
                UCode.RESOURCE_EXHAUSTED,
                DeadLetterReason.UNSUPPORTED,
                f"{size:,} bytes are more than the limit of {self._limits.message:,}",
            )
        broken = validate(attributes, has_payload)
        # Some SDKs omit the ttl of a response: it gets the remaining ttl of its request.
        if broken and broken != ["response-ttl"]:
            return Refusal(
                "invalid",
                UCode.INVALID_ARGUMENT,
                DeadLetterReason.INVALID,
                "; ".join(f"{rule} ({RULES[rule]})" for rule in broken),
            )
        if broken and self._deadlines.left_for(attributes) <= 0:
            return Refusal(
                "expired_on_arrival",
                UCode.DEADLINE_EXCEEDED,
                DeadLetterReason.EXPIRED,
                "it has no ttl, and that of its request is over",
            )
        own = self._resolved(attributes)
        source = own.source
        assert source is not None
        if self._is_trusted:
            return None
        if not self._routing.vouches(leg, source):
            return Refusal(
                "unauthenticated",
                UCode.UNAUTHENTICATED,
                DeadLetterReason.UNAUTHENTICATED,
                f"{source.authority_name} is not behind the leg {leg}",
            )
        why = self._tokens.refuses(own)
        if why is not None:
            reason = DeadLetterReason.UNAUTHENTICATED
            return Refusal("unauthenticated", UCode.UNAUTHENTICATED, reason, why)
        if not self._access.allows(own):
            return Refusal(
                "forbidden",
                UCode.PERMISSION_DENIED,
                DeadLetterReason.FORBIDDEN,
                f"no rule allows it from {source} to {own.sink or 'its subscribers'}",
            )
        return None

    def _resolved(self, attributes: UAttributes) -> UAttributes:
        """Fill in the authority of local addresses, and a missing ttl of a response."""
        if attributes.type == UMessageType.RESPONSE and not attributes.ttl:
            attributes = attributes.replace(ttl=max(1, self._deadlines.left_for(attributes)))
        source, sink = attributes.source, attributes.sink
        assert source is not None
        if source.authority_name and (sink is None or sink.authority_name):
            return attributes
        name = self._routing.authority
        return attributes.replace(
            source=source.resolved(name), sink=None if sink is None else sink.resolved(name)
        )

    def _route(self, plan: Plan, leg: str, attributes: UAttributes) -> None:
        own = self._resolved(attributes)
        source = own.source
        assert source is not None
        plan.topic = topic_of(own) or source
        plan.priority = class_of(own)
        plan.order = order_of(own)
        plan.sender = key_of(source.with_resource(0).to_bytes())
        plan.source = key_of(source.to_bytes()).to_bytes(8, "little")
        hops = self._routing.hops(own, leg)
        if hops is None:
            plan.refusal = Refusal(
                "no_route",
                UCode.UNAVAILABLE,
                DeadLetterReason.NO_ROUTE,
                f"no leg leads to {own.sink}",
            )
            return
        plan.is_delivered_already = not hops and plan.type != UMessageType.PUBLISH
        policy = self._policies.of(plan.topic)
        wait = policy.longest_wait
        plan.lifetime = Lifetime(
            ttl=own.ttl or 0,
            max_age=0 if wait is None else max(1, int(wait * 1000)),  # 0 would be no limit
            skew=int(self._limits.clock_skew * 1000),
            is_request=plan.type == UMessageType.REQUEST,
        )
        latest = None
        if policy.most_waiting is not None:
            latest = source.to_bytes() + (b"" if own.sink is None else own.sink.to_bytes())
        copies, refused = [], []
        for receiver, period in hops:
            refusal = self._refused_copy(plan, receiver, own)
            if refusal is not None:
                refused.append(refusal)
                continue
            try:
                outlet = self._outlets.outlet(receiver)
            except NoRoom as error:
                full = DeadLetterReason.QUEUE_FULL
                code = UCode.RESOURCE_EXHAUSTED
                refused.append(Refusal("", code, full, str(error), receiver))
                continue
            if policy.order == "priority":
                outlet.order = "priority"
            sink = own.sink
            if plan.type == UMessageType.PUBLISH:
                sink = self._routing.sink_to(receiver, own)
            changed = None
            if (sink, source, own.ttl) != (attributes.sink, attributes.source, attributes.ttl):
                made = attributes.replace(source=source, sink=sink, ttl=own.ttl)
                changed = made.to_bytes()[ID_SIZE:]
            key = latest if latest is not None or not period else source.to_bytes()
            most = 1 if policy.most_waiting is None else policy.most_waiting
            copies.append(
                Copy(
                    outlet,
                    self._limits.leg_messages.get(receiver.leg),
                    None if key is None else (key, most),
                    changed,
                    source,
                    sink,
                    own.ttl,
                )
            )
        plan.copies, plan.refused_copies = tuple(copies), tuple(refused)

    def _refused_copy(
        self, plan: Plan, receiver: Receiver, attributes: UAttributes
    ) -> Refusal | None:
        stop = self._switches.find(plan.topic, receiver.address)
        if stop is not None and not stop.queue and plan.type != UMessageType.RESPONSE:
            text = f"{plan.topic} is stopped"
            code, reason = UCode.UNAVAILABLE, DeadLetterReason.UNREACHABLE
            return Refusal("", code, reason, text, receiver)
        is_here = receiver.address.authority_name == self._routing.authority
        if attributes.payload_format == UPayloadFormat.SHM and not is_here:
            text = "an address in shared memory means nothing on another device"
            code, reason = UCode.INVALID_ARGUMENT, DeadLetterReason.UNSUPPORTED
            return Refusal("", code, reason, text, receiver)
        return None
