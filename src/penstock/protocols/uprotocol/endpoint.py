"""Which topic is behind an `up+zenoh:` or `up+mqtt:` URL?

As a reader it records a topic; as a writer it publishes to one. The attributes of a message are
its UAttributes, serialized; its time is that of its id.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from penstock.core.endpoints import Endpoint
from penstock.core.errors import ConnectionLost, InvalidOption, InvalidURL, PositionError
from penstock.core.options import parse_options
from penstock.core.position import Position
from penstock.protocols.uprotocol.endpoint_options import (
    MqttTopicOptions,
    TopicOptions,
    ZenohTopicOptions,
)
from penstock.protocols.uprotocol.endpoint_reading import (
    READER_NAME,
    TopicReader,
    await_connection,
)
from penstock.protocols.uprotocol.endpoint_writing import TopicWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.url import URL
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = ["TopicReader", "TopicWriter", "UpMqttEndpoint", "UpZenohEndpoint"]

#: While nobody is there, look again this often (seconds).
_LOOK: Final = 0.02


class _TopicEndpoint(Endpoint):
    """What both have in common."""

    _options: type[TopicOptions]

    def _connected(self, url: URL, options: Any, *, reading: bool) -> Leg:
        raise NotImplementedError

    def open_reader(self, url: URL, start: Position) -> Reader:
        options = parse_options(url, self._options)
        if start not in {Position.START, Position.END}:
            raise PositionError(
                f"a topic cannot be read from {start}", hint="use start or end: what comes from now"
            )
        leg = self._connected(url, options, reading=True)
        return TopicReader(url.text, leg, options)

    def open_writer(self, url: URL) -> Writer:
        options = parse_options(url, self._options)
        if not options.topic.is_topic or options.topic.has_wildcard:
            raise InvalidOption(
                "topic",
                str(options.topic),
                "is not one topic",
                hint="a topic's resource is from 8000 to FFFE",
            )
        leg = self._connected(url, options, reading=False)
        return TopicWriter(url.text, leg, options)


def _authority(options: TopicOptions, *, reading: bool) -> str:
    if options.authority:
        return options.authority
    return READER_NAME if reading else options.topic.authority_name or READER_NAME


def _nothing(messages: Sequence[bytes | UMessage]) -> None:
    """Take what a writer receives, which is nothing."""
    del messages


class UpZenohEndpoint(_TopicEndpoint):
    """`up+zenoh://host:7447/?topic=up://…`: a topic of uProtocol on zenoh."""

    _options = ZenohTopicOptions

    def _connected(self, url: URL, options: ZenohTopicOptions, *, reading: bool) -> Leg:
        from penstock.protocols.uprotocol.transports.zenoh import (  # noqa: PLC0415 - an extra
            ZenohLeg,
            ZenohLink,
        )

        if not url.host:
            raise InvalidURL(
                url.text, "it names no host", hint="write up+zenoh://host:7447/?topic=…"
            )
        host = f"[{url.host}]" if ":" in url.host else url.host
        place = [f"tcp/{host}:{url.port or 7447}"]
        link = ZenohLink(
            _authority(options, reading=reading),
            listen=place if options.listen else (),
            connect=() if options.listen else place,
        )
        deadline = time.monotonic() + options.wait
        while not options.listen and not link.is_connected:
            if time.monotonic() >= deadline:
                link.close()
                raise ConnectionLost(url.text, f"nobody answered within {options.wait:g} s")
            time.sleep(_LOOK)
        return ZenohLeg("endpoint", link, must_be_heard=not options.unheard)


class UpMqttEndpoint(_TopicEndpoint):
    """`up+mqtt://broker:1883/?topic=up://…`: a topic of uProtocol on an MQTT 5 broker."""

    _options = MqttTopicOptions

    def _connected(self, url: URL, options: MqttTopicOptions, *, reading: bool) -> Leg:
        from penstock.protocols.uprotocol.transports.mqtt import (  # noqa: PLC0415 - an extra
            MqttBroker,
            MqttLeg,
        )

        if not url.host:
            raise InvalidURL(
                url.text, "it names no broker", hint="write up+mqtt://host:1883/?topic=…"
            )
        broker = MqttBroker(
            host=url.host,
            port=url.port or (8883 if options.tls else 1883),
            client_id=options.client_id,
            session_expiry=int(options.session_expiry),
            clean_start=options.clean_start,
            username=options.username,
            password=options.password,
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
            await_connection(url.text, leg, options.wait)
        return leg
