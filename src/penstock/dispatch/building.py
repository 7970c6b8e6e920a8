"""How does a configuration become legs, services and a dispatcher?"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.closing import Closable
from penstock.dispatch.access import Access, Rule
from penstock.dispatch.config import SERVICES_LEG
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.letters import dead_letter_topic
from penstock.dispatch.routing import Routes
from penstock.dispatch.services import (
    KnownTopic,
    ServicesLeg,
    Subscription,
    SubscriptionLimits,
    SubscriptionTable,
    UDiscovery,
    USubscription,
    UTwin,
)
from penstock.dispatch.services.switching import Switching
from penstock.dispatch.services.usubscription import CHANGES
from penstock.dispatch.tokens import Tokens
from penstock.protocols.uprotocol import UUri
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg
from penstock.protocols.uprotocol.transports.ring import RingLeg
from penstock.protocols.uprotocol.uuri import ANY_RESOURCE, ANY_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.clock import Clock
    from penstock.dispatch.config import BusConfig
    from penstock.dispatch.leg_config import LegConfig, MqttConfig, ZenohConfig
    from penstock.dispatch.services.service import Service
    from penstock.protocols.uprotocol.transports import Leg
    from penstock.protocols.uprotocol.transports.mqtt import MqttBroker

__all__ = ["Bus", "build", "check"]

_LETTER: Final = "penstock.dispatch.v1.DeadLetter"
_CHANGE: Final = "uprotocol.core.usubscription.v4.Subscription"


@dataclass
class Bus(Closable):
    """A dispatcher and what belongs to it."""

    config: BusConfig
    dispatcher: Dispatcher
    legs: Mapping[str, Leg]
    services: ServicesLeg
    table: SubscriptionTable
    #: Of each leg `in-process`, what entities of this process connect to.
    buses: Mapping[str, InProcessBus] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to receive and to deliver.

        :raises PenstockError: a leg cannot receive.
        """
        self.dispatcher.start()

    def step(self) -> float | None:
        """Do all that is due, without threads; return when there is more (monotonic seconds)."""
        dues = [self.services.step(), self.dispatcher.step()]
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        """Stop, and give everything back.

        :raises StorageError: the device refuses.
        """
        try:
            self.dispatcher.close()
        finally:
            self.table.close()


def check(config: BusConfig) -> None:
    """Find out whether a configuration can be built, without connecting to anything.

    :raises PenstockError: a library or a file is missing, or a value does not fit.
    """
    for one in config.tokens:
        one.rule(config.authority)
    for name, leg in config.legs.items():
        if leg.mqtt is not None:
            _broker(config, name, leg.mqtt).context()
        elif leg.zenoh is not None:
            from penstock.protocols.uprotocol.transports import zenoh  # noqa: F401, PLC0415
        elif leg.ring is not None:
            RingLeg(name, receive=leg.ring.receive, send=leg.ring.send).close()


def build(
    config: BusConfig,
    *,
    clock: Clock = SYSTEM_CLOCK,
    threads: bool = True,
    legs: Mapping[str, Leg] | None = None,
) -> Bus:
    """Make everything that a configuration names; nothing is received or delivered yet.

    :param legs: to be used in the place of those that the configuration has under their names
    :raises PenstockError: something cannot be made.
    """
    own = config.authority
    rules = [rule for one in config.access for rule in one.rules(own)]
    access = Access([*rules, *_rules_of_services(own)] if rules else [])
    with contextlib.ExitStack() as opened:
        static = [
            Subscription(
                one.topic.resolved(own),
                one.subscriber.resolved(own).with_resource(0),
                sample_period_ms=int((one.sample_period or 0) * 1000) or None,
            )
            for one in config.subscriptions
        ]
        table = SubscriptionTable(config.state / "subscriptions", static)
        opened.callback(table.close)
        services = _services(config, table, access, clock)
        running: list[Dispatcher] = []
        services.append(Switching(own, clock, lambda: running[0]))
        services_leg = ServicesLeg(SERVICES_LEG, services, clock, threads=threads)
        buses: dict[str, InProcessBus] = {}
        made: dict[str, Leg] = {}
        for name, one in config.legs.items():
            given = (legs or {}).get(name)
            made[name] = _leg(config, name, one, buses) if given is None else given
            opened.callback(made[name].close)
        dispatcher = Dispatcher(
            own,
            config.state,
            [*made.values(), services_leg],
            routes=_routes(config, services),
            policies=[one.policy() for one in config.policies],
            access=access,
            tokens=Tokens(one.rule(own) for one in config.tokens),
            limits=config.limits.limits(config.legs),
            retry=config.retry.retry(),
            subscriptions=table,
            clock=clock,
            threads=threads,
            sync=config.sync,
            topic=None if config.dead_letters is None else config.dead_letters.resolved(own),
            on_publish=_tell_of_publishes(services),
        )
        opened.pop_all()
    running.append(dispatcher)
    services_leg.on_change(_Listening(table, dispatcher))
    return Bus(config, dispatcher, made, services_leg, table, buses)


class _Listening:
    """Lets the legs listen to what is subscribed to, when that has changed."""

    def __init__(self, table: SubscriptionTable, dispatcher: Dispatcher) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._generation = table.generation

    def __call__(self) -> None:
        generation = self._table.generation
        if generation != self._generation:
            self._generation = generation
            self._dispatcher.subscriptions_changed()


