"""Which receivers does a message go to, and by which leg?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.errors import InvalidOption
from penstock.protocols.uprotocol import UMessageType, UUri
from penstock.protocols.uprotocol.uuri import (
    ANY_AUTHORITY,
    ANY_ENTITY,
    ANY_RESOURCE,
    ANY_VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.protocols.uprotocol import UAttributes
    from penstock.protocols.uprotocol.transports import Leg

__all__ = [
    "Hop",
    "Nobody",
    "Receiver",
    "Routes",
    "Routing",
    "Subscriber",
    "Subscriptions",
    "topic_of",
]

_LONGEST = 80


class Receiver(NamedTuple):
    """An entity, or a whole authority, behind a leg."""

    leg: str
    #: With resource 0; for a whole authority, all fields but the name are 0.
    address: UUri

    @classmethod
    def behind(cls, leg: Leg, address: UUri) -> Receiver:
        """Return the receiver of an address on a leg."""
        if leg.scope == "authority":
            return cls(leg.name, UUri.unchecked(address.authority_name, 0, 0, 0))
        return cls(
            leg.name,
            UUri.unchecked(address.authority_name, address.ue_id, address.ue_version_major, 0),
        )

    @property
    def folder(self) -> str:
        """A readable, unique name for its folder."""
        text = f"{self.leg}{self.address.without_scheme}"
        digest = blake2b(text.encode(), digest_size=5).hexdigest()
        readable = re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-.")[:_LONGEST]
        return f"{readable}-{digest}"

    def __str__(self) -> str:
        return f"{self.leg} {self.address.without_scheme}"


def topic_of(attributes: UAttributes) -> UUri | None:
    """Return the topic or method that policies and switches apply to."""
    return attributes.sink if attributes.type == UMessageType.REQUEST else attributes.source


class Subscriber(NamedTuple):
    """An entity that gets the publishes of a topic."""

    #: The entity, with resource 0.
    address: UUri
    #: Minimal time between two publishes (milliseconds); 0: it gets all.
    sample_period_ms: int = 0


class Subscriptions(Protocol):
    """The table of subscriptions, as a dispatcher uses it."""

    @property
    def generation(self) -> int:
        """A number that increases with every change, including expiries."""

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:
        """Return the current subscribers of a topic."""

    def topics(self) -> Collection[UUri]:
        """Return the subscribed topics and patterns."""


class Nobody:
    """An empty table of subscriptions."""

    generation = 0

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:  # noqa: ARG002
        return ()

    def topics(self) -> Collection[UUri]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The authorities and services behind each leg."""

    #: The authorities behind each leg, by its name. Only these may send by it.
    authorities: Mapping[str, Collection[str]] = field(default_factory=dict)
    #: The leg to all other authorities.
    default: str | None = None
    #: The leg to each own service, by the low half of its ue_id.
    services: Mapping[int, str] = field(default_factory=dict)
    #: Legs on which a publish names its destination authority.
    device_to_device: frozenset[str] = frozenset()


class Hop(NamedTuple):
    """One copy of a message."""

    receiver: Receiver
    sample_period_ms: int = 0


