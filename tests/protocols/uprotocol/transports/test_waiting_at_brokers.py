"""Does what waits in a session of a broker wait until somebody listens?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.uprotocol import UMessage, UUri, notification, publish
from penstock.protocols.uprotocol.communication import LocalUriProvider, RpcClient
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttTransport
from support.mosquitto import Mosquitto, mosquitto
from support.until import until

TOPIC = UUri("vehicle1", 0x10, 1, 0x8001)
OTHER = UUri("vehicle1", 0x10, 1, 0x8002)
ME = LocalUriProvider("vehicle1", 0x20, 1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as running:
        yield running


def entity(broker: Mosquitto, name: str = "me", **options: Any) -> MqttTransport:
    return MqttTransport("vehicle1", MqttBroker.parse(broker.url, client_id=name, **options))


def numbered(count: int, first: int = 0) -> list[UMessage]:
    return [publish(TOPIC, b"%06d" % number) for number in range(first, first + count)]


def send(broker: Mosquitto, messages: list[UMessage]) -> None:
    with entity(broker, "sender") as sender:
        for message in messages:
            sender.send(message)


def test_a_session_that_goes_on_keeps_what_waits_until_somebody_listens(
    broker: Mosquitto,
) -> None:
    with entity(broker) as transport:
        transport.register_listener(TOPIC, print)
    heard: list[UMessage] = []
    for life in range(3):
        heard.clear()
        sent = numbered(50, 50 * life)
        send(broker, sent)
        # One that never listens gets all of them, and takes none.
        with entity(broker) as deaf:
            until(lambda: deaf.statistics()["waiting"] == 50)
        with entity(broker) as transport, RpcClient(transport, ME):
            until(lambda: transport.statistics()["arrived"] == 50)
            transport.register_listener(TOPIC, heard.append)
            until(lambda: len(heard) >= 50)
            assert heard == sent
    with entity(broker) as transport:
        extra = numbered(1, 1000)
        send(broker, extra)
        last: list[UMessage] = []
        transport.register_listener(TOPIC, last.append)
        until(lambda: last)
        assert last == extra


def test_each_listener_of_an_earlier_life_gets_its_own_in_whatever_order_they_return(
    broker: Mosquitto,
) -> None:
    wide = UUri.ANY.with_authority("vehicle1")
    with entity(broker) as transport:
        transport.register_listener(TOPIC, print)
        transport.register_listener(wide, print)
    sent = numbered(20)
    send(broker, sent)
    heard: list[list[UMessage]] = [[], []]
    with entity(broker) as transport:
        until(lambda: transport.statistics()["arrived"] >= 20)
        transport.register_listener(wide, heard[0].append)
        until(lambda: len(heard[0]) >= 20)
        transport.register_listener(TOPIC, heard[1].append)
        until(lambda: len(heard[1]) >= 20)
    assert [[int(it.payload or b"") for it in own] for own in heard] == [list(range(20))] * 2


def test_a_notification_waits_for_its_listener_beside_a_client_of_calls(
    broker: Mosquitto,
) -> None:
    told = [notification(OTHER, ME.source, b"%d" % number) for number in range(5)]
    with entity(broker) as transport, RpcClient(transport, ME):
        send(broker, told)
        until(lambda: transport.statistics()["waiting"] == 5)
        heard: list[UMessage] = []
        transport.register_listener(OTHER, heard.append, ME.source)
        until(lambda: len(heard) == 5)
        assert heard == told


def test_what_waits_while_the_broker_is_restarted_waits_once(broker: Mosquitto) -> None:
    with entity(broker) as transport:
        transport.register_listener(TOPIC, print)
    sent = numbered(30)
    send(broker, sent)
    heard: list[UMessage] = []
    with entity(broker) as transport:
        until(lambda: transport.statistics()["waiting"] == 30)
        transport.link._break()
        until(lambda: transport.statistics()["connections"] == 2)
        until(lambda: transport.statistics()["arrived"] == 60)
        assert transport.statistics()["waiting"] == 30
        transport.register_listener(TOPIC, heard.append)
        until(lambda: len(heard) >= 30)
        assert heard == sent
    with entity(broker) as transport:
        transport.register_listener(TOPIC, heard.append)
        send(broker, numbered(1, 99))
        until(lambda: len(heard) > 30)
    assert len(heard) == 31


def test_one_that_nobody_takes_does_not_stop_the_others(broker: Mosquitto) -> None:
    with entity(broker) as transport:
        transport.register_listener(OTHER, print)
    send(broker, [publish(OTHER, b"stray")])
    heard: list[UMessage] = []
    with entity(broker, receive_maximum=16) as transport:
        transport.register_listener(TOPIC, heard.append)
        sent = numbered(200)
        send(broker, sent)
        until(lambda: len(heard) >= 200)
        assert heard == sent
        assert transport.statistics()["waiting"] == 1
    late: list[UMessage] = []
    with entity(broker) as transport:
        transport.register_listener(OTHER, late.append)
        until(lambda: late)
    assert [message.payload for message in late] == [b"stray"]
