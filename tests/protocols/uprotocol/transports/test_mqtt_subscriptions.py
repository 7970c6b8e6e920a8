from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.publish
import pytest
from paho.mqtt.client import Client

from penstock.core.clock import ManualClock
from penstock.core.endpoints import open_reader
from penstock.core.errors import ConnectionLost
from penstock.protocols.uprotocol import UCode, UMessage, UStatus, UStatusError, UUri, publish
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from penstock.protocols.uprotocol.transports.mqtt_link import Arrival, MqttLink, Subscriptions
from support.mosquitto import Mosquitto, mosquitto
from support.until import until

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)
DENIED = UStatus(UCode.PERMISSION_DENIED, "no")


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Mosquitto]:
    """Give a broker that lets nobody subscribe until it is told to."""
    plugin = next(Path("/usr/lib").glob("*/mosquitto_dynamic_security.so"), None)
    if plugin is None:
        pytest.skip("mosquitto has no plugin for access that changes")
    rules = tmp_path / "rules.json"
    subprocess.run(
        ["mosquitto_ctrl", "dynsec", "init", str(rules), "admin", "secret"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    wanted = json.loads(rules.read_text())
    wanted["defaultACLAccess"].update(publishClientSend=True, subscribe=False)
    rules.write_text(json.dumps(wanted))
    rules.chmod(0o666)
    lines = [f"plugin {plugin}", f"plugin_opt_config_file {rules}"]
    with mosquitto(tmp_path, lines) as running:
        yield running


def allow(broker: Mosquitto) -> None:
    access = [{"acltype": "subscribe", "allow": True}]
    paho.mqtt.publish.single(
        "$CONTROL/dynamic-security/v1",
        json.dumps({"commands": [{"command": "setDefaultACLAccess", "acls": access}]}),
        qos=1,
        hostname="127.0.0.1",
        port=broker.port,
        auth={"username": "admin", "password": "secret"},
    )


def test_what_the_broker_refuses_is_asked_for_again_until_it_is_granted(strict: Mosquitto) -> None:
    heard: list[bytes | UMessage] = []
    with (
        MqttLeg("cloud", "cloud", MqttBroker.parse(strict.url)) as leg,
        MqttTransport("vehicle1", MqttBroker.parse(strict.url)) as sender,
    ):
        leg.start(heard.extend, ["cloud"])
        leg.listen(TOPIC)
        refusal = leg.await_connection(10)
        assert refusal is not None
        assert refusal.code == UCode.PERMISSION_DENIED
        until(lambda: leg.statistics()["not_subscribed"] == 2)
        allow(strict)
        until(lambda: leg.statistics()["not_subscribed"] == 0)
        assert leg.await_connection(10) is None
        sender.send(publish(TOPIC, b"now"))
        until(lambda: heard)
        leg.unlisten(TOPIC)


def test_what_is_subscribed_to_while_the_broker_is_being_told_of_others_is_not_forgotten(
    strict: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = MqttLink._subscribe, threading.Event()

    def ask(link: MqttLink, client: Client, topic_filter: str) -> tuple[Any, int | None]:
        if not late.is_set():
            late.set()
            other = threading.Thread(target=link.subscribe, args=("late",))
            other.start()
            other.join()
        return real(link, client, topic_filter)

    monkeypatch.setattr(MqttLink, "_subscribe", ask)
    with MqttLeg("cloud", "cloud", MqttBroker.parse(strict.url)) as leg:
        leg.start(lambda _: None, ["cloud"])
        until(lambda: leg.statistics()["not_subscribed"] == 2)  # this broker refuses all


class CutLink:
    """A way to a broker; its first connection breaks when the first packet but CONNECT is sent."""

    def __init__(self, port: int) -> None:
        self._broker = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._broker))
                self.connections += 1
                once = self.connections == 1
                for each in ((near, far, once), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=each, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, once: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if once:
                    source.recv(65536)
                    break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._listening.close()


def test_a_subscription_that_was_lost_on_its_way_is_made_with_the_next_connection(
    tmp_path: Path,
) -> None:
    heard: list[bytes | UMessage] = []
    with mosquitto(tmp_path) as broker, contextlib.closing(CutLink(broker.port)) as link:
        # The broker keeps the session of the first connection, which has no subscription.
        way = MqttBroker.parse(f"mqtt://127.0.0.1:{link.port}", client_id="cloud")
        with (
            MqttLeg("cloud", "cloud", way) as leg,
            MqttTransport("vehicle1", MqttBroker.parse(broker.url)) as sender,
        ):
            leg.listen(TOPIC)
            leg.start(heard.extend, ["cloud"])
            until(lambda: link.connections == 2)
            assert leg.await_connection(10) is None
            sender.send(publish(TOPIC, b"now"))
            until(lambda: heard)


def test_what_is_subscribed_or_unsubscribed_while_a_connection_ends_follows_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    may_notice = threading.Event()
    notice = MqttLink._on_disconnect

    def notice_late(link: MqttLink, *told: Any) -> None:
        assert may_notice.wait(20)
        notice(link, *told)

    def take(arrival: Arrival) -> bool:
        heard.append(arrival.packet.topic)
        link.acknowledge([arrival])
        return True

    with mosquitto(tmp_path) as broker:
        monkeypatch.setattr(MqttLink, "_on_disconnect", notice_late)
        link = MqttLink(MqttBroker.parse(broker.url, client_id="cloud"), take)
        with contextlib.closing(link):
            link.start()
            assert link.await_connection(10) is None
            assert link.subscribe("old") is None
            client = link._connection.client
            client.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            until(lambda: client.socket() is None)  # the library knows it, and has not told yet
            assert link.is_up
            link.unsubscribe("old")
            assert link.subscribe("new") is None
            may_notice.set()
            until(lambda: link.counts["connections"] == 2)
            assert link.await_connection(10) is None
            for topic in ("old", "new"):
                paho.mqtt.publish.single(topic, b"x", qos=1, hostname="127.0.0.1", port=broker.port)
            until(lambda: heard)
            assert heard == ["new"]


def test_whoever_registers_or_reads_is_told_that_it_is_refused(strict: Mosquitto) -> None:
    with MqttTransport("vehicle1", MqttBroker.parse(strict.url)) as transport:
        with pytest.raises(UStatusError, match="PERMISSION_DENIED"):
            transport.register_listener(TOPIC, print)
        assert transport.statistics()["listeners"] == 0
        assert transport.statistics()["not_subscribed"] == 0
    with pytest.raises(ConnectionLost, match="refuses a subscription") as told:
        open_reader(f"up+mqtt://127.0.0.1:{strict.port}/?topic={TOPIC}")
    assert told.value.hint


def test_each_time_that_it_is_refused_the_wait_is_longer() -> None:
    clock = ManualClock()
    found = Subscriptions(clock.monotonic)
    found.add("a/b")
    waits = []
    for _ in range(10):
        found.refuse("a/b", DENIED)
        assert found.due() == []
        assert found.next_due is not None
        waits.append(found.next_due - clock.monotonic())
        clock.advance(waits[-1] + 0.001)
        assert found.due() == ["a/b"]
    assert waits[0] <= 1 < waits[2] < waits[4] <= 60
    assert max(waits) <= 60


def test_what_is_wanted_no_more_or_granted_is_not_asked_for() -> None:
    found = Subscriptions()
    found.refuse("a/b", DENIED)
    assert (found.refused, found.refusal, found.next_due) == (0, None, None)
    found.add("a/b")
    found.refuse("a/b", DENIED)
    assert (found.refused, found.refusal) == (1, DENIED)
    found.confirm("a/b")
    assert (found.refused, found.refusal) == (0, None)
    found.refuse("a/b", DENIED)
    found.remove("a/b")
    assert found.refused == 0
    found.add("c")
    found.refuse("c", DENIED)
    assert found.resumed(is_kept=True) == (["c"], [])
    assert found.refused == 0
