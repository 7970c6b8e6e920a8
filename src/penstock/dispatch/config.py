"""What does a bus.yaml say: which legs, routes, policies, rights, limits and services?"""

from __future__ import annotations

import re
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.core.config import ConfigModel, load_config
from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.core.retry import Backoff
from penstock.dispatch.access import Action, Rule, TokenRule, load_check
from penstock.dispatch.settings import Delivery, Limits, Policy, Rate, Retry
from penstock.protocols.uprotocol import UUri
from penstock.queue.endpoint import is_queue

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AccessConfig",
    "Authority",
    "BusConfig",
    "DiscoveryConfig",
    "InProcessConfig",
    "LegConfig",
    "MqttConfig",
    "RingConfig",
    "ServicesConfig",
    "SubscriptionConfig",
    "TokenConfig",
    "TwinConfig",
    "USubscriptionConfig",
    "ZenohConfig",
    "check_authority",
    "load_bus",
]


def check_authority(name: str) -> str:
    """Validate and return the name of an authority."""
    if not name:
        raise ValueError("an authority has a name")
    UUri(name, 0, 0, 0)
    return name


def _ring(text: str) -> str:
    if not is_queue(text):
        raise ValueError("should be a ring: fmq:/path/name")
    return text


def _rings(text: str) -> str:
    for field in re.findall(r"\{\w*\}", _ring(text)):
        if field not in {"{authority}", "{ue_id}", "{ue_version}"}:  # or all get one ring
            raise ValueError(f"{field} is no field: use {{authority}}, {{ue_id}}, {{ue_version}}")
    return text


Authority = Annotated[str, AfterValidator(check_authority)]
_RingUrl = Annotated[str, AfterValidator(_ring)]
_RingsUrl = Annotated[str, AfterValidator(_rings)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RingConfig(ConfigModel):
    """Entities of this machine, each with a ring of its own."""

    #: The ring that all of them append to.
    receive: _RingUrl | None = None
    #: The ring of a receiver, with {authority}, {ue_id} or {ue_version} in it.
    send: _RingsUrl | None = None


class InProcessConfig(ConfigModel):
    """Entities of this process, for programs that run a dispatcher themselves."""


class ZenohConfig(ConfigModel):
    """Entities or dispatchers reached over zenoh."""

    listen: list[str] = Field(default_factory=list)
    connect: list[str] = Field(default_factory=list)
    mode: Literal["peer", "client", "router"] = "peer"
    scouting: bool = False
    #: Whether a message waits until its receiver subscribes.
    must_be_heard: bool = True
    #: Time after which a sent message counts as delivered: zenoh has no acknowledgements.
    settle_after: Duration = 0.25
    #: Further settings of zenoh by their path, as `transport/link/tls/…`.
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_meet(self) -> Self:
        if not (self.listen or self.connect or self.scouting):
            raise ValueError("meets nobody: give listen or connect, such as tcp/127.0.0.1:7447")
        return self


class MqttConfig(ConfigModel):
    """Entities or dispatchers reached through an MQTT 5 broker."""

    url: str
    #: `e2e` within a vehicle, `d2d` between devices.
    topics: Literal["e2e", "d2d"] = "e2e"
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    #: The client id of the session; by default derived from the dispatcher's name.
    client_id: str | None = None
    session_expiry: Duration = 3600.0
    clean_start: bool = False
    keepalive: Duration = 30.0
    window: int = 256
    receive_maximum: int = 1024
    largest_packet: Size = 4 << 20
    connect_timeout: Duration = 5.0
    ack_timeout: Duration = 5.0
    must_be_heard: bool = True
    #: Also send the ttl in milliseconds, so that the broker does not shorten it.
    exact_ttl: bool = True


class LegConfig(ConfigModel):
    """One transport, and the authorities behind it."""

    ring: RingConfig | None = None
    in_process: InProcessConfig | None = Field(default=None, alias="in-process")
    zenoh: ZenohConfig | None = None
    mqtt: MqttConfig | None = None
    #: The authorities that may send by it and are reached by it; "*" is any.
    authorities: list[Authority] = Field(default_factory=list)
    #: Bytes of a message that it carries, at most.
    message: Size | None = None
    #: Messages per second accepted from it, and from each entity behind it, at most.
    rate: _Rate | None = None
    source_rate: _Rate | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [self.ring, self.in_process, self.zenoh, self.mqtt]
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("should have one of ring, in-process, zenoh or mqtt")
        return self

    @property
    def kind(self) -> str:
        """The name of the transport, for people."""
        for kind in ("ring", "zenoh", "mqtt"):
            if getattr(self, kind) is not None:
                return kind
        return "in-process"

    @property
    def bounds(self) -> Rate:
        """The rate limits of incoming messages."""
        return Rate(leg=self.rate, source=self.source_rate)


def _uuri(value: object) -> object:
    return UUri.parse(value) if isinstance(value, str) else value


def _queue(value: object) -> object:
    return DeliveryPolicy.parse(value) if isinstance(value, str) else value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _own_name(name: str) -> str:
    if name == "*":
        raise ValueError("stands for all others: give a name of your own")
    return check_authority(name)


Address = Annotated[InstanceOf[UUri], BeforeValidator(_uuri)]
_OwnAuthority = Annotated[str, AfterValidator(_own_name)]
_Digest = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")]
_Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]


