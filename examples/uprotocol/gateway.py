"""A cloud gateway: devices with a certificate each publish to a service inside, and call it.

It needs a broker with TLS that asks for certificates, see gateway.yaml, and these variables:
BROKER, CA, and the folder CERTIFICATES with NAME.pem and NAME.key for cloud, device1, device2 …

    BROKER=mqtts://127.0.0.1:8883 CA=ca.pem CERTIFICATES=. python examples/uprotocol/gateway.py
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dispatching import dispatcher, wait_until

from penstock.protocols.uprotocol import UMessage, UStatusError, UUri, publish
from penstock.protocols.uprotocol.communication import (
    CallOptions,
    LocalUriProvider,
    RpcClient,
    RpcServer,
)
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttTransport
from penstock.protocols.uprotocol.transports.ring import RingTransport

BROKER = os.environ.get("BROKER", "mqtts://127.0.0.1:8883")
CA = str(Path(os.environ.get("CA", "ca.pem")).absolute())
CERTIFICATES = Path(os.environ.get("CERTIFICATES", ".")).absolute()
DEVICES = ("device1", "device2", "device3")
#: What a call has to bring; gateway.yaml has only its SHA-256.
TOKEN = CallOptions(token="fleet")
#: Between devices a publish names the authority that it goes to.
TO_CLOUD = UUri("cloud", 0xFFFFFFFF, 0xFF, 0xFFFF)


def device(name: str) -> MqttTransport:
    """Connect a device with its own certificate."""
    broker = MqttBroker.parse(
        BROKER,
        ca=CA,
        certificate=str(CERTIFICATES / f"{name}.pem"),
        key=str(CERTIFICATES / f"{name}.key"),
        client_id=name,
    )
    return MqttTransport(name, broker, topics="d2d", must_be_heard=True)


def main() -> None:
    """Let some devices call and publish."""
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        files = {
            "CA": CA,
            "CERTIFICATE": str(CERTIFICATES / "cloud.pem"),
            "KEY": str(CERTIFICATES / "cloud.key"),
        }
        opened.enter_context(dispatcher("gateway.yaml", GATEWAY=folder, BROKER=BROKER, **files))
        inside = opened.enter_context(
            RingTransport("cloud", send=f"fmq:{folder}/in", receive=f"fmq:{folder}/50")
        )
        uris = LocalUriProvider("cloud", 0x50, 1)
        positions: list[UMessage] = []
        inside.register_listener(UUri("*", 0x10, 1, 0x8001), positions.append)
        server = RpcServer(inside, uris)
        opened.callback(server.close)
        server.register_request_handler(1, lambda _: b"drive on")

        for name in DEVICES:
            transport = opened.enter_context(device(name))
            own = LocalUriProvider(name, 0x10, 1)
            client = RpcClient(transport, own)
            opened.callback(client.close)
            answer = client.invoke_method(UUri("cloud", 0x50, 1, 1), name, TOKEN)
            print(f"{name} was told: {answer.result(20).data.decode()}")
            for number in range(3):
                transport.send(publish(own.resource(0x8001), b"%d" % number, sink=TO_CLOUD))
            try:
                client.invoke_method(UUri("cloud", 0x51, 1, 1), b"", TOKEN).result(20)
            except UStatusError as error:
                print(f"{name} may not call the service 51: {error.code.name}")
            try:
                client.invoke_method(UUri("cloud", 0x50, 1, 1), name).result(20)
            except UStatusError as error:
                print(f"{name} may not call without a token: {error.code.name}")

        wait_until(lambda: len(positions) == 3 * len(DEVICES), "that all positions came")
        for name in DEVICES:
            those = [it for it in positions if _authority(it) == name]
            print(f"{name} was at {b' '.join(it.payload or b'' for it in those).decode()}")


def _authority(message: UMessage) -> str:
    source = message.attributes.source
    return "" if source is None else source.authority_name


if __name__ == "__main__":
    main()
