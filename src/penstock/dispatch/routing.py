"""Which receivers does a message go to? (spec uprotocol 9, 10.4: E7, E10, E11)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.errors import InvalidOption
from penstock.dispatch.receivers import Receiver
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

__all__ = ["Hop", "Nobody", "Routes", "Routing", "Subscriber", "Subscriptions"]


class Subscriber(NamedTuple):
    """Who gets the publishes of a topic."""

    #: The entity, with resource 0.
    address: UUri
    #: Milliseconds between two publishes that it gets, at least; 0: it gets all.
    sample_period_ms: int = 0


class Subscriptions(Protocol):
    """The table of subscriptions, as a dispatcher uses it."""

    @property
    def generation(self) -> int:
        """A number that grows with every change, also when a subscription expires."""

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:
        """Return who gets the publishes of a topic now."""

    def topics(self) -> Collection[UUri]:
        """Return the topics and patterns of topics that somebody gets."""


class Nobody:
    """A table of subscriptions for a dispatcher that has none."""

    generation = 0

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:  # noqa: ARG002
        return ()

    def topics(self) -> Collection[UUri]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """What lies behind which leg."""

    #: The authorities behind each leg, by its name. Only these may send by it.
    authorities: Mapping[str, Collection[str]] = field(default_factory=dict)
    #: The leg to all authorities that are behind no other.
    default: str | None = None
    #: Own services, by the low half of their ue_id: the leg that leads to each.
    services: Mapping[int, str] = field(default_factory=dict)
    #: Legs on which a publish names the authority that it goes to (E11).
    device_to_device: frozenset[str] = frozenset()


class Hop(NamedTuple):
    """One copy of a message."""

    receiver: Receiver
    sample_period_ms: int = 0


class Routing:
    """Finds the way."""

    def __init__(
        self, authority: str, legs: Mapping[str, Leg], routes: Routes, subscriptions: Subscriptions
    ) -> None:
        """Check the routes.

        :raises InvalidOption: they name a leg that there is not, or an authority twice.
        """
        self.authority = authority
        self.legs = legs
        self.routes = routes
        self.subscriptions = subscriptions
        #: The dispatcher's own entity, with resource 0.
        self.dispatcher: UUri | None = None
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
        """Return the leg that leads to an address, which names its authority."""
        name = address.authority_name
        if name == self.authority:
            service = self.routes.services.get(address.service_id)
            if service is not None:
                return self.legs[service]
        return self._leg_of.get(name) or (self._default if name != self.authority else None)

    def vouches(self, leg: str, source: UUri) -> bool:
        """Tell whether what comes by a leg may have this source (E21)."""
        name = source.authority_name
        if self.dispatcher is not None and source.with_resource(0) == self.dispatcher:
            # Who publishes dead letters does not get them from a leg, but answers itself.
            return name == self.authority and self.routes.services.get(source.service_id) == leg
        if name == self.authority and source.service_id in self.routes.services:
            return self.routes.services[source.service_id] == leg  # no other entity is a service
        authorities = self.routes.authorities.get(leg, ())
        if name in authorities or ANY_AUTHORITY in authorities:
            return True
        is_elsewhere = name in self._leg_of or name == self.authority
        return leg == self.routes.default and not is_elsewhere

    def received_by(self, leg: Leg) -> set[str]:
        """Return the authorities whose messages are to be received on a leg."""
        if leg.scope == "entity" or (self._default is not None and self._default is not leg):
            return {ANY_AUTHORITY}
        others = {name for name, other in self._leg_of.items() if other is not leg}
        return {*others, self.authority} - set(self.routes.authorities.get(leg.name, ()))

    def hops(self, attributes: UAttributes, came_by: str | None) -> list[Hop] | None:
        """Return the copies of a message, whose addresses name their authority.

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
        """Return the way of a publish that is on its way between two other devices.

        Its subscription is known at both ends, not here: its sink says where it goes.
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
        """Return the milliseconds between two publishes of a topic that a receiver gets.

        :returns: None when it does not get them any more (E8, E9).
        """
        for hop in self._by_subscription(topic, None):
            if hop.receiver == receiver:
                return hop.sample_period_ms
        passing = self._passing(topic, sink)
        return 0 if passing is not None and passing.receiver == receiver else None

    def sink_to(self, receiver: Receiver, attributes: UAttributes) -> UUri | None:
        """Return the sink of a publish on its way: where a streamer takes it, or none."""
        if receiver.leg not in self.routes.device_to_device:
            assert attributes.source is not None
            is_passing = self._passing(attributes.source, attributes.sink) is not None
            return attributes.sink if is_passing else None
        name = receiver.address.authority_name
        return UUri.unchecked(name, ANY_ENTITY, ANY_VERSION, ANY_RESOURCE)

    def listening(self) -> dict[str, set[UUri]]:
        """Return the topics that each leg has to listen to."""
        wanted: dict[str, set[UUri]] = {name: set() for name in self.legs}
        for topic in self.subscriptions.topics():
            leg = self.leg_to(topic.resolved(self.authority))
            if leg is not None:
                wanted[leg.name].add(topic.resolved(self.authority))
        return wanted


def _goes_back(leg: Leg, topic: UUri, subscriber: UUri) -> bool:
    """Tell whether a publish goes to an entity behind the leg that it came by.

    Where each entity has a queue of its own only the dispatcher can bring it there; elsewhere the
    transport has done it. Nobody gets his own.
    """
    return leg.scope == "entity" and (
        subscriber.ue_id,
        subscriber.ue_version_major,
        subscriber.authority_name,
    ) != (topic.ue_id, topic.ue_version_major, topic.authority_name)
