from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.core.errors import StorageError
from penstock.protocols.uprotocol import UMessage, UUri, notification
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg
from support.mosquitto import mosquitto
from support.until import until

SOURCE, SINK = UUri("vehicle1", 0x10AB, 3, 0x80CD), UUri("cloud", 0x300EF, 4, 0)


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        pytest.param(600, 2, id="quick"),
        pytest.param(20_000, 12, id="full", marks=pytest.mark.full),
    ],
)
def test_nothing_acknowledged_is_lost_when_the_broker_goes_and_storing_fails(
    tmp_path: Path, count: int, ends: int
) -> None:
    chance = random.Random(7)
    stored: list[int] = []

    def ingest(messages: Sequence[bytes | UMessage]) -> None:
        if chance.random() < 0.1:
            raise StorageError("writing", "it", OSError(28, "no space"))
        for message in messages:
            assert isinstance(message, UMessage)
            stored.append(int(message.payload or b""))

    lines = ["persistence true", f"persistence_location {tmp_path}/"]
    with mosquitto(tmp_path, lines) as broker:
        receiver = MqttLeg("in", "cloud", MqttBroker.parse(broker.url, client_id="cloud"))
        sender = MqttLeg("out", "vehicle1", MqttBroker.parse(broker.url, client_id="vehicle1"))
        receiver.start(ingest, ["cloud"])
        sender.start(lambda _: None, ["vehicle1"])
        rest = [notification(SOURCE, SINK, b"%d" % number) for number in range(count)]
        refused = 0

        def end_now_and_then() -> None:
            for _ in range(ends):
                time.sleep(0.1 + chance.random() / 2)
                broker.end()
                broker.start()

        ending = threading.Thread(target=end_now_and_then)
        ending.start()
        deadline = time.monotonic() + 100
        while rest or ending.is_alive():
            assert time.monotonic() < deadline
            if not rest:  # as long as the broker goes, there is something to send
                rest = [notification(SOURCE, SINK, b"%d" % count)]
                count += 1
            batch = rest[:64]
            found = sender.deliver(SINK, batch)
            assert len(found) == len(batch)
            done = next((at for at, status in enumerate(found) if status is not None), len(found))
            refused += done < len(found)
            rest = rest[done:]
            if done < len(found):
                time.sleep(0.02)
        ending.join(30)
        until(lambda: len(set(stored)) == count, 60)
        sender.close()
        receiver.close()
        assert refused
        # In order, once what came twice is left out.
        first: dict[int, None] = dict.fromkeys(stored)
        assert list(first) == list(range(count))
        assert receiver.statistics()["received"] == len(stored)
