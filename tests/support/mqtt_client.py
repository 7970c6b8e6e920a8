"""How does a test see what a broker carries, with a client that is not ours?"""

from __future__ import annotations

import threading

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

__all__ = ["PlainClient"]


class PlainClient:
    """A client of MQTT 5 that is subscribed to everything."""

    def __init__(self, port: int) -> None:
        #: What came so far.
        self.got: list[MQTTMessage] = []
        self.client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        subscribed = threading.Event()
        self.client.on_message = lambda _, __, message: self.got.append(message)
        self.client.on_subscribe = lambda *_: subscribed.set()
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.client.subscribe("#", 1)
        assert subscribed.wait(10)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()
