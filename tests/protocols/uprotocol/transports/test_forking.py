from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.protocols.uprotocol import UCode, UStatusError, UUri, publish
from penstock.protocols.uprotocol.transports.interface import UTransport
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttTransport
from penstock.protocols.uprotocol.transports.zenoh import ZenohLink, ZenohTransport
from support.mosquitto import mosquitto

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)


def in_child(act: Callable[[], object]) -> int:
    """Do it in a child, and return the code that it failed with; 0 if it did not."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            act()
            code = 0
        except UStatusError as error:
            code = int(error.code)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(transport: UTransport) -> None:
    transport.register_listener(TOPIC, print)
    transport.send(publish(TOPIC))
    assert in_child(lambda: transport.send(publish(TOPIC))) == UCode.FAILED_PRECONDITION
    other = TOPIC.with_resource(0x8001)
    failed = in_child(lambda: transport.register_listener(other, print))
    assert failed == UCode.FAILED_PRECONDITION
    assert in_child(transport.close) == 0
    transport.send(publish(TOPIC))
    assert transport.statistics()["sent"] == 2


def test_a_child_cannot_use_the_connection_to_a_broker_and_does_not_close_it(
    tmp_path: Path,
) -> None:
    with (
        mosquitto(tmp_path) as broker,
        MqttTransport("vehicle1", MqttBroker.parse(broker.url)) as transport,
    ):
        check(transport)


def test_a_child_cannot_use_a_session_of_zenoh_and_does_not_wait_for_it() -> None:
    with ZenohTransport(ZenohLink("vehicle1")) as transport:
        check(transport)
