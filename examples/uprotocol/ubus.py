"""A uBus: a sensor publishes, two others subscribe, one calls, and one asks for the last message.

python examples/uprotocol/ubus.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from dispatching import dispatcher, wait_until

from penstock.protocols.uprotocol import UMessage, UUri, proto
from penstock.protocols.uprotocol.communication import (
    LocalUriProvider,
    Publisher,
    RpcClient,
    RpcServer,
    Subscriber,
    UPayload,
)
from penstock.protocols.uprotocol.transports.ring import RingTransport

SPEED = UUri("vehicle1", 0x10, 1, 0x8001)
UTWIN = UUri("vehicle1", 3, 2, 1)


def transport(folder: Path, ue_id: int) -> RingTransport:
    """Connect an entity: it appends to the dispatcher's ring, and reads from its own."""
    return RingTransport(
        "vehicle1", send=f"fmq:{folder}/in", receive=f"fmq:{folder}/{ue_id:X}?slots=1000&size=1M"
    )


def main() -> None:
    """Let a sensor publish and answer, and others listen and ask."""
    with tempfile.TemporaryDirectory() as name, dispatcher("ubus.yaml", UBUS=name):
        folder = Path(name)
        sensor_uris = LocalUriProvider("vehicle1", 0x10, 1)
        sensor = transport(folder, 0x10)
        server = RpcServer(sensor, sensor_uris)
        server.register_request_handler(1, lambda message: b"zero " + (message.payload or b""))

        heard: dict[str, list[UMessage]] = {"dashboard": [], "logger": []}
        clients = []
        for name_, ue_id in (("dashboard", 0x20), ("logger", 0x30)):
            theirs = transport(folder, ue_id)
            client = RpcClient(theirs, LocalUriProvider("vehicle1", ue_id, 1))
            clients.append((client, theirs))
            status = Subscriber(theirs, client).subscribe(SPEED, heard[name_].append)
            print(f"{name_}: {status.result(10).name}")

        publisher = Publisher(sensor, sensor_uris)
        for speed in range(10, 60, 10):
            publisher.publish(0x8001, str(speed))
        wait_until(lambda: all(len(each) == 5 for each in heard.values()), "that all heard of it")
        for name_, each in heard.items():
            speeds = [message.payload or b"" for message in each]
            print(f"{name_} heard {b' '.join(speeds).decode()}")

        client = clients[0][0]
        answer = client.invoke_method(UUri("vehicle1", 0x10, 1, 1), b"point")
        print(f"the sensor answered {answer.result(10).data.decode()}")
        asked = proto.GetLastMessagesRequest(topics=proto.UUriBatch(uris=[SPEED.to_proto()]))
        last = client.invoke_method(UTWIN, UPayload.of_proto(asked)).result(10)
        found = proto.GetLastMessagesResponse.FromString(last.data).responses[0]
        print(f"the last speed was {found.message.payload.decode()}")

        server.close()
        for client, theirs in clients:
            client.close()
            theirs.close()
        sensor.close()


if __name__ == "__main__":
    main()
