"""What is done with all messages that have the same attributes but for the id?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.core.errors import DamagedQueue
from penstock.dispatch.deadlines import Deadlines
from penstock.dispatch.headers import ID_SIZE
from penstock.dispatch.outbox.records import key_of
from penstock.dispatch.tokens import Tokens
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
from penstock.protocols.uprotocol.validation import RULES

if TYPE_CHECKING:
    from penstock.dispatch.access import Access
    from penstock.dispatch.delivering import Outlet
    from penstock.dispatch.policies import Policies
    from penstock.dispatch.receivers import Receiver
    from penstock.dispatch.routing import Routing
    from penstock.dispatch.settings import Limits
    from penstock.dispatch.switches import Switches
    from penstock.protocols.uprotocol import UAttributes

__all__ = ["FOR_EVER", "Copy", "NoRoom", "Plan", "Planner", "Refusal", "topic_of"]

#: More than any number of bytes or milliseconds.
FOR_EVER: Final = 1 << 63


class NoRoom(Exception):
    """There are as many receivers as there may be."""


class Outlets(Protocol):
    """Whoever has the outlets of all receivers."""

    def outlet(self, receiver: Receiver) -> Outlet:
        """Return the outlet of a receiver; make it if there is none.

        :raises NoRoom: there are too many.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: its outbox cannot be read.
        """


class Refusal(NamedTuple):
    """Why a message, or a copy of it, is not taken in."""

    counter: str
    code: UCode
    reason: DeadLetterReason
    text: str
    receiver: Receiver | None = None


class Copy(NamedTuple):
    """What is stored for one receiver."""

    outlet: Outlet
    #: Bytes at most that its leg carries.
    limit: int
    #: Milliseconds in its queue at most.
    max_age_ms: int
    #: Of which others it takes the place, if `most` of them wait; None: of none.
    latest: bytes | None
    most: int
    #: The attributes behind the id that it has from here on, where they are others.
    attributes: bytes | None
    source: UUri
    sink: UUri | None
    ttl: int | None


@dataclass(slots=True)
class Plan:
    """What is done with all messages that have the same attributes but for the id."""

    type: int
    topic: UUri
    ttl: int = 0
    priority: int = 1
    source: int = 0
    #: What is kept in order: all of a source that is for one entity, or for all subscribers.
    order: int = 0
    #: The entity that it comes from.
    sender: int = 0
    #: The source as it is in the keys of the window of duplicates.
    source_bytes: bytes = b""
    copies: tuple[Copy, ...] = ()
    #: Why it is not taken in at all, and which of its copies are not.
    refusal: Refusal | None = None
    refused_copies: tuple[Refusal, ...] = ()
    #: Whether its transport has brought it there already.
    is_there: bool = False
    #: Whether there is one copy, which is as the message came.
    is_simple: bool = False

    @property
    def is_run(self) -> bool:
        """Whether many of them can be taken in at once; requests are each known by their id."""
        return self.is_simple and self.type != UMessageType.REQUEST


def topic_of(attributes: UAttributes) -> UUri | None:
    """Return what policies and switches go by: the topic, or the method."""
    return attributes.sink if attributes.type == UMessageType.REQUEST else attributes.source


class Planner:
    """Makes plans: is it valid, may it pass, who gets it."""

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
        """Take over what it decides by; `is_trusted`: whoever sends may do so."""
        self._deadlines = deadlines or Deadlines()
        self._tokens = tokens or Tokens()
        self._routing = routing
        self._access = access
        self._policies = policies
        self._switches = switches
        self._limits = limits
        self._outlets = outlets
        self._is_trusted = is_trusted
        #: Grows when an outlet is closed: no plan may lead to it any more.
        self.outlets_closed = 0

    @property
    def generation(self) -> int:
        """A number that grows whenever a plan may be another one."""
        return (
            self._routing.subscriptions.generation + self._switches.generation + self.outlets_closed
        )

    def plan(self, leg: str, raw: bytes) -> tuple[Plan | None, bool]:
        """Decide about a message; tell whether that holds for others, too."""
        try:
            if len(raw) > self._limits.message:
                attributes, has_payload = UMessage.attributes_of(raw), True
            else:
                message = UMessage.from_bytes(raw)
                attributes, has_payload = message.attributes, message.payload is not None
        except InvalidMessage:
            return None, False
        plan = Plan(int(attributes.type), topic_of(attributes) or UUri())
        is_lasting = (
            attributes.reqid is None
            and attributes.traceparent is None
            and attributes.token is None
            and len(raw) <= self._limits.message
        )
        try:
            plan.refusal = self._refusal(leg, attributes, has_payload, len(raw))
            if plan.refusal is None:
                self._route(plan, leg, attributes)
        except DamagedQueue as error:
            plan.refusal = Refusal(
                "internal", UCode.INTERNAL, DeadLetterReason.INTERNAL, str(error)
            )
            is_lasting = False
        id = attributes.id
        is_lasting = is_lasting and id is not None and id.is_valid and not plan.refused_copies
        return plan, is_lasting

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
        # Some SDKs leave the ttl of a response out: it has what the request has left.
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
        """Name the authority of addresses that are local (1.4), and the ttl of a response."""
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
        plan.ttl = own.ttl or 0
        plan.priority = min(max(own.effective_priority - 1, 0), 6)
        plan.source = plan.order = key_of(source.to_bytes())
        if own.sink is not None and plan.type != UMessageType.PUBLISH:
            plan.order = key_of(source.to_bytes() + own.sink.with_resource(0).to_bytes())
        plan.sender = key_of(source.with_resource(0).to_bytes())
        plan.source_bytes = plan.source.to_bytes(8, "little")
        hops = self._routing.hops(own, leg)
        if hops is None:
            plan.refusal = Refusal(
                "no_route",
                UCode.UNAVAILABLE,
                DeadLetterReason.NO_ROUTE,
                f"no leg leads to {own.sink}",
            )
            return
        plan.is_there = not hops and plan.type != UMessageType.PUBLISH
        policy = self._policies.of(plan.topic)
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
            age = FOR_EVER if policy.longest_wait is None else int(policy.longest_wait * 1000)
            limit = self._limits.leg_messages.get(receiver.leg, FOR_EVER)
            copies.append(Copy(outlet, limit, age, key, most, changed, source, sink, own.ttl))
        plan.copies, plan.refused_copies = tuple(copies), tuple(refused)
        plan.is_simple = (
            len(copies) == 1
            and not refused
            and copies[0].limit == FOR_EVER
            and copies[0].latest is None
            and copies[0].attributes is None
        )

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
