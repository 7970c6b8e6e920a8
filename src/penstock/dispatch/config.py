"""What does a bus.yaml say: which legs, routes, policies, rights, limits and services?"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Literal, Self

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
from penstock.core.delivery import DeliveryPolicy
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.core.retry import Backoff
from penstock.dispatch.access import Action, Rule
from penstock.dispatch.leg_config import Authority, LegConfig, check_authority
from penstock.dispatch.policies import Delivery, Policy
from penstock.dispatch.settings import Limits, Retry
from penstock.dispatch.tokens import TokenRule, load_check
from penstock.protocols.uprotocol import UUri

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AccessConfig",
    "BusConfig",
    "DiscoveryConfig",
    "ServicesConfig",
    "SubscriptionConfig",
    "TokenConfig",
    "TwinConfig",
    "USubscriptionConfig",
    "load_bus",
]


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
    """Where messages go whose authority is behind no leg."""

    default: str | None = None


class PolicyConfig(ConfigModel):
    """What is promised to topics; the first that matches counts."""

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
    """Something that is allowed. Without any rule everything is."""

    allow: Annotated[list[Action], BeforeValidator(_one_or_many), Field(min_length=1)]
    source: Address = UUri.ANY
    #: To whom; of `subscribe`, the topic.
    sink: Address = UUri.ANY

    def rules(self, authority: str) -> list[Rule]:
        source, sink = self.source.resolved(authority), self.sink.resolved(authority)
        return [Rule(allow=action, source=source, sink=sink) for action in self.allow]


class TokenConfig(ConfigModel):
    """What the requests of some sources have to bring with them."""

    source: Address = UUri.ANY
    #: Of the tokens that are accepted.
    sha256: Annotated[list[_Digest], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    #: A function of the token and the source that accepts others: module:function.
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
    """What bounds all that comes from outside."""

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
    """When a delivery that failed is tried again."""

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
    """The service that keeps subscriptions."""

    subscriptions: Annotated[int, Field(ge=1)] = 10_000
    registrations: Annotated[int, Field(ge=1)] = 1_000
    #: Authorities that have no uSubscription: their topics count as our own; "*" is all.
    serves: list[Authority] = Field(default_factory=list)


class TwinConfig(ConfigModel):
    """The service that remembers the last message of each topic."""

    topics: Annotated[int, Field(ge=1)] = 10_000
    size: Size = 64 << 20


class TopicConfig(ConfigModel):
    """A topic that uDiscovery tells of."""

    topic: Address
    name: str = ""
    message: str = ""
    permission_level: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 0


class DiscoveryConfig(ConfigModel):
    """The service that tells of services and topics."""

    services: list[Address] = Field(default_factory=list)
    topics: list[TopicConfig] = Field(default_factory=list)
    #: For how long a topic is told of after something was published on it.
    seen_for: Duration = 3600.0


class ServicesConfig(ConfigModel):
    """The services inside the dispatcher; `false` for none."""

    subscription: USubscriptionConfig | Literal[False] = USubscriptionConfig()
    twin: TwinConfig | Literal[False] = TwinConfig()
    discovery: DiscoveryConfig | Literal[False] = DiscoveryConfig()


class SubscriptionConfig(ConfigModel):
    """A subscription that is always there."""

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
    """A dispatcher: what it is called, where it keeps things, and what it is connected to."""

    dispatcher: _Name
    authority: _OwnAuthority
    #: The folder of all that outlives the process, relative to the file.
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
    #: The topic of dead letters; without it `//authority/4/1/8001`.
    dead_letters: Address | None = None
    #: How often what is stored is brought to the disk: a time, with every `batch`, or `none`.
    sync: Literal["none", "batch"] | Duration = 1.0
    #: For how long it goes on to deliver after it was told to stop.
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


#: What the leg is called that leads to the services.
SERVICES_LEG = "services"


def load_bus(path: Path) -> BusConfig:
    """Read a bus.yaml. Paths in it are relative to it.

    :raises ConfigError: the file is not right; says where.
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
