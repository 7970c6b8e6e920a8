"""What a bus.yaml may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.config import parse_config
from penstock.core.errors import ConfigError, PenstockError
from penstock.dispatch import Delivery, Rule
from penstock.dispatch.bus import build, check
from penstock.dispatch.config import BusConfig, load_bus
from penstock.protocols.uprotocol import UUri

FULL = """\
dispatcher: vehicle-bus
authority: vehicle1
state: ./state
legs:
  local:
    ring: {receive: "fmq:/run/bus/in", send: "fmq:/run/bus/{ue_id}"}
    authorities: [vehicle1]
  cloud:
    mqtt: {url: "mqtts://broker:8883", topics: d2d, ca: ca.pem, certificate: c.pem, key: k.pem}
    authorities: [cloud, vehicle2]
    message: 256k
  radio: {zenoh: {listen: ["tcp/127.0.0.1:7447"]}, authorities: [device7]}
routes: {default: cloud}
policies:
  - {topic: "//*/FFFFFFFF/FF/8001", delivery: latest, order: priority, max_age: 1h, max_attempts: 3}
limits: {message: 1M, queue_messages: 1M, queue_bytes: 2G, receivers: 1024, dead: 256M}
access:
  - {allow: [publish, call], source: "/FFFFFFFF/FF/FFFF"}
  - {allow: subscribe, sink: "//vehicle1/10/1/8001"}
retry: {initial: 100ms, factor: 2, maximum: 10s, jitter: 0.2, max_attempts: 10}
subscriptions: [{topic: "//device7/10/1/8001", subscriber: "/20/1/0", sample_period: 250ms}]
"""

SMALL = """\
dispatcher: bus
authority: vehicle1
state: ./state
legs:
  local: {in-process: {}, authorities: [vehicle1]}
