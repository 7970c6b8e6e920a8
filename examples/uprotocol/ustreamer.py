"""A uStreamer: an entity on zenoh and one on MQTT publish to and call each other.

It needs a broker of MQTT 5, such as mosquitto:

    BROKER=mqtt://127.0.0.1:1883 python examples/uprotocol/ustreamer.py
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial

from dispatching import dispatcher, until_heard, wait_until

from penstock.core.retry import Backoff
from penstock.protocols.uprotocol import UMessage, UUri
from penstock.protocols.uprotocol.communication import (
    CallOptions,
    LocalUriProvider,
    Notifier,
    Publisher,
    RpcClient,
    RpcServer,
)
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttTransport
from penstock.protocols.uprotocol.transports.zenoh import ZenohLink, ZenohTransport

BROKER = os.environ.get("BROKER", "mqtt://127.0.0.1:1883")
ZENOH = os.environ.get("ZENOH", "tcp/127.0.0.1:7447")
POSITION = UUri("vehicle1", 0x10, 1, 0x8001)


def main() -> None:
    """Let both sides call, publish and notify."""
    with (
        tempfile.TemporaryDirectory() as name,
        dispatcher("ustreamer.yaml", USTREAMER=name, BROKER=BROKER, ZENOH=ZENOH),
        ZenohTransport(ZenohLink("vehicle1", connect=[ZENOH]), must_be_heard=True) as vehicle,
        MqttTransport("cloud", MqttBroker.parse(BROKER)) as cloud,
    ):
        vehicle_uris = LocalUriProvider("vehicle1", 0x10, 1)
        cloud_uris = LocalUriProvider("cloud", 0x50, 1)

        positions: list[bytes] = []
        cloud.register_listener(POSITION, lambda message: positions.append(message.payload or b""))
        server = RpcServer(cloud, cloud_uris)
        server.register_request_handler(1, lambda message: b"north of " + (message.payload or b""))
        warnings: list[UMessage] = []
        vehicle.register_listener(UUri.ANY, warnings.append, vehicle_uris.source)

        # The link of zenoh may need a moment; until then the call is UNAVAILABLE, and made again.
        client = RpcClient(vehicle, vehicle_uris, backoff=Backoff(initial=0.1, maximum=1.0))
        answer = client.invoke_method(
            UUri("cloud", 0x50, 1, 1), b"Boulder", CallOptions(ttl=20_000)
        )
        print(f"the cloud answered the vehicle: {answer.result(20).data.decode()}")

        publisher = Publisher(vehicle, vehicle_uris)
        for number in range(5):
            until_heard(partial(publisher.publish, 0x8001, f"{40 + number} N"))
        wait_until(lambda: len(positions) == 5, "that the cloud got the positions")
        print(f"the cloud heard {b', '.join(positions).decode()}")

        Notifier(cloud, cloud_uris).notify(0x8003, vehicle_uris.source, "ice ahead")
        wait_until(lambda: any(it.payload == b"ice ahead" for it in warnings), "the warning")
        print("the vehicle was warned: ice ahead")
        client.close()
        server.close()
        # zenoh acknowledges nothing: whoever goes at once gets its last messages again.
        time.sleep(0.5)


if __name__ == "__main__":
    main()
