from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.endpoints import open_reader
from penstock.core.errors import ConnectionLost, InvalidOption, StorageError
from penstock.protocols.uprotocol import UCode, UMessage, UStatusError, UUri, notification, publish
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from support.certificates import Authority
from support.mosquitto import Mosquitto, mosquitto
from support.until import until

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)
ENTITY = UUri("cloud", 0x300EF, 4, 0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def broker(tmp_path: Path, authority: Authority) -> Iterator[Mosquitto]:
    server = authority.issue("broker")
    lines = [
        f"cafile {authority.certificate}",
        f"certfile {server.certificate}",
        f"keyfile {server.key}",
        "require_certificate true",
        "use_identity_as_username true",
    ]
    with mosquitto(tmp_path, lines, is_open=False) as running:
        yield running


def options(broker: Mosquitto, authority: Authority, name: str) -> MqttBroker:
    mine = authority.issue(name)
    return MqttBroker(
        port=broker.port,
        tls=True,
        ca=authority.certificate,
        certificate=mine.certificate,
        key=mine.key,
        client_id=name,
        connect_timeout=3.0,
    )


def test_those_with_a_certificate_talk(broker: Mosquitto, authority: Authority) -> None:
    stored: list[bytes | UMessage] = []
    with (
        MqttLeg("cloud", "cloud", options(broker, authority, "cloud")) as receiver,
        MqttLeg("vehicle1", "vehicle1", options(broker, authority, "vehicle1")) as sender,
    ):
        receiver.start(stored.extend, ["cloud"])
        sender.start(lambda _: None, ["vehicle1"])
        assert receiver.await_connection(10) is None
        assert sender.await_connection(10) is None
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(300)]
        until(lambda: sender.deliver(ENTITY, messages[:1]) == [None])
        assert sender.deliver(ENTITY, messages[1:]) == [None] * 299
        until(lambda: len(stored) >= 300)


def test_those_without_one_or_with_anothers_do_not_connect(
    broker: Mosquitto, authority: Authority, tmp_path: Path
) -> None:
    good = options(broker, authority, "vehicle1")
    stranger = Authority(tmp_path, "stranger")
    theirs = stranger.issue("vehicle1")
    for bad in (
        replace(good, certificate=None, key=None),
        replace(good, certificate=theirs.certificate, key=theirs.key),
        replace(good, ca=stranger.certificate),
        replace(good, tls=False),
    ):
        with (
            MqttTransport("vehicle1", replace(bad, connect_timeout=0.4)) as transport,
            pytest.raises(UStatusError) as error,
        ):
            transport.send(publish(TOPIC))
        assert error.value.code == UCode.UNAVAILABLE


def test_a_broker_whose_certificate_is_not_accepted_is_told_with_what_helps(
    broker: Mosquitto, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    place = f"up+mqtt://127.0.0.1:{broker.port}/?topic={TOPIC}&wait=2s"
    for ca in (authority.certificate, stranger.certificate):
        mine = authority.issue("vehicle1")
        keys = f"&certificate={mine.certificate}&key={mine.key}"
        with contextlib.ExitStack() as stack:
            if ca is not authority.certificate:
                told = stack.enter_context(pytest.raises(ConnectionLost, match="not accepted"))
            open_reader(f"{place}&tls=true&ca={ca}{keys}").close()
    assert "ca=FILE" in str(told.value.hint)


def test_files_that_are_not_right_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        MqttTransport("vehicle1", MqttBroker(tls=True, ca=str(tmp_path / "none")))
    (tmp_path / "text").write_text("not a certificate")
    with pytest.raises(InvalidOption):
        MqttTransport("vehicle1", MqttBroker(tls=True, ca=str(tmp_path / "text")))
    with pytest.raises(InvalidOption):
        MqttBroker(key="k.pem")


def test_a_password_is_needed_where_the_broker_asks_for_one(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    subprocess.run(
        ["mosquitto_passwd", "-b", "-c", str(passwords), "me", "secret"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    passwords.chmod(0o644)
    with mosquitto(tmp_path, [f"password_file {passwords}"], is_open=False) as broker:
        good = MqttBroker.parse(f"mqtt://me:secret@127.0.0.1:{broker.port}")
        with MqttTransport("vehicle1", good) as transport:
            transport.send(publish(TOPIC))
        for password in ("wrong", None):
            bad = replace(good, password=password, connect_timeout=0.4)
            with (
                MqttTransport("vehicle1", bad) as transport,
                pytest.raises(UStatusError, match="the broker refuses"),
            ):
                transport.send(publish(TOPIC))
