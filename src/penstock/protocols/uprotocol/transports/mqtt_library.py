"""How is the MQTT library told to connect, to subscribe and to go?"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

if TYPE_CHECKING:
    import ssl

    from penstock.protocols.uprotocol.transports.mqtt_broker import MqttBroker

__all__ = ["connect", "hang_up", "make_client", "subscribe"]

#: Of what the library says only our own faults matter: that a connection broke is told by status.
_log: Final = logging.getLogger(__name__)
_log.addFilter(lambda record: "exception" in record.getMessage())


def make_client(broker: MqttBroker, context: ssl.SSLContext | None) -> Client:
    """Make a client for one connection; who makes it keeps the window and connects again."""
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
    """Connect, and let the library's thread run; `on_connect` tells how that ended.

    :raises OSError: nobody is there.
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
    """Ask for what matches, from now on; return the library's code and the packet's number."""
    options = SubscribeOptions(
        qos=1, noLocal=not echo, retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND
    )
    properties = None
    if identifier is not None:
        properties = Properties(PacketTypes.SUBSCRIBE)  # type: ignore[no-untyped-call]
        properties.SubscriptionIdentifier = identifier
    return client.subscribe(topic_filter, options=options, properties=properties)


def hang_up(client: Client) -> None:
    """End the connection and the library's thread, whatever state they are in."""
    client.drop_out_messages()  # the library would wait for their acknowledgement
    connection = client.socket()
    if connection is not None:
        with contextlib.suppress(OSError, AttributeError):
            connection.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    client.loop_stop()
