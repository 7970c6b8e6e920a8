"""The golden messages, through real brokers and as other implementations see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zenoh

from penstock.protocols.uprotocol import UMessage, UUri
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink
from protocols.uprotocol.vectors import VECTORS
from support.mosquitto import free_port, mosquitto
from support.mqtt_client import PlainClient
from support.until import until

_ALL: list[dict[str, Any]] = json.loads((VECTORS / "umessages.json").read_text())["cases"]
#: Those that can be sent at all.
VALID = [case for case in _ALL if case["valid"]]


def message_of(case: dict[str, Any]) -> UMessage:
    return UMessage.from_bytes(bytes.fromhex(case["hex"]))


def test_on_mqtt_they_have_the_topics_and_properties_of_the_vectors(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        client = PlainClient(broker.port)
        options = MqttBroker.parse(broker.url)
        with MqttLeg("x", "local", options, exact_ttl=False) as leg:
            leg.start(lambda _: None, [])
            assert leg.await_connection(10) is None
            cases = [case for case in VALID if case["mqtt5"]]
            for case in cases:
                assert leg.deliver(UUri("x"), [message_of(case)]) == [None], case["id"]
        until(lambda: len(client.got) == len(cases))
        for case, packet in zip(cases, client.got, strict=True):
            expected, found = case["mqtt5"], packet.properties
            assert packet.topic == expected["topic_e2e"], case["id"]
            pairs = [tuple(pair) for pair in expected["user_properties"]]
            assert getattr(found, "UserProperty", []) == pairs, case["id"]
            assert getattr(found, "ContentType", None) == expected.get("content_type")
            assert getattr(found, "MessageExpiryInterval", None) == expected.get(
                "message_expiry_interval"
            )
            correlation = expected.get("correlation_data_hex")
            assert getattr(found, "CorrelationData", None) == (
                None if correlation is None else bytes.fromhex(correlation)
            )
            assert packet.payload == (message_of(case).payload or b"")
        client.close()


def test_on_zenoh_they_have_the_keys_and_attachments_of_the_vectors() -> None:
    place = [f"tcp/127.0.0.1:{free_port()}"]
    samples: list[zenoh.Sample] = []
    link = ZenohLink("observer", listen=place)
    direct = zenoh.handlers.Callback(samples.append, indirect=False)
    subscriber = link._session.declare_subscriber("**", direct)
    with ZenohLeg("x", ZenohLink("local", connect=place)) as leg:
        until(lambda: leg.deliver(UUri("x"), [message_of(VALID[0])]) == [None])
        until(lambda: samples)
        cases = [case for case in VALID if case["zenoh"]]
        for case in cases:
            samples.clear()
            assert leg.deliver(UUri("x"), [message_of(case)]) == [None], case["id"]
            until(lambda: samples)
            [sample] = samples
            assert str(sample.key_expr) == case["zenoh"]["key"], case["id"]
            assert sample.attachment is not None
            assert sample.attachment.to_bytes().hex() == case["zenoh"]["attachment_hex"]
            assert sample.payload.to_bytes().hex() == (case["zenoh"]["payload_hex"] or "")
    subscriber.undeclare()  # type: ignore[no-untyped-call]
    link.close()


def test_they_arrive_byte_by_byte_as_they_were_sent(tmp_path: Path) -> None:
    sent = [message_of(case) for case in VALID]
    stored: list[UMessage] = []

    def ingest(messages: Any) -> None:
        stored.extend(messages)

    place = [f"tcp/127.0.0.1:{free_port()}"]
    with (
        ZenohLeg("in", ZenohLink("observer", listen=place)) as receiver,
        ZenohLeg("out", ZenohLink("local", connect=place)) as sender,
    ):
        receiver.start(ingest, ["*"])
        receiver.listen(UUri.ANY)
        for message in sent:
            until(lambda message=message: sender.deliver(UUri("x"), [message]) == [None])  # type: ignore[misc]
        until(lambda: len(stored) == len(sent))
        key = _bytes
        assert sorted(map(key, stored)) == sorted(map(key, sent))
    stored.clear()
    with mosquitto(tmp_path) as broker:
        options = MqttBroker.parse(broker.url)
        with MqttLeg("in", "observer", options) as in_, MqttLeg("out", "local", options) as out:
            in_.start(ingest, ["*"])
            out.start(ingest, [])
            assert in_.await_connection(10) is None
            in_.listen(UUri.ANY)
            assert out.await_connection(10) is None
            for message in sent:
                until(lambda message=message: out.deliver(UUri("x"), [message]) == [None])  # type: ignore[misc]
            until(lambda: len(stored) == len(sent))
            assert stored == sent


def _bytes(message: UMessage) -> bytes:
    return message.to_bytes()
