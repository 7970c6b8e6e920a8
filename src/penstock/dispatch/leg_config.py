"""What does a bus.yaml say of a leg: which transport, and who is behind it?"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.core.config import ConfigModel
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.dispatch.rates import Rate
from penstock.protocols.uprotocol import UUri
from penstock.queue.endpoint import is_queue

__all__ = [
    "Authority",
    "InProcessConfig",
    "LegConfig",
    "MqttConfig",
    "RingConfig",
    "ZenohConfig",
    "check_authority",
]


def check_authority(name: str) -> str:
    """Return the name of an authority, if it can be one."""
    if not name:
        raise ValueError("an authority has a name")
    UUri(name, 0, 0, 0)
    return name


def _ring(text: str) -> str:
    if not is_queue(text):
        raise ValueError("should be a ring: fmq:/path/name")
    return text


Authority = Annotated[str, AfterValidator(check_authority)]
_RingUrl = Annotated[str, AfterValidator(_ring)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RingConfig(ConfigModel):
    """Entities of this machine, each with a ring of its own."""

    #: The ring that they all append to.
    receive: _RingUrl | None = None
    #: The ring of a receiver, with {authority}, {ue_id} or {ue_version} in it.
    send: _RingUrl | None = None


class InProcessConfig(ConfigModel):
    """Entities of this process, for programs that run a dispatcher themselves."""


class ZenohConfig(ConfigModel):
    """Entities or dispatchers that are reached by zenoh."""

    listen: list[str] = Field(default_factory=list)
    connect: list[str] = Field(default_factory=list)
    mode: Literal["peer", "client", "router"] = "peer"
    scouting: bool = False
    #: Whether a message waits until somebody subscribes to it.
    must_be_heard: bool = True
    #: How long after it was put a message counts as delivered: zenoh acknowledges nothing.
    settle_after: Duration = 0.25
    #: Further settings of zenoh by their path, as `transport/link/tls/…`.
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_meet(self) -> Self:
        if not (self.listen or self.connect or self.scouting):
            raise ValueError("meets nobody: give listen or connect, such as tcp/127.0.0.1:7447")
        return self


class MqttConfig(ConfigModel):
    """Entities or dispatchers that are reached by an MQTT 5 broker."""

    url: str
    #: `e2e` within a vehicle, `d2d` between devices.
    topics: Literal["e2e", "d2d"] = "e2e"
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    #: The broker keeps the session under this name; without it one is made of the dispatcher's.
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
    #: Send the ttl in milliseconds, too, so that it does not shrink while the broker has it.
    exact_ttl: bool = True


class LegConfig(ConfigModel):
    """One transport, and which authorities are behind it."""

    ring: RingConfig | None = None
    in_process: InProcessConfig | None = Field(default=None, alias="in-process")
    zenoh: ZenohConfig | None = None
    mqtt: MqttConfig | None = None
    #: Only these may send by it, and what is for them goes there; "*" is any.
    authorities: list[Authority] = Field(default_factory=list)
    #: Bytes of a message at most that it carries.
    message: Size | None = None
    #: Messages a second at most that may come by it, and from each entity behind it.
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
        """What it is, for people."""
        for kind in ("ring", "zenoh", "mqtt"):
            if getattr(self, kind) is not None:
                return kind
        return "in-process"

    @property
    def bounds(self) -> Rate:
        """How fast messages may come by it."""
        return Rate(leg=self.rate, source=self.source_rate)
