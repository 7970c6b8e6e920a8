"""How does a bus.yaml become a dispatcher that runs until it is told to stop?"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidOption, NotFound, StorageError
from penstock.core.interfaces import Closable
from penstock.core.units import format_time
from penstock.dispatch.access import Access, Rule, Tokens
from penstock.dispatch.config import SERVICES_LEG
from penstock.dispatch.control import (
    NAME_FILE,
    ControlServer,
    described,
    letters_to_retry,
    save_letters_to_retry,
    state_lock,
)
from penstock.dispatch.dead_letters import dead_letter_topic
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.routes import Routes
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
from penstock.dispatch.services.topic_control import TopicControl
from penstock.dispatch.services.usubscription import CHANGES
from penstock.protocols.uprotocol import UUID7, UUri
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg
from penstock.protocols.uprotocol.transports.ring import RingLeg
from penstock.protocols.uprotocol.uuri import ANY_RESOURCE, ANY_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.clock import Clock
    from penstock.dispatch.config import BusConfig, LegConfig, MqttConfig, ZenohConfig
    from penstock.dispatch.dead_letters import Letter
    from penstock.dispatch.services.leg import Service
    from penstock.protocols.uprotocol.transports import Leg
    from penstock.protocols.uprotocol.transports.mqtt import MqttBroker

__all__ = [
    "Bus",
    "Running",
    "build",
    "check",
    "devote",
]

log = logging.getLogger(__name__)

#: Thresholds of the garbage collector. Messages need no collector: reference counts free them. The
#: default of 700 objects is a few messages.
_THRESHOLDS: Final = (100_000, 50, 50)
#: Switch interval of threads (seconds). With many threads the default of 5 ms delays the expiry
#: timer too long.
_TURN: Final = 0.0005


def devote() -> None:
    """Tune the garbage collector and the thread switch interval of this process.

    Call it when everything is started.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_TURN)


_LETTER: Final = "penstock.dispatch.v1.DeadLetter"
_CHANGE: Final = "uprotocol.core.usubscription.v4.Subscription"


@dataclass
class Bus(Closable):
    """A dispatcher with its legs, services and subscriptions."""

    config: BusConfig
    dispatcher: Dispatcher
    legs: Mapping[str, Leg]
    services: ServicesLeg
    table: SubscriptionTable
    #: The bus that entities of this process connect to, by `in-process` leg.
    buses: Mapping[str, InProcessBus] = field(default_factory=dict)

    def start(self) -> None:
        """Start receiving and delivering.

        :raises PenstockError: a leg cannot receive.
        """
        self.dispatcher.start()

    def step(self) -> float | None:
        """Do all due work without threads; return when more is due (monotonic seconds)."""
        dues = [self.services.step(), self.dispatcher.step()]
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        """Stop and release all resources.

        :raises StorageError: the device refuses.
        """
        try:
            self.dispatcher.close()
        finally:
            self.table.close()


def check(config: BusConfig) -> None:
    """Check that a configuration can be built, without connecting to anything.

    :raises PenstockError: a library or a file is missing, or a value is invalid.
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
    """Build everything in a configuration, without receiving or delivering yet.

    :param legs: legs by name that replace those of the configuration
    :raises PenstockError: a part cannot be built.
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
        services.append(TopicControl(own, clock, lambda: running[0]))
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
    """Makes the legs listen to the subscribed topics after a change."""

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
    """Allow messages of the services and requests to them; they check rights themselves."""
    rules = []
    for service in (USubscription, UDiscovery, UTwin, TopicControl):
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
    # Imported only if such a leg is configured.
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


#: Seconds to wait for the state: commands use it, too, while no dispatcher runs.
_LOCK_PATIENCE: Final = 10.0
#: Number of missing letters whose ids an error names.
_NAMED: Final = 10


def _save_name(config: BusConfig) -> None:
    """Save the dispatcher's name in its state, for people; ignore a full disk."""
    name = json.dumps({"dispatcher": config.dispatcher, "authority": config.authority}).encode()
    path = config.state / NAME_FILE
    with contextlib.suppress(OSError):
        if path.read_bytes() == name:
            return
    try:
        save_notes(path, name, sync=False)
    except StorageError as error:
        log.warning("the name of the state is not noted down: %s", error)