"""


def test_everything_that_a_file_can_say_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "bus.yaml"
    file.write_text(FULL)
    config = load_bus(file)
    assert config.state == tmp_path / "state"
    assert [leg.kind for leg in config.legs.values()] == ["ring", "mqtt", "zenoh"]
    mqtt = config.legs["cloud"].mqtt
    assert mqtt is not None
    assert mqtt.certificate == tmp_path / "c.pem"
    assert config.legs["cloud"].message == 256 << 10
    policy = config.policies[0].policy()
    assert (policy.delivery, policy.order, policy.max_age) == (Delivery.LATEST, "priority", 3600)
    own = UUri("vehicle1", 0xFFFFFFFF, 0xFF, 0xFFFF)
    assert config.access[0].rules("vehicle1") == [
        Rule(allow="publish", source=own),
        Rule(allow="call", source=own),
    ]
    assert config.retry.retry().backoff.initial == 0.1
    assert config.limits.limits({}).queue_bytes == 2 << 30
    assert config.subscriptions[0].sample_period == 0.25


def test_a_queue_is_bounded_in_the_words_of_every_stream() -> None:
    more = (
        "policies: [{queue: queue-size:100}, {queue: latency:2s, max_age: 1h}, {queue: latest}]\n"
    )
    policies = [it.policy() for it in parse_config(SMALL + more, BusConfig).policies]
    assert [(it.most_waiting, it.longest_wait) for it in policies] == [
        (100, None),
        (None, 2),
        (1, None),
    ]


@pytest.mark.parametrize(
    ("change", "line", "field", "reason"),
    [
        (("authority: vehicle1", "authority: Vehicle1"), 2, "authority", "upper-case"),
        (("authority: vehicle1\n", ""), 1, "authority", "is required"),
        (("authorities: [cloud, vehicle2]", "authorities: [vehicle1]"), 5, "legs", "behind local"),
        (("default: cloud", "default: clowd"), 13, "routes", "the legs are local, cloud, radio"),
        (("delivery: latest", "delivery: once"), 15, "policies[0].delivery", "at-least-once"),
        (("max_age: 1h", "queue: queue-size"), 15, "policies[0].queue", "not a delivery policy"),
        (("max_age: 1h", "queue: throttle"), 15, "policies[0]", "make a sender wait"),
        (("max_age: 1h", "queue: queue-size:5"), 15, "policies[0]", "two limits"),
        (("order: priority", "order: random"), 15, "policies[0].order", "arrival"),
        (("//*/FFFFFFFF/FF/8001", "//*/F/8001"), 15, "policies[0].topic", "2 path segments"),
        (("allow: subscribe", "allow: subscribed"), 19, "access[1].allow", "'subscribe'"),
        (("max_age: 1h", "max_age: 0"), 15, "policies[0]", "above 0 seconds"),
        (("maximum: 10s", "maximum: 1ms"), 20, "retry", "must not be below the initial"),
        (("message: 1M", "message: 1X"), 16, "limits.message", "expected a size"),
        (("message: 1M", "message: 0"), 16, "limits", "at least 1"),
        (("queue_bytes", "queue_byte"), 16, "limits.queue_byte", "unknown key"),
        (("fmq:/run/bus/in", "log:/run/bus/in"), 6, "legs.local.ring.receive", "a ring"),
        (("{ue_id}", "{ue_i}"), 6, "legs.local.ring.send", "{ue_i} is no field"),
        (('listen: ["tcp/127.0.0.1:7447"]', "listen: []"), 12, "legs.radio.zenoh", "meets nobody"),
        (("radio: {zenoh", "radio: {mqtt: {url: m}, zenoh"), 12, "legs.radio", "one of ring"),
        (("radio:", "services:"), 5, "legs", "is the leg of the services"),
        (('8001", subscriber', '1", subscriber'), 21, "subscriptions[0].topic", "8000 to FFFE"),
    ],
)
def test_a_fault_is_told_with_its_line_and_its_field(
    change: tuple[str, str], line: int, field: str, reason: str
) -> None:
    text = FULL.replace(*change)
    assert text != FULL
    with pytest.raises(ConfigError) as caught:
        parse_config(text, BusConfig, "bus.yaml")
    assert (caught.value.line, caught.value.field) == (line, field)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"bus.yaml:{line}: {field}: ")


def test_several_faults_are_told_at_once() -> None:
    text = FULL.replace("topics: d2d", "topics: x").replace("latest", "x")
    with pytest.raises(ConfigError) as caught:
        parse_config(text, BusConfig, "bus.yaml")
    assert "bus.yaml:9: legs.cloud.mqtt.topics" in str(caught.value)
    assert "bus.yaml:15: policies[0].delivery" in str(caught.value)


def test_a_check_opens_files_and_connects_to_nothing(tmp_path: Path) -> None:
    config = parse_config(FULL, BusConfig)
    with pytest.raises(PenstockError, match=r"ca\.pem"):
        check(config)
    plain = parse_config(
        FULL.replace(", ca: ca.pem, certificate: c.pem, key: k.pem", ""), BusConfig
    )
    check(plain)
    wrong = parse_config(FULL.replace("mqtts://broker:8883", "http://broker"), BusConfig)
    with pytest.raises(PenstockError, match="not a broker"):
        check(wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_dispatcher_is_built_of_a_small_file(tmp_path: Path) -> None:
    config = parse_config(SMALL.replace("./state", str(tmp_path / "state")), BusConfig)
    with build(config) as bus:
        bus.start()
        assert set(bus.buses) == {"local"}
        assert set(bus.legs) == {"local"}


def test_what_was_opened_is_closed_when_something_cannot_be_made(tmp_path: Path) -> None:
    text = SMALL.replace("./state", str(tmp_path / "state")) + "dead_letters: /1/1/8001\n"
    config = parse_config(text, BusConfig)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "outbox").write_text("in the way")
    with pytest.raises(PenstockError):
        build(config)