class Routing:
    """Finds the legs and receivers of messages."""

    def __init__(
        self,
        authority: str,
        legs: Mapping[str, Leg],
        routes: Routes,
        subscriptions: Subscriptions,
        dispatcher: UUri,
    ) -> None:
        """Check the routes.

        :param dispatcher: its own entity, with resource 0

        :raises InvalidOption: they name an unknown leg, or an authority twice.
        """
        self.authority = authority
        self.legs = legs
        self.routes = routes
        self.subscriptions = subscriptions
        self._dispatcher = dispatcher
        self._leg_of: dict[str, Leg] = {}
        named = [*routes.authorities, *routes.services.values(), *routes.device_to_device]
        for name in [*named, *([routes.default] if routes.default else [])]:
            if name not in legs:
                raise InvalidOption("routes", name, f"the legs are {', '.join(sorted(legs))}")
        for name, authorities in routes.authorities.items():
            for behind in authorities:
                other = self._leg_of.setdefault(behind, legs[name])
                if other is not legs[name] and behind != ANY_AUTHORITY:
                    reason = f"is behind the leg {other.name} and behind {name}"
                    raise InvalidOption("routes", behind, reason)
        self._leg_of.pop(ANY_AUTHORITY, None)
        self._default = None if routes.default is None else legs[routes.default]

    def leg_to(self, address: UUri) -> Leg | None:
        """Return the leg to an address, which must name its authority."""
        name = address.authority_name
        if name == self.authority:
            service = self.routes.services.get(address.service_id)
            if service is not None:
                return self.legs[service]
        return self._leg_of.get(name) or (self._default if name != self.authority else None)

    def vouches(self, leg: str, source: UUri) -> bool:
        """Tell whether messages from a leg may have this source."""
        name = source.authority_name
        if source.with_resource(0) == self._dispatcher:
            # Messages of the dispatcher itself come only by the leg of its own service.
            return name == self.authority and self.routes.services.get(source.service_id) == leg
        if name == self.authority and source.service_id in self.routes.services:
            return self.routes.services[source.service_id] == leg  # no other entity is a service
        authorities = self.routes.authorities.get(leg, ())
        if name in authorities or ANY_AUTHORITY in authorities:
            return True
        is_elsewhere = name in self._leg_of or name == self.authority
        return leg == self.routes.default and not is_elsewhere

    def received_by(self, leg: Leg) -> set[str]:
        """Return the authorities to receive messages for on a leg."""
        if leg.scope == "entity" or (self._default is not None and self._default is not leg):
            return {ANY_AUTHORITY}
        others = {name for name, other in self._leg_of.items() if other is not leg}
        return {*others, self.authority} - set(self.routes.authorities.get(leg.name, ()))

    def hops(self, attributes: UAttributes, came_by: str | None) -> list[Hop] | None:
        """Return the copies of a message; its addresses must name their authority.

        :returns: None when no leg leads to its sink.
        """
        assert attributes.source is not None
        if attributes.type == UMessageType.PUBLISH:
            passing = self._passing(attributes.source, attributes.sink)
            if passing is None:
                return self._by_subscription(attributes.source, came_by)
            return [] if passing.receiver.leg == came_by else [passing]
        assert attributes.sink is not None
        leg = self.leg_to(attributes.sink)
        if leg is None:
            return None
        if leg.name == came_by and leg.scope == "authority":
            return []  # its transport has brought it there already
        return [Hop(Receiver.behind(leg, attributes.sink))]

    def _passing(self, topic: UUri, sink: UUri | None) -> Hop | None:
        """Return the copies of a publish in transit between two other devices.

        The subscription is known at both ends, not here: the sink names the destination.
        """
        if sink is None or self.authority in (sink.authority_name, topic.authority_name):
            return None
        leg = self.leg_to(sink)
        if leg is None or leg.scope != "authority":
            return None
        return Hop(Receiver.behind(leg, sink))

    def _by_subscription(self, topic: UUri, came_by: str | None) -> list[Hop]:
        hops: dict[Receiver, int] = {}
        for address, period in self.subscriptions.receivers_of(topic):
            leg = self.leg_to(address.resolved(self.authority))
            if leg is None or (leg.name == came_by and not _goes_back(leg, topic, address)):
                continue
            receiver = Receiver.behind(leg, address.resolved(self.authority))
            hops[receiver] = min(hops.get(receiver, period), period)
        return [Hop(receiver, period) for receiver, period in hops.items()]

    def period_of(self, receiver: Receiver, topic: UUri, sink: UUri | None) -> int | None:
        """Return the sample period of a topic for a receiver (milliseconds).

        :returns: None if it is no longer subscribed.
        """
        for hop in self._by_subscription(topic, None):
            if hop.receiver == receiver:
                return hop.sample_period_ms
        passing = self._passing(topic, sink)
        return 0 if passing is not None and passing.receiver == receiver else None

    def sink_to(self, receiver: Receiver, attributes: UAttributes) -> UUri | None:
        """Return the sink of a publish to a receiver: the next streamer, or None."""
        if receiver.leg not in self.routes.device_to_device:
            assert attributes.source is not None
            is_passing = self._passing(attributes.source, attributes.sink) is not None
            return attributes.sink if is_passing else None
        name = receiver.address.authority_name
        return UUri.unchecked(name, ANY_ENTITY, ANY_VERSION, ANY_RESOURCE)

    def listening(self) -> dict[str, set[UUri]]:
        """Return the topics to listen to, by leg."""
        wanted: dict[str, set[UUri]] = {name: set() for name in self.legs}
        for topic in self.subscriptions.topics():
            leg = self.leg_to(topic.resolved(self.authority))
            if leg is not None:
                wanted[leg.name].add(topic.resolved(self.authority))
        return wanted


def _goes_back(leg: Leg, topic: UUri, subscriber: UUri) -> bool:
    """Tell whether a publish goes to an entity behind the leg that it came by.

    Where each entity has its own queue, only the dispatcher can deliver it; elsewhere the transport
    already has. A sender does not get its own publishes.
    """
    return leg.scope == "entity" and (
        subscriber.ue_id,
        subscriber.ue_version_major,
        subscriber.authority_name,
    ) != (topic.ue_id, topic.ue_version_major, topic.authority_name)