# --- what holds for messages ------------------------------------------------------------------


class RoutesConfig(ConfigModel):
    """Routes of messages whose authority is behind no leg."""

    default: str | None = None


class PolicyConfig(ConfigModel):
    """The delivery policy of some topics; the first match applies."""

    topic: Address = UUri.ANY
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    queue: Annotated[InstanceOf[DeliveryPolicy], BeforeValidator(_queue)] = DeliveryPolicy.UNLIMITED
    order: Literal["arrival", "priority"] = "arrival"
    max_age: Duration | None = Policy().max_age
    max_attempts: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.policy()
        return self

    def policy(self) -> Policy:
        return Policy(**{name: getattr(self, name) for name in type(self).model_fields})


class AccessConfig(ConfigModel):
    """A permission. Without any rule everything is allowed."""

    allow: Annotated[list[Action], BeforeValidator(_one_or_many), Field(min_length=1)]
    source: Address = UUri.ANY
    #: The receiver; for `subscribe`, the topic.
    sink: Address = UUri.ANY

    def rules(self, authority: str) -> list[Rule]:
        source, sink = self.source.resolved(authority), self.sink.resolved(authority)
        return [Rule(allow=action, source=source, sink=sink) for action in self.allow]


class TokenConfig(ConfigModel):
    """The tokens that requests of some sources must carry one of."""

    source: Address = UUri.ANY
    #: SHA-256 of accepted tokens, in hexadecimal.
    sha256: Annotated[list[_Digest], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    #: A function of the token and the source that accepts further tokens: module:function.
    check: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None

    @model_validator(mode="after")
    def _accepts_something(self) -> Self:
        if not self.sha256 and self.check is None:
            raise ValueError("accepts no token: give sha256 or check")
        return self

    def rule(self, authority: str) -> TokenRule:
        """Return the rule.

        :raises InvalidOption: the function cannot be loaded.
        """
        return TokenRule(
            source=self.source.resolved(authority),
            sha256=frozenset(digest.lower() for digest in self.sha256),
            check=None if self.check is None else load_check(self.check),
        )


class LimitsConfig(ConfigModel):
    """The limits of everything that comes from outside."""

    message: Size = Limits().message
    queue_messages: Size = Limits().queue_messages
    queue_bytes: Size = Limits().queue_bytes
    receivers: Size = Limits().receivers
    dead: Size = Limits().dead
    quarantine: Size = Limits().quarantine
    dedupe: Size = Limits().dedupe
    batch: Size = Limits().batch
    batch_bytes: Size = Limits().batch_bytes
    linger: Duration = Limits().linger
    clock_skew: Duration = Limits().clock_skew

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.limits({})
        return self

    def limits(self, legs: Mapping[str, LegConfig]) -> Limits:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        sizes = {name: leg.message for name, leg in legs.items() if leg.message is not None}
        rates = {name: leg.bounds for name, leg in legs.items()}
        return Limits(leg_messages=sizes, leg_rates=rates, **given)


class RetryConfig(ConfigModel):
    """When a failed delivery is retried."""

    initial: Duration = Backoff().initial
    factor: float = Backoff().factor
    maximum: Duration = Backoff().maximum
    jitter: float = Backoff().jitter
    max_attempts: Annotated[int, Field(ge=1)] | None = Retry().max_attempts

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.retry()
        return self

    def retry(self) -> Retry:
        backoff = Backoff(
            initial=self.initial, factor=self.factor, maximum=self.maximum, jitter=self.jitter
        )
        return Retry(backoff=backoff, max_attempts=self.max_attempts)


# --- services ---------------------------------------------------------------------------------


class USubscriptionConfig(ConfigModel):
    """The subscription service."""

    subscriptions: Annotated[int, Field(ge=1)] = 10_000
    registrations: Annotated[int, Field(ge=1)] = 1_000
    #: Authorities without a uSubscription, whose topics are managed here; "*" is all.
    serves: list[Authority] = Field(default_factory=list)


class TwinConfig(ConfigModel):
    """The service that remembers the last message of each topic."""

    topics: Annotated[int, Field(ge=1)] = 10_000
    size: Size = 64 << 20


class TopicConfig(ConfigModel):
    """A topic that uDiscovery lists."""

    topic: Address
    name: str = ""
    message: str = ""
    permission_level: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 0


class DiscoveryConfig(ConfigModel):
    """The service that lists services and topics."""

    services: list[Address] = Field(default_factory=list)
    topics: list[TopicConfig] = Field(default_factory=list)
    #: How long a topic is listed after its last publish.
    seen_for: Duration = 3600.0


class ServicesConfig(ConfigModel):
    """The services inside the dispatcher; `false` disables one."""

    subscription: USubscriptionConfig | Literal[False] = USubscriptionConfig()
    twin: TwinConfig | Literal[False] = TwinConfig()
    discovery: DiscoveryConfig | Literal[False] = DiscoveryConfig()


class SubscriptionConfig(ConfigModel):
    """A permanent subscription."""

    topic: Address
    subscriber: Address
    sample_period: Duration | None = None

    @field_validator("topic")
    @classmethod
    def _is_topic(cls, topic: UUri) -> UUri:
        if not topic.is_topic and not topic.has_wildcard_resource_id:
            raise ValueError("should be a topic: its resource is one of 8000 to FFFE")
        return topic


# --- all of it --------------------------------------------------------------------------------


class BusConfig(ConfigModel):
    """A dispatcher: its name, its state folder and its connections."""

    dispatcher: _Name
    authority: _OwnAuthority
    #: The folder of the persistent state, relative to the file.
    state: Path
    legs: Annotated[dict[_Name, LegConfig], Field(min_length=1, max_length=64)]
    routes: RoutesConfig = RoutesConfig()
    policies: list[PolicyConfig] = Field(default_factory=list)
    access: list[AccessConfig] = Field(default_factory=list)
    tokens: list[TokenConfig] = Field(default_factory=list)
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    services: ServicesConfig = ServicesConfig()
    subscriptions: list[SubscriptionConfig] = Field(default_factory=list)
    #: The topic of dead letters; by default `//authority/4/1/8001`.
    dead_letters: Address | None = None
    #: When stored messages are synced: at an interval, with every `batch`, or `none`.
    sync: Literal["none", "batch"] | Duration = 1.0
    #: How long it continues to deliver after it was told to stop.
    grace: Duration = 2.0

    @field_validator("legs")
    @classmethod
    def _have_own_authorities(cls, legs: dict[str, LegConfig]) -> dict[str, LegConfig]:
        leg_of: dict[str, str] = {}
        for name, leg in legs.items():
            if name == SERVICES_LEG:
                raise ValueError(f"{SERVICES_LEG} is the leg of the services: use another name")
            for authority in leg.authorities:
                if authority != "*" and leg_of.setdefault(authority, name) != name:
                    raise ValueError(
                        f"{authority} is behind {leg_of[authority]} and behind {name}: "
                        "an authority is behind one leg"
                    )
        return legs

    @field_validator("routes")
    @classmethod
    def _lead_somewhere(cls, routes: RoutesConfig, info: ValidationInfo) -> RoutesConfig:
        legs = info.data.get("legs", {})
        if routes.default is not None and legs and routes.default not in legs:
            raise ValueError(f"default is {routes.default}, and the legs are {', '.join(legs)}")
        return routes


#: The name of the leg to the services.
SERVICES_LEG = "services"


def load_bus(path: Path) -> BusConfig:
    """Read a bus.yaml. Paths in it are relative to it.

    :raises ConfigError: the file is invalid; the error says where.
    """
    config = load_config(path, BusConfig)
    folder = path.parent
    legs = {}
    for name, leg in config.legs.items():
        if leg.mqtt is not None:
            files = {
                one: folder / given
                for one in ("ca", "certificate", "key")
                if (given := getattr(leg.mqtt, one)) is not None
            }
            leg = leg.model_copy(update={"mqtt": leg.mqtt.model_copy(update=files)})  # noqa: PLW2901
        legs[name] = leg
    return config.model_copy(update={"state": folder / config.state, "legs": legs})