class Running(Closable):
    """A dispatcher with threads, a lock on its state, and a control socket."""

    def __init__(self, config: BusConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Open everything, without receiving or delivering yet.

        :raises LockTimeout: another process uses the state.
        :raises PenstockError: a part cannot be built.
        """
        self.config = config
        self._clock = clock
        self._started_ns = clock.now_ns()
        self._is_stopped = False
        self._control: ControlServer | None = None
        with contextlib.ExitStack() as opened:
            opened.enter_context(state_lock(config.state, _LOCK_PATIENCE))
            _save_name(config)
            self.bus: Bus = build(config, clock=clock)
            opened.callback(self.bus.close)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Start receiving and delivering.

        :raises PenstockError: a leg cannot receive.
        """
        self.bus.start()
        self._try_letters_again()
        try:
            self._control = ControlServer(self.config.state, self._answer)
        except StorageError as error:
            # It still delivers, and so frees space; but it cannot be controlled.
            log.warning("%s; the dispatcher runs without it until the next start", error)

    def _try_letters_again(self) -> None:
        ids = letters_to_retry(self.config.state)
        if not ids:
            return
        wanted = set(ids)
        dispatcher = self.bus.dispatcher
        letters = [letter for letter in dispatcher.dead_letters if str(letter.id) in wanted]
        dispatcher.retry_dead_letters(
            letters,
            lambda letter, error: log.warning("%s stays a dead letter: %s", letter.id, error),
        )
        save_letters_to_retry(self.config.state, [])

    def status(self) -> dict[str, Any]:
        """Return the full status, ready for JSON."""
        return {
            "dispatcher": self.config.dispatcher,
            "authority": self.config.authority,
            "is_running": True,
            "pid": os.getpid(),
            "since": format_time(self._started_ns // 1_000_000_000 * 1_000_000_000),
            "legs": {
                name: {
                    "kind": self.config.legs[name].kind,
                    "authorities": self.config.legs[name].authorities,
                    "is_up": leg.is_up,
                    "counts": dict(leg.statistics()),
                }
                for name, leg in self.bus.legs.items()
            },
            "subscriptions": self.bus.table.count,
            **described(self.bus.dispatcher),
        }

    # --- from outside -----------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> Any:
        dispatcher = self.bus.dispatcher
        commands: dict[str, Callable[[], Any]] = {
            "status": self.status,
            "stop": lambda: dispatcher.stop_topic(
                _address(question, "topic"),
                _address(question, "receiver"),
                queue=bool(question.get("queue", True)),
            ),
            "start": lambda: dispatcher.start_topic(
                _address(question, "topic"), _address(question, "receiver")
            ),
            "retry": lambda: dispatcher.retry_dead_letters(self._letters(question)),
            "drop": lambda: dispatcher.dead_letters.drop(self._letters(question)),
        }
        command = str(question.get("command"))
        if command not in commands:
            raise InvalidOption("command", command, f"should be one of {', '.join(commands)}")
        return commands[command]()

    def _letters(self, question: dict[str, Any]) -> list[Letter]:
        missing = set(_ids(question))
        found: list[Letter] = []
        for letter in self.bus.dispatcher.dead_letters.since(int(question.get("from", 0))):
            if letter.id in missing:
                missing.discard(letter.id)
                found.append(letter)
                if not missing:
                    break
        if missing:
            names = sorted(map(str, missing))[:_NAMED]
            raise NotFound(f"there is no dead letter {', '.join(names)}")
        return found

    # --- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop receiving, deliver during the grace period, keep the rest."""
        if not self._is_stopped:
            self._is_stopped = True
            if self._control is not None:
                self._control.close()
            self.bus.dispatcher.stop(self.config.grace)

    def close(self) -> None:
        """Stop and release all resources.

        :raises StorageError: the device refuses.
        """
        self.stop()
        self._opened.close()


def _address(question: dict[str, Any], name: str) -> UUri:
    return UUri.parse(str(question[name])) if name in question else UUri.ANY


def _ids(question: dict[str, Any]) -> list[UUID7]:
    ids = question.get("ids")
    if not isinstance(ids, list):
        raise InvalidOption("ids", ids, "should be a list")
    return [UUID7.parse(str(id)) for id in ids]
