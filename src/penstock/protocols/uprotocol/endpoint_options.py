"""What can be asked of a topic in its URL?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, InstanceOf

from penstock.core.options import Duration, Options, Size
from penstock.protocols.uprotocol.codes import UPayloadFormat, UPriority
from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["MqttTopicOptions", "TopicOptions", "ZenohTopicOptions"]


def _uuri(value: object) -> object:
    return UUri.parse(value) if isinstance(value, str) else value


def _priority(value: object) -> object:
    return UPriority.from_name(value) if isinstance(value, str) else value


def _format(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return UPayloadFormat[value.upper()]
    except KeyError:
        names = ", ".join(it.name.lower() for it in UPayloadFormat if it)
        raise ValueError(f"is none of {names}") from None


class TopicOptions(Options):
    """Options of `up+zenoh:` and `up+mqtt:` alike."""

    #: The topic to publish to, or a pattern of the topics to read.
    topic: Annotated[InstanceOf[UUri], BeforeValidator(_uuri)]
    #: Who this is; for a writer, unless it is said, whose the topic is.
    authority: str | None = None
    #: Fail when the other side cannot be reached within this time.
    wait: Duration = 5.0
    #: Reader: what is there now is all here when nothing came for so long.
    quiet: Duration = 1.0
    #: Writer: how long a message is of use, from when it is published.
    ttl: Annotated[Duration, Field(gt=0)] | None = None
    #: Writer: the class, CS0 to CS6.
    priority: Annotated[UPriority, BeforeValidator(_priority)] = UPriority.UNSPECIFIED
    #: Writer: what the payloads are.
    format: Annotated[UPayloadFormat, BeforeValidator(_format)] = UPayloadFormat.RAW
    #: Writer: publish messages that were recorded from a topic just as they were, with their
    #: ids and topics.
    replay: bool = False


class ZenohTopicOptions(TopicOptions):
    """Options of `up+zenoh://host:port/`."""

    #: Be the one that others connect to, at the URL's address.
    listen: bool = False
    #: Writer: publish also when nobody subscribes; else wait for somebody, as long as `wait`.
    unheard: bool = False
    #: Writer: zenoh acknowledges nothing. A message counts as delivered when the link was not lost
    #: for this time, and is published again otherwise. More than 10 s also covers a receiver that
    #: hangs, which zenoh gives up on then. Behind a router only the link to it is seen.
    settle: Duration = 0.25


class MqttTopicOptions(TopicOptions):
    """Options of `up+mqtt://host:port/`."""

    topics: Literal["e2e", "d2d"] = "e2e"
    #: Whom publishes between devices are for.
    sink: str | None = None
    #: The session's name; with one the broker keeps messages while nobody reads.
    client_id: str = ""
    session_expiry: Annotated[Duration, Field(ge=0, le=0xFFFFFFFF)] = 3600.0
    clean_start: bool = False
    username: str | None = None
    #: What others can read in a list of processes; better in a file, which `password_file` names.
    password: str | None = None
    password_file: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    #: Bytes of the largest packet.
    largest: Annotated[Size, Field(ge=128, le=268435455)] = 4 << 20
