"""Which topic is behind an `up+zenoh:` or `up+mqtt:` URL?

As a reader it records a topic; as a writer it publishes to one. The attributes of a message are
its UAttributes, serialized; its time is that of its id.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, InstanceOf

from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import (
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    PositionError,
    StorageError,
)
from penstock.core.options import Duration, Options, Size, parse_options
from penstock.core.position import Position
from penstock.protocols.uprotocol.codes import UPayloadFormat, UPriority, UStatusError
from penstock.protocols.uprotocol.topic_reader import READER_NAME, TopicReader, await_connection
from penstock.protocols.uprotocol.topic_writer import TopicWriter
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check_filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.url import URL
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = [
    "MqttTopicOptions",
    "TopicOptions",
    "UpMqttEndpoint",
    "UpZenohEndpoint",
    "ZenohTopicOptions",
]

_EXAMPLE: Final = "up://vehicle1/10AB/1/8001"
#: Retry interval while the other side is not reachable (seconds).
_LOOK: Final = 0.02


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
    #: Our own authority; for a writer, by default that of the topic.
    authority: str | None = None
    #: Connection timeout.
    wait: Duration = 5.0
    #: Reader: after this time without a message, all existing messages count as read.
    quiet: Duration = 1.0
    #: Writer: the ttl of a message, from its publish.
    ttl: Annotated[Duration, Field(gt=0)] | None = None
    #: Writer: the priority class, CS0 to CS6.
    priority: Annotated[UPriority, BeforeValidator(_priority)] = UPriority.UNSPECIFIED
    #: Writer: the payload format.
    format: Annotated[UPayloadFormat, BeforeValidator(_format)] = UPayloadFormat.RAW
    #: Writer: publish recorded messages unchanged, with their ids and topics.
    replay: bool = False


class ZenohTopicOptions(TopicOptions):
    """Options of `up+zenoh://host:port/`."""

    #: Listen at the URL's address instead of connecting to it.
    listen: bool = False
    #: Writer: publish also without a subscriber; otherwise wait for one, up to `wait`.
    unheard: bool = False
    #: Writer: zenoh has no acknowledgements. A message counts as delivered if the link was not
    #: lost for this time, and is published again otherwise. More than 10 s also covers a receiver
    #: that hangs (zenoh's lease). Behind a router only the link to the router is observed.
    settle: Duration = 0.25


class MqttTopicOptions(TopicOptions):
    """Options of `up+mqtt://host:port/`."""

    topics: Literal["e2e", "d2d"] = "e2e"
    #: The destination authority of publishes between devices.
    sink: str | None = None
    #: The client id; with one the broker keeps messages while the reader is not connected.
    client_id: str = ""
    session_expiry: Annotated[Duration, Field(ge=0, le=0xFFFFFFFF)] = 3600.0
    clean_start: bool = False
    username: str | None = None
    #: Visible to others in a list of processes; prefer `password_file`.
    password: str | None = None
    password_file: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    #: Bytes of the largest packet.
    largest: Annotated[Size, Field(ge=128, le=268435455)] = 4 << 20


class _TopicEndpoint(Endpoint, ABC):
    """The common part of both endpoints."""

    can_be_reread = False
    _options: type[TopicOptions]
    _port: ClassVar[int]

    @abstractmethod
    def _connected(self, url: URL, options: Any, *, reading: bool) -> Leg:
        """Return a connected leg, unless the reader starts it.

        :raises ConnectionLost: the other side is not reachable.
        """

    def _parsed(self, url: URL) -> Any:
        if "@" in url.text.partition("?")[0]:
            raise InvalidURL(
                str(url),
                "there is a user before the host",
                hint="give username= and password_file= behind the ?",
            )
        try:
            options = parse_options(url, self._options)
        except InvalidOption as error:
            if error.option == "topic":
                error.hint = error.hint or f"write {url.scheme}://host/?topic={_EXAMPLE}"
            raise
        if options.authority is not None:
            problem = UUri.unchecked(options.authority, 0, 0, 0).problem
            if problem or options.authority in ("", "*"):
                raise InvalidOption(
                    "authority",
                    options.authority,
                    problem or "is not the name of one",
                    hint="it is who this side is, such as authority=recorder1",
                )
        return options

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, port=self._port, options=("topic",))

    def open_reader(self, url: URL, start: Position) -> Reader:
        options = self._parsed(url)
        _check_pattern(options.topic)
        if start not in {Position.START, Position.END}:
            raise PositionError(
                f"a topic cannot be read from {start}", hint="use start or end: what comes from now"
            )
        leg = self._connected(url, options, reading=True)
        return TopicReader(str(url), leg, options)

    def open_writer(self, url: URL) -> Writer:
        options = self._parsed(url)
        if not options.topic.is_topic or options.topic.has_wildcard:
            raise InvalidOption(
                "topic",
                str(options.topic),
                "is not one topic",
                hint="a topic's resource is from 8000 to FFFE",
            )
        leg = self._connected(url, options, reading=False)
        return TopicWriter(str(url), leg, options)


def _password(options: MqttTopicOptions) -> str | None:
    if options.password_file is None:
        return options.password
    if options.password is not None:
        raise InvalidOption("password_file", options.password_file, "there is a password already")
    try:
        return Path(options.password_file).read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise StorageError("reading", options.password_file, error) from error
    except UnicodeDecodeError:
        raise InvalidOption("password_file", options.password_file, "is not text") from None


def _check_pattern(topic: UUri) -> None:
    """Check, before connecting, that a pattern can match publishes.

    :raises InvalidOption: it is neither a topic nor a pattern of topics.
    """
    try:
        check_filter(topic, None)
    except UStatusError as error:
        raise InvalidOption(
            "topic",
            str(topic),
            error.message,
            hint=f"a topic is like {_EXAMPLE}: its last part is from 8000 to FFFE, or FFFF for all",
        ) from None


def _authority(options: TopicOptions, *, reading: bool) -> str:
    if options.authority:
        return options.authority
    return READER_NAME if reading else options.topic.authority_name or READER_NAME


def _nothing(messages: Sequence[bytes | UMessage]) -> None:
    """Ignore messages: a writer receives none."""
    del messages


class UpZenohEndpoint(_TopicEndpoint):
    """`up+zenoh://host:7447/?topic=up://…`: a topic of uProtocol on zenoh."""

    _options = ZenohTopicOptions
    _port = 7447

    def _connected(self, url: URL, options: ZenohTopicOptions, *, reading: bool) -> Leg:
        from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink  # noqa: PLC0415

        if not url.host:
            raise InvalidURL(
                url.text, "it names no host", hint="write up+zenoh://host:7447/?topic=…"
            )
        host = f"[{url.host}]" if ":" in url.host else url.host
        place = [f"tcp/{host}:{url.port or self._port}"]
        link = ZenohLink(
            _authority(options, reading=reading),
            listen=place if options.listen else (),
            connect=() if options.listen else place,
        )
        deadline = time.monotonic() + options.wait
        while not options.listen and not link.is_connected:
            if time.monotonic() >= deadline:
                link.close()
                raise ConnectionLost(
                    url.text,
                    f"nobody answered within {options.wait:g} s",
                    hint="is a zenoh router or peer listening there? zenohd is one, and so is the "
                    "other side of this topic opened with listen=true; wait=1m waits longer",
                )
            time.sleep(_LOOK)
        return ZenohLeg(
            "endpoint", link, must_be_heard=not options.unheard, settle_after=options.settle
        )


class UpMqttEndpoint(_TopicEndpoint):
    """`up+mqtt://broker:1883/?topic=up://…`: a topic of uProtocol on an MQTT 5 broker."""

    _options = MqttTopicOptions
    _port = 1883

    def _connected(self, url: URL, options: MqttTopicOptions, *, reading: bool) -> Leg:
        from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg  # noqa: PLC0415

        if not url.host:
            raise InvalidURL(
                url.text, "it names no broker", hint="write up+mqtt://host:1883/?topic=…"
            )
        broker = MqttBroker(
            host=url.host,
            port=url.port or (8883 if options.tls else self._port),
            client_id=options.client_id,
            session_expiry=int(options.session_expiry),
            clean_start=options.clean_start,
            username=options.username,
            password=_password(options),
            tls=options.tls,
            ca=options.ca,
            certificate=options.certificate,
            key=options.key,
            largest_packet=options.largest,
        )
        leg = MqttLeg(
            "endpoint", _authority(options, reading=reading), broker, topics=options.topics
        )
        if not reading:
            leg.start(_nothing, ())
            await_connection(str(url), leg, options.wait)
        return leg
