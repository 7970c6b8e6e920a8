"""The examples of the dispatcher, each with its real transports: they run, and lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import PenstockError
from penstock.dispatch.bus import check
from penstock.dispatch.config import load_bus
from penstock.protocols.uprotocol import UCode, UStatusError, UUri, notification
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttTransport
from support.certificates import Authority
from support.mosquitto import free_port, mosquitto

EXAMPLES = Path(__file__).parents[2] / "examples" / "uprotocol"


def _run(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 dead" in done.stdout or script == "gateway.py", done.stdout
    assert "0 queued" in done.stdout
    return done.stdout


@pytest.mark.parametrize("file", ["ubus.yaml", "ustreamer.yaml", "gateway.yaml", "dpr.yaml"])
def test_the_files_are_right(file: str) -> None:
    config = load_bus(EXAMPLES / file)
    if file != "gateway.yaml":
        check(config)
        return
    with pytest.raises(PenstockError, match=r"ca\.pem"):  # certificates are not part of it
        check(config)


def test_ubus_brings_a_publish_to_all_subscribers_and_answers_calls() -> None:
    said = _run("ubus.py")
    assert "dashboard heard 10 20 30 40 50" in said
    assert "logger heard 10 20 30 40 50" in said
    assert "the sensor answered zero point" in said
    assert "the last speed was 50" in said


def test_ustreamer_brings_zenoh_and_mqtt_together(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        said = _run("ustreamer.py", BROKER=broker.url, ZENOH=f"tcp/127.0.0.1:{free_port()}")
    assert "the cloud answered the vehicle: north of Boulder" in said
    assert "the cloud heard 40 N, 41 N, 42 N, 43 N, 44 N" in said
    assert "the vehicle was warned: ice ahead" in said


def test_gateway_serves_devices_with_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("broker")
    for name in ("cloud", "device1", "device2", "device3"):
        authority.issue(name)
    rules = tmp_path / "access"
    rules.write_text("pattern write %u/#\npattern read +/%u\n")
    rules.chmod(0o644)
    lines = [
        f"cafile {authority.certificate}",
        f"certfile {server.certificate}",
        f"keyfile {server.key}",
        "require_certificate true",
        "use_identity_as_username true",
        f"acl_file {rules}",
    ]
    with mosquitto(tmp_path, lines) as broker:
        _refuses_who_has_no_certificate(broker.port, authority.certificate)
        said = _run(
            "gateway.py",
            BROKER=f"mqtts://127.0.0.1:{broker.port}",
            CA=authority.certificate,
            CERTIFICATES=str(tmp_path),
        )
    for device in ("device1", "device2", "device3"):
        assert f"{device} was told: drive on" in said
        assert f"{device} may not call the service 51: PERMISSION_DENIED" in said
        assert f"{device} may not call without a token: UNAUTHENTICATED" in said
        assert f"{device} was at 0 1 2" in said


def _refuses_who_has_no_certificate(port: int, ca: str) -> None:
    url = f"mqtts://127.0.0.1:{port}"
    nobody = MqttBroker.parse(url, ca=ca, client_id="device1", connect_timeout=1.0)
    with (
        MqttTransport("device1", nobody, topics="d2d") as transport,
        pytest.raises(UStatusError) as caught,
    ):
        transport.send(notification(UUri("device1", 0x10, 1, 0x8001), UUri("cloud", 0x50, 1, 0)))
    assert caught.value.code in (UCode.UNAVAILABLE, UCode.UNAUTHENTICATED)


def test_dpr_keeps_messages_for_a_device_that_is_off() -> None:
    left, right = (f"tcp/127.0.0.1:{free_port()}" for _ in range(2))
    said = _run("dpr.py", LEFT=left, RIGHT=right)
    assert "device2: SUBSCRIBED" in said
    assert "device2 heard 0 1 2" in said
    assert "device2 is on again, and heard 0 1 2 3 4 5" in said