def _rules_of_services(authority: str) -> list[Rule]:
    """Allow what the services do, and to ask them: they look at the rights themselves."""
    rules = []
    for service in (USubscription, UDiscovery, UTwin, Switching):
        here = UUri(authority, service.service_id, ANY_VERSION, ANY_RESOURCE)
        rules += [Rule(allow=action, source=here) for action in ("publish", "notify", "call")]
        rules += [Rule(allow=action, sink=here) for action in ("call", "notify")]
    return rules


def _services(
    config: BusConfig, table: SubscriptionTable, access: Access, clock: Clock
) -> list[Service]:
    found: list[Service] = []
    own, wanted = config.authority, config.services
    if wanted.subscription:
        found.append(
            USubscription(
                own,
                table,
                clock,
                access=access,
                serves=wanted.subscription.serves,
                limits=SubscriptionLimits(
                    subscriptions=wanted.subscription.subscriptions,
                    watchers=wanted.subscription.registrations,
                    response=config.limits.message // 2,
                ),
            )
        )
    if wanted.twin:
        found.append(
            UTwin(
                own,
                clock,
                access=access,
                topics=wanted.twin.topics,
                size=wanted.twin.size,
                response=config.limits.message // 2,
            )
        )
    if wanted.discovery:
        addresses = [service.address for service in found]
        letters = config.dead_letters or dead_letter_topic(own)
        topics = [
            KnownTopic(topic=letters.resolved(own), name="dead letters", message=_LETTER),
            *(
                KnownTopic(topic=UUri(own, 0, 4, CHANGES), name="changes", message=_CHANGE)
                for service in found
                if isinstance(service, USubscription)
            ),
            *(
                KnownTopic(**{**dict(one), "topic": one.topic.resolved(own)})
                for one in wanted.discovery.topics
            ),
        ]
        found.append(
            UDiscovery(
                own,
                clock,
                access=access,
                services=[*addresses, *(it.resolved(own) for it in wanted.discovery.services)],
                topics=topics,
                seen_for=int(wanted.discovery.seen_for),
            )
        )
    return found


def _tell_of_publishes(services: list[Service]) -> Any:
    told = [service.published for service in services if isinstance(service, UTwin | UDiscovery)]

    def tell(last: Mapping[UUri, bytes]) -> None:
        for published in told:
            published(last)

    return tell if told else None


def _routes(config: BusConfig, services: list[Service]) -> Routes:
    between_devices = {
        name
        for name, leg in config.legs.items()
        if leg.mqtt is not None and leg.mqtt.topics == "d2d"
    }
    return Routes(
        authorities={name: leg.authorities for name, leg in config.legs.items()},
        default=config.routes.default,
        services={service.service_id: SERVICES_LEG for service in services},
        device_to_device=frozenset(between_devices),
    )


# --- legs -------------------------------------------------------------------------------------


def _leg(config: BusConfig, name: str, one: LegConfig, buses: dict[str, InProcessBus]) -> Leg:
    if one.ring is not None:
        return RingLeg(name, receive=one.ring.receive, send=one.ring.send)
    if one.zenoh is not None:
        return _zenoh_leg(config.authority, name, one.zenoh)
    if one.mqtt is not None:
        return _mqtt_leg(config, name, one.mqtt)
    buses[name] = InProcessBus()
    return InProcessLeg(name, buses[name], config.authority)


def _zenoh_leg(authority: str, name: str, one: ZenohConfig) -> Leg:
    # Only who has such a leg needs the library.
    from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink  # noqa: PLC0415

    link = ZenohLink(
        authority,
        listen=one.listen,
        connect=one.connect,
        mode=one.mode,
        scouting=one.scouting,
        config=one.config,
    )
    return ZenohLeg(name, link, must_be_heard=one.must_be_heard, settle_after=one.settle_after)


def _broker(config: BusConfig, name: str, one: MqttConfig) -> MqttBroker:
    from penstock.protocols.uprotocol.transports.mqtt import MqttBroker  # noqa: PLC0415

    given: dict[str, Any] = {
        "client_id": one.client_id or f"{config.dispatcher}-{name}",
        "session_expiry": int(one.session_expiry),
        "clean_start": one.clean_start,
        "keepalive": max(int(one.keepalive), 1),
        "window": one.window,
        "receive_maximum": one.receive_maximum,
        "largest_packet": one.largest_packet,
        "connect_timeout": one.connect_timeout,
        "ack_timeout": one.ack_timeout,
    }
    for key in ("ca", "certificate", "key"):
        path = getattr(one, key)
        if path is not None:
            given[key] = str(path)
    for key in ("username", "password"):
        if getattr(one, key) is not None:
            given[key] = getattr(one, key)
    return MqttBroker.parse(one.url, **given)


def _mqtt_leg(config: BusConfig, name: str, one: MqttConfig) -> Leg:
    from penstock.protocols.uprotocol.transports.mqtt import MqttLeg  # noqa: PLC0415

    return MqttLeg(
        name,
        config.authority,
        _broker(config, name, one),
        topics=one.topics,
        must_be_heard=one.must_be_heard,
        exact_ttl=one.exact_ttl,
    )
