"""Which MQTT broker is connected to, how, and is it connected now?"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from penstock.core.errors import InvalidOption, InvalidURL, StorageError, Unsupported
from penstock.protocols.uprotocol.codes import UCode, UStatus

try:
    import paho.mqtt.client
    from paho.mqtt.client import Client
    from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties
    from paho.mqtt.subscribeoptions import SubscribeOptions
except ImportError as missing:
    raise Unsupported(
        "uProtocol over MQTT needs the paho-mqtt library", hint="pip install 'penstock[mqtt]'"
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SILENT", "Connection", "MqttBroker", "connect", "hang_up", "make_client", "subscribe"]

_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
#: Log only errors of the library: broken connections are reported by the status.
_log: Final = logging.getLogger(__name__)
_log.addFilter(lambda record: "exception" in record.getMessage())
SILENT: Final = UStatus(UCode.UNAVAILABLE, "the broker does not acknowledge")


class _Select:
    """The part of the module `select` that the MQTT library uses, without its limit.

    `select.select` refuses descriptors above 1,023, which the library takes for a lost connection.
    """

    @staticmethod
    def select(
        readers: Sequence[socket.socket],
        writers: Sequence[socket.socket],
        _: Sequence[socket.socket],
        timeout: float,
    ) -> tuple[list[socket.socket], list[socket.socket], list[socket.socket]]:
        poll = select.poll()
        for each in readers:
            poll.register(each, select.POLLIN)
        for each in writers:
            poll.register(each, select.POLLOUT | (select.POLLIN if each in readers else 0))
        found = dict(poll.poll(math.ceil(timeout * 1000)))
        if not found:
            return [], [], []
        # What is broken is ready for everything: reading and writing tell why.
        return (
            [each for each in readers if found.get(each.fileno(), 0) & ~select.POLLOUT],
            [each for each in writers if found.get(each.fileno(), 0) & ~select.POLLIN],
            [],
        )


paho.mqtt.client.select = _Select  # type: ignore[attr-defined, assignment]


class _TlsSocket(ssl.SSLSocket):
    """A socket that is closed after a failed TLS handshake; the MQTT library leaves it open."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttBroker:
    """How to connect to a broker. With `tls`, its certificate is checked.

    :raises InvalidOption: a number is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    #: The client id. Without one it is random, and the session ends with the connection.
    client_id: str = ""
    #: How long the broker keeps the session and its messages after a disconnect (seconds).
    session_expiry: int = 3600
    #: Whether the first connection discards an existing session.
    clean_start: bool = False
    keepalive: int = 30
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    #: Files: the CA of the broker's certificate, and our own certificate and key.
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    #: Messages sent and not yet acknowledged by the broker, at most.
    window: int = 256
    #: Messages received and not yet acknowledged by us, at most.
    receive_maximum: int = 1024
    #: Bytes of a packet sent or received, at most.
    largest_packet: int = 4 << 20
    #: Timeouts of connecting, and of the acknowledgement of a message (seconds).
    connect_timeout: float = 5.0
    ack_timeout: float = 5.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 1, 65535),
            ("session_expiry", 0, 0xFFFFFFFF),
            ("keepalive", 1, 65535),
            ("window", 1, 65535),
            ("receive_maximum", 1, 65535),
            ("largest_packet", 128, 268435455),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidOption(name, value, f"must be from {least} to {most}")
        for name in ("connect_timeout", "ack_timeout"):
            if not 0 < getattr(self, name) < 1e6:  # noqa: PLR2004 - what no clock overflows with
                raise InvalidOption(name, getattr(self, name), "must be above 0 seconds")
        if self.key and not self.certificate:
            raise InvalidOption("key", self.key, "is of no use without `certificate`")

    @classmethod
    def parse(cls, url: str, **options: object) -> MqttBroker:
        """Parse `mqtt://user:password@host:1883` or `mqtts://…`; other options as keywords.

        :raises InvalidURL: it is no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidURL(url, "it is not a broker", hint="write mqtt://host:1883 or mqtts://…")
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidURL(url, str(error)) from None
        if parts.path not in ("", "/") or parts.query:
            raise InvalidURL(url, "a broker has no path and no options")
        made = cls(
            host=parts.hostname,
            port=_PORTS[parts.scheme] if port is None else port,
            tls=parts.scheme == "mqtts",
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
        )
        try:
            return replace(made, **options)  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidOption("mqtt", sorted(options), str(error)) from None

    @property
    def is_lasting(self) -> bool:
        """Whether the session survives a disconnect."""
        return bool(self.client_id) and self.session_expiry > 0

    @property
    def redelivers(self) -> bool:
        """Whether a later process gets what this one has not acknowledged."""
        return self.is_lasting and not self.clean_start

    def context(self) -> ssl.SSLContext | None:
        """Create the TLS context, or None for plain TCP.

        :raises StorageError: a file cannot be read.
        :raises InvalidOption: a file is invalid.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise InvalidOption("ca, certificate or key", self.certificate, str(error)) from error
        except OSError as error:
            raise StorageError("reading", str(error.filename or self.ca), error) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _TlsSocket
        return context


def make_client(broker: MqttBroker, context: ssl.SSLContext | None) -> Client:
    """Create a client for one connection; the caller handles the window and reconnecting."""
    client = Client(
        CallbackAPIVersion.VERSION2,
        client_id=broker.client_id,
        protocol=MQTTProtocolVersion.MQTTv5,
        reconnect_on_failure=False,
        manual_ack=True,
    )
    client.connect_timeout = broker.connect_timeout
    client.max_inflight_messages_set(0)  # the window is kept by the link
    client.suppress_exceptions = True  # logged by the library; its thread goes on
    client.enable_logger(_log)
    if broker.username is not None:
        client.username_pw_set(broker.username, broker.password)
    if context is not None:
        client.tls_set_context(context)
    return client


def connect(client: Client, broker: MqttBroker, *, is_first: bool) -> None:
    """Connect, and start the library's thread; `on_connect` gets the result.

    :raises OSError: the broker is not reachable.
    """
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = broker.session_expiry if broker.is_lasting else 0
    properties.ReceiveMaximum = broker.receive_maximum
    properties.MaximumPacketSize = broker.largest_packet
    client.connect(
        broker.host,
        broker.port,
        broker.keepalive,
        clean_start=not broker.is_lasting or (is_first and broker.clean_start),
        properties=properties,
    )
    client.loop_start()


def subscribe(
    client: Client, topic_filter: str, *, echo: bool, identifier: int | None
) -> tuple[Any, int | None]:
    """Subscribe to a filter; return the library's code and the packet's number."""
    options = SubscribeOptions(
        qos=1, noLocal=not echo, retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND
    )
    properties = None
    if identifier is not None:
        properties = Properties(PacketTypes.SUBSCRIBE)  # type: ignore[no-untyped-call]
        properties.SubscriptionIdentifier = identifier
    return client.subscribe(topic_filter, options=options, properties=properties)


def hang_up(client: Client) -> None:
    """Close the connection and end the library's thread, in any state."""
    client.drop_out_messages()  # the library would wait for their acknowledgement
    connection = client.socket()
    if connection is not None:
        with contextlib.suppress(OSError, AttributeError):
            connection.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    client.loop_stop()


class Connection:
    """The shared state of a link. Changes need its lock."""

    def __init__(self, client: Client) -> None:
        #: The lock, and a condition for changes. Never call the library while holding it: the
        #: library has its own locks, and calls back while it holds them.
        self.changed = threading.Condition()
        #: The library's client, one for each connection.
        self.client = client
        #: The number of the connection, from 1.
        self.number = 0
        self.is_up = False
        #: The number of the connection that the session began with.
        self.session_began = 0
        self.why_down = UStatus(UCode.UNAVAILABLE, "the broker is not connected yet")

    def begin(self, *, is_resumed: bool) -> None:
        self.number += 1
        if not is_resumed:
            self.session_began = self.number
        self.is_up = True
        self.changed.notify_all()

    def end(self, why: UStatus, *, is_news: bool) -> None:
        """Set why there is no connection; `is_news`: not the disconnect after a refusal."""
        # The refusal is more informative than the disconnect that follows it.
        was_refused = not self.is_up and self.why_down.code != UCode.UNAVAILABLE
        if is_news or not was_refused or why.code != UCode.UNAVAILABLE:
            self.why_down = why
        self.is_up = False
        self.changed.notify_all()
