"""Two dispatchers and a real broker between them: subscriptions, publishes and calls both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.dispatch.control import find_place
from penstock.protocols.uprotocol import SubscriptionStatus, UUri
from penstock.protocols.uprotocol.communication import Publisher, RpcServer
from support.bus_processes import bus_process, ring_entity
from support.mosquitto import mosquitto
from support.until import until

SPEED = UUri("vehicle1", 0x10, 1, 0x8001)


def _file(folder: Path, own: str, other: str, url: str) -> Path:
    folder.mkdir()
    path = folder / "bus.yaml"
    path.write_text(
        f"""\
dispatcher: {own}-bus
authority: {own}
state: ./state
legs:
  local:
    ring: {{receive: "fmq:{folder}/rings/in", send: "fmq:{folder}/rings/{{ue_id}}"}}
    authorities: [{own}]
  far: {{mqtt: {{url: "{url}", topics: d2d}}, authorities: [{other}]}}
retry: {{initial: 50ms, maximum: 500ms}}
grace: 200ms
"""
    )
    return path


@pytest.mark.full
@pytest.mark.timeout(180)
def test_an_entity_gets_the_topic_of_another_device_also_after_kill_9(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        here = _file(tmp_path / "vehicle1", "vehicle1", "cloud", broker.url)
        there = _file(tmp_path / "cloud", "cloud", "vehicle1", broker.url)
        with (
            bus_process(here) as vehicle,
            bus_process(there) as cloud,
            ring_entity(here.parent / "rings", "vehicle1", 0x10) as sensor,
            ring_entity(there.parent / "rings", "cloud", 0x50) as service,
        ):
            status = service.subscribe(SPEED)
            assert status in (
                SubscriptionStatus.SUBSCRIBE_PENDING,
                SubscriptionStatus.SUBSCRIBED,
            )
            until(lambda: find_place(here).status()["subscriptions"] == 1)
            publisher = Publisher(sensor.transport, sensor.uris)
            for number in range(20):
                publisher.publish(0x8001, b"%d" % number)
            until(lambda: len(set(service.payloads)) == 20)
            assert all(message.attributes.sink is None for message in service.heard)

            cloud.kill()
            for number in range(20, 40):
                publisher.publish(0x8001, b"%d" % number)
            cloud.start()
            vehicle.kill()
            vehicle.start()
            for number in range(40, 60):
                publisher.publish(0x8001, b"%d" % number)
            until(lambda: len(set(service.payloads)) == 60, 60)
            wanted = [b"%d" % number for number in range(60)]
            assert list(dict.fromkeys(service.payloads)) == wanted

            server = RpcServer(sensor.transport, sensor.uris)
            server.register_request_handler(1, lambda message: message.payload)
            answer = service.client.invoke_method(UUri("vehicle1", 0x10, 1, 1), b"echo")
            assert answer.result(20).data == b"echo"
            server.close()

            service.subscriber.unsubscribe(SPEED, service.hear).result(20)
            until(lambda: find_place(here).status()["subscriptions"] == 0)
            for place in (here, there):
                assert find_place(place).status()["books"]["problems"] == []
            vehicle.end()
            cloud.end()


_ROUTER = """\
dispatcher: router
authority: router
state: ./state
legs:
  left: {{mqtt: {{url: "{left}", topics: d2d}}, authorities: [device1]}}
  right: {{mqtt: {{url: "{right}", topics: d2d}}, authorities: [device2]}}
retry: {{initial: 50ms, maximum: 500ms}}
grace: 200ms
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_router_between_two_brokers_brings_publishes_to_who_subscribed_at_the_other_device(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "router")]
    for folder in folders:
        folder.mkdir()
    with mosquitto(folders[0]) as left, mosquitto(folders[1]) as right:
        one = _file(tmp_path / "device1", "device1", "device2", left.url)
        two = _file(tmp_path / "device2", "device2", "device1", right.url)
        router = folders[2] / "bus.yaml"
        router.write_text(_ROUTER.format(left=left.url, right=right.url))
        topic = UUri("device1", 0x10, 1, 0x8001)
        with (
            bus_process(one),
            bus_process(router) as between,
            bus_process(two),
            ring_entity(one.parent / "rings", "device1", 0x10) as sender,
            ring_entity(two.parent / "rings", "device2", 0x20) as receiver,
        ):
            receiver.subscribe(topic)
            until(lambda: find_place(one).status()["subscriptions"] == 1)
            publisher = Publisher(sender.transport, sender.uris)
            for number in range(20):
                publisher.publish(0x8001, b"%d" % number)
            until(lambda: len(set(receiver.payloads)) == 20)
            between.kill()
            for number in range(20, 40):
                publisher.publish(0x8001, b"%d" % number)
            between.start()
            until(lambda: len(set(receiver.payloads)) == 40, 60)
            wanted = [b"%d" % number for number in range(40)]
            assert list(dict.fromkeys(receiver.payloads)) == wanted
            for place in (one, two, router):
                assert find_place(place).status()["books"]["problems"] == []
