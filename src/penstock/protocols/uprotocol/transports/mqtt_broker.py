"""Which MQTT broker is connected to, as whom, and how?"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.core.errors import InvalidOption, InvalidURL, StorageError

__all__ = ["MqttBroker"]

_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}


class _TlsSocket(ssl.SSLSocket):
    """Closed when the other side is not who it should be, which the MQTT library forgets."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttBroker:
    """How to connect to a broker. With `tls`, its certificate is checked.

    :raises InvalidOption: a number is out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    #: The name of the session. Without one it gets a random name, and ends with the connection.
    client_id: str = ""
    #: Seconds that the broker keeps the session, and messages for it, while nobody is connected.
    session_expiry: int = 3600
    #: Whether to forget a session that is there at the first connection.
    clean_start: bool = False
    keepalive: int = 30
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    #: Files: who the broker's certificate is signed by, and our own certificate with its key.
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    #: Messages sent and not yet acknowledged by the broker, at most.
    window: int = 256
    #: Messages received and not yet acknowledged by us, at most.
    receive_maximum: int = 1024
    #: Bytes of the largest packet that is sent or taken.
    largest_packet: int = 4 << 20
    #: Seconds: to connect, and to be told what became of a message.
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
        """Read `mqtt://user:password@host:1883` or `mqtts://…`; other options as keywords.

        :raises InvalidURL: it is something else.
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
        """Whether the session outlives a connection."""
        return bool(self.client_id) and self.session_expiry > 0

    def context(self) -> ssl.SSLContext | None:
        """Make the TLS context, or None for plain TCP.

        :raises StorageError: a file cannot be read.
        :raises InvalidOption: a file is not what it should be.
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
