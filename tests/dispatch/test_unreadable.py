"""What becomes of packets of real transports whose headers are wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.dispatch import Dispatcher, Routes
from penstock.dispatch.dead_letters import QUARANTINE, strays
from penstock.protocols.uprotocol import UUID7, UCode, UMessageType, UUri, notification
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink
from penstock.protocols.uprotocol.zenoh_wire import encode_attachment
from support.mosquitto import free_port, mosquitto
from support.mqtt_client import PlainClient
from support.until import until

CALLER = UUri("device", 0x10, 1, 0)
METHOD = UUri("hub", 0x20, 1, 7)


def _put(raw: PlainClient, topic: str, pairs: Sequence[tuple[str, str]]) -> None:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    if pairs:
        properties.UserProperty = list(pairs)
    raw.client.publish(topic, b"x", qos=1, properties=properties)


@pytest.mark.parametrize("caller", [CALLER, CALLER.with_authority("")], ids=["whole", "local"])
def test_wrong_headers_at_a_broker_are_letters_and_answers_or_in_quarantine(
    tmp_path: Path, caller: UUri
) -> None:
    with mosquitto(tmp_path) as broker:
        leg = MqttLeg("far", "hub", MqttBroker.parse(broker.url, client_id="hub"))
        routes = Routes(authorities={"far": ["device"], "local": ["hub"]})
        local = InProcessLeg("local", InProcessBus())
        with Dispatcher("hub", tmp_path / "state", [leg, local], routes=routes) as dispatcher:
            dispatcher.start()
            assert leg.await_connection(10) is None
            raw = PlainClient(broker.port)
            request = [
                ("uP", "1"),
                ("1", str(UUID7.new())),
                ("2", "up-req.v1"),
                ("3", str(caller)),
                ("4", str(METHOD)),
                ("5", "CS9"),
                ("6", "5000"),
            ]
            topic = "device/10/0/1/0/hub/20/0/1/7"
            _put(raw, topic, request)
            _put(raw, topic, [*request[:3], ("3", "up://other/10/1/0"), *request[4:]])
            _put(raw, topic, [])
            _put(raw, topic, [("uP", "1"), ("1", "no id"), *request[2:]])
            until(lambda: dispatcher.books().counts.received == 4)
            codes = [letter.code for letter in dispatcher.dead_letters]
            assert codes == [UCode.INVALID_ARGUMENT, UCode.UNAUTHENTICATED]
            assert all(
                "CS9" in it.message or "topic" in it.message for it in dispatcher.dead_letters
            )
            kept = list(strays(tmp_path / "state" / QUARANTINE))
            assert [one.leg for one in kept] == ["far", "far"]
            assert b"no id" in kept[1].data
            until(lambda: [it for it in raw.got if it.topic == "hub/20/0/1/7/device/10/0/1/0"])
            raw.close()
            assert dispatcher.books().problems() == []
            assert leg.statistics()["undecodable"] == 4


def test_wrong_headers_by_zenoh_are_letters_or_in_quarantine(tmp_path: Path) -> None:
    place = [f"tcp/127.0.0.1:{free_port()}"]
    with (
        ZenohLeg("far", ZenohLink("hub", listen=place)) as leg,
        ZenohLeg("device", ZenohLink("device", connect=place)) as device,
        Dispatcher(
            "hub", tmp_path / "state", [leg], routes=Routes(authorities={"far": ["device"]})
        ) as dispatcher,
    ):
        dispatcher.start()
        sink = UUri("hub", 0x20, 1, 0)
        good = notification(UUri("device", 0x10, 1, 0x8001), sink)
        until(lambda: device.deliver(sink, [good]) == [None])
        key = "up/device/10/0/1/8001/hub/20/0/1/0"
        spoofed = notification(UUri("other", 0x10, 1, 0x8001), sink)
        session = device.link._session
        session.put(key, b"x", attachment=encode_attachment(spoofed.attributes))
        session.put(key, b"x", attachment=b"\x01\xff\xff")
        session.put(key, b"x")
        until(lambda: dispatcher.books().counts.undecodable == 2)
        assert len(list(strays(tmp_path / "state" / QUARANTINE))) == 2
        letters = [it for it in dispatcher.dead_letters if it.code == UCode.UNAUTHENTICATED]
        assert [it.header.type for it in letters] == [UMessageType.NOTIFICATION]
        assert dispatcher.books().problems() == []
