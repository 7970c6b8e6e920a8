from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.core.errors import InvalidOption, InvalidURL, StorageError
from penstock.protocols.uprotocol import (
    UCode,
    UMessage,
    UMessageType,
    UPriority,
    UStatus,
    UStatusError,
    UUri,
    notification,
    publish,
    request,
    response,
)
from penstock.protocols.uprotocol.mqtt_wire import REFUSED
from penstock.protocols.uprotocol.transports.interface import NOT_TRIED
from penstock.protocols.uprotocol.transports.listeners import ListenerLimits
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from support.descriptors import many_descriptors
from support.mosquitto import Mosquitto, free_port, mosquitto
from support.mqtt_client import PlainClient
from support.until import until

TOPIC = UUri("vehicle1", 0x10AB, 3, 0x80CD)
ENTITY = UUri("cloud", 0x300EF, 4, 0)
METHOD = UUri("cloud", 0x300EF, 4, 7)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as running:
        yield running


def leg(broker: Mosquitto, name: str, **options: Any) -> MqttLeg:
    mine = {
        key: options.pop(key) for key in ("topics", "must_be_heard", "exact_ttl") if key in options
    }
    return MqttLeg(name, name, MqttBroker.parse(broker.url, client_id=name, **options), **mine)


def started(broker: Mosquitto, name: str, ingest: Any = None, **options: Any) -> MqttLeg:
    made = leg(broker, name, **options)
    made.start(ingest or (lambda _: None), [name])
    assert made.await_connection(10) is None
    return made


def numbered(count: int) -> list[UMessage]:
    return [notification(TOPIC, ENTITY, b"%06d" % n) for n in range(count)]


def test_all_kinds_of_messages_arrive_unchanged(broker: Mosquitto) -> None:
    options = MqttBroker.parse(broker.url)
    with MqttTransport("vehicle1", options) as sender, MqttTransport("cloud", options) as receiver:
        heard: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append)
        receiver.register_listener(UUri.ANY, heard.append, UUri.ANY.with_authority("cloud"))
        asked = request(TOPIC.with_resource(0), METHOD, b"x", token="secret", permission_level=5)
        back = response(asked, b"y", commstatus=UCode.NOT_FOUND).with_attributes(
            sink=ENTITY, source=METHOD.with_authority("vehicle1")
        )
        sent = [
            publish(TOPIC, b"payload", priority=UPriority.CS6, ttl=60_000),
            publish(TOPIC, ttl=60_500),
            notification(TOPIC, ENTITY, b"\x00" * 100_000),
            asked,
            back,
        ]
        for message in sent:
            sender.send(message)
        until(lambda: len(heard) == len(sent))
        assert heard == sent
        assert sender.statistics()["sent"] == 5


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_published_looks_as_other_implementations_expect_it(
    broker: Mosquitto, exact: bool
) -> None:
    raw = PlainClient(broker.port)
    sender = started(broker, "vehicle1", exact_ttl=exact)
    asked = request(TOPIC.with_resource(0), METHOD, ttl=5000)
    message = notification(TOPIC, ENTITY, b"payload", ttl=5000, priority=UPriority.CS5)
    assert sender.deliver(ENTITY, [message, asked]) == [None, None]
    until(lambda: len(raw.got) == 2)
    first = raw.got[0]
    assert first.topic == "vehicle1/10AB/0/3/80CD/cloud/EF/3/4/0"
    assert first.qos == 1
    assert first.payload == b"payload"
    properties: Any = first.properties
    assert properties.UserProperty == [
        ("uP", "1"),
        ("1", str(message.attributes.id)),
        ("2", "up-not.v1"),
        ("3", "up://vehicle1/10AB/3/80CD"),
        ("4", "up://cloud/300EF/4/0"),
        ("5", "CS5"),
        *([("6", "5000")] if exact else []),
    ]
    assert 4 <= properties.MessageExpiryInterval <= 5
    assert not hasattr(properties, "ContentType")
    raw.close()
    sender.close()


def test_what_is_no_message_or_claims_another_source_is_acknowledged_and_counted(
    broker: Mosquitto,
) -> None:
    stored: list[UMessage] = []
    receiver = started(broker, "cloud", stored.extend)
    raw = PlainClient(broker.port)

    def put(topic: str, pairs: Sequence[tuple[str, str]]) -> None:
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        if pairs:
            properties.UserProperty = list(pairs)
        raw.client.publish(topic, b"x", qos=1, properties=properties)

    good = notification(TOPIC, ENTITY, b"x")
    topic = "vehicle1/10AB/0/3/80CD/cloud/EF/3/4/0"
    pairs = [
        ("uP", "1"),
        ("1", str(good.attributes.id)),
        ("2", "up-not.v1"),
        ("3", str(TOPIC)),
        ("4", str(ENTITY)),
    ]
    put(topic, [])
    put(topic, pairs[1:])
    put(topic, [*pairs[:3], ("3", "up://other/10AB/3/80CD"), pairs[4]])
    put(topic, [*pairs, ("5", "CS9")])
    put(topic, pairs)
    until(lambda: stored)
    assert stored == [good]
    assert receiver.statistics()["undecodable"] == 4
    raw.close()
    receiver.close()


def test_a_batch_arrives_in_order_and_balances(broker: Mosquitto) -> None:
    stored: list[UMessage] = []
    receiver = started(broker, "cloud", stored.extend)
    sender = started(broker, "vehicle1", window=16)
    assert sender.is_up
    messages = numbered(1000)
    assert sender.deliver(ENTITY, messages) == [None] * 1000
    until(lambda: len(stored) == 1000)
    assert stored == messages
    assert sender.statistics()["published"] == sender.statistics()["delivered"] == 1000
    assert receiver.statistics()["received"] == 1000
    sender.close()
    receiver.close()


def test_it_does_not_matter_how_many_files_are_open(broker: Mosquitto) -> None:
    stored: list[UMessage] = []
    with many_descriptors():
        receiver = started(broker, "cloud", stored.extend)
        sender = started(broker, "vehicle1")
        messages = numbered(50)
        assert sender.deliver(ENTITY, messages) == [None] * 50
        until(lambda: stored == messages)
        sender.close()
        receiver.close()


def test_several_threads_deliver_at_once(broker: Mosquitto) -> None:
    stored: list[UMessage] = []
    receiver = started(broker, "cloud", stored.extend)
    sender = started(broker, "vehicle1", window=8)
    outcomes: list[Any] = []

    def deliver() -> None:
        outcomes.extend(sender.deliver(ENTITY, numbered(100)))

    threads = [threading.Thread(target=deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == [None] * 400
    until(lambda: len(stored) == 400)
    sender.close()
    receiver.close()


def test_a_message_to_somebody_that_nobody_listens_for_is_unavailable(broker: Mosquitto) -> None:
    sender = started(broker, "vehicle1", window=1)
    first, *rest = sender.deliver(ENTITY, numbered(3))
    assert first is not None
    assert first.code == UCode.UNAVAILABLE
    assert all(it is NOT_TRIED for it in rest)
    assert sender.deliver(ENTITY, [publish(TOPIC)]) == [None]
    sender.close()
    careless = started(broker, "vehicle1", must_be_heard=False)
    assert careless.deliver(ENTITY, numbered(1)) == [None]
    careless.close()


def test_a_leg_listens_to_topics_until_told_otherwise(broker: Mosquitto) -> None:
    stored: list[UMessage] = []
    receiver = leg(broker, "cloud")
    receiver.listen(TOPIC)
    receiver.start(
        lambda them: stored.extend(it for it in them if isinstance(it, UMessage)), ["cloud"]
    )
    assert receiver.await_connection(10) is None
    other = TOPIC.with_resource(0x8001)
    receiver.listen(other)
    sender = started(broker, "vehicle1")
    one, two = publish(TOPIC, b"1"), publish(other, b"2")
    sender.deliver(ENTITY, [one, two, publish(TOPIC.with_resource(0x8002))])
    until(lambda: len(stored) == 2)
    receiver.unlisten(TOPIC)
    sender.deliver(ENTITY, [one, two])
    until(lambda: len(stored) == 3)
    assert stored == [one, two, two]
    with pytest.raises(UStatusError, match="INVALID_ARGUMENT"):
        receiver.listen(ENTITY)
    sender.close()
    receiver.close()


def test_a_leg_does_not_hear_itself(broker: Mosquitto) -> None:
    stored: list[UMessage] = []
    both = started(broker, "vehicle1", stored.extend)
    both.listen(TOPIC)
    other: list[UMessage] = []
    listener = started(broker, "cloud", other.extend)
    listener.listen(TOPIC)
    both.deliver(ENTITY, [publish(TOPIC)])
    until(lambda: other)
    assert stored == []
    both.close()
    listener.close()


def test_between_devices_topics_name_authorities_and_publishes_get_a_sink(
    broker: Mosquitto,
) -> None:
    raw = PlainClient(broker.port)
    stored: list[UMessage] = []
    receiver = started(broker, "cloud", stored.extend, topics="d2d")
    sender = started(broker, "vehicle1", topics="d2d")
    message, told = publish(TOPIC, b"x"), notification(TOPIC, ENTITY)
    assert sender.deliver(UUri("cloud"), [message, told]) == [None, None]
    until(lambda: len(stored) == 2 and len(raw.got) == 2)
    assert {it.topic for it in raw.got} == {"vehicle1/cloud"}
    assert stored == [message.with_attributes(sink=UUri.ANY.with_authority("cloud")), told]
    for closable in (raw, sender, receiver):
        closable.close()


def test_between_devices_messages_for_other_entities_hold_up_nobody(broker: Mosquitto) -> None:
    sender = started(broker, "vehicle1", topics="d2d")
    here = MqttBroker.parse(broker.url, client_id="cloud")
    limits = ListenerLimits(waiting=4)
    with MqttTransport("cloud", here, topics="d2d", limits=limits) as transport:
        heard: list[UMessage] = []
        transport.register_listener(TOPIC, heard.append, ENTITY)
        # They come by the same filter, +/cloud, for another process of this authority.
        others = [notification(TOPIC, ENTITY.replace(ue_id=9)) for _ in range(20)]
        mine = notification(TOPIC, ENTITY)
        assert sender.deliver(ENTITY, [*others, mine]) == [None] * 21
        until(lambda: heard)
        assert heard == [mine]
        books = transport.statistics()
        assert (books["waiting"], books["displaced"]) == (2, 18)
        # The latest wait, for a listener that is registered a moment later.
        transport.register_listener(TOPIC, heard.append, ENTITY.replace(ue_id=9))
        until(lambda: len(heard) == 3)
        assert heard == [mine, *others[-2:]]
    sender.close()


def test_an_exact_ttl_survives_the_time_in_the_broker(broker: Mosquitto) -> None:
    receiver = started(broker, "cloud")
    receiver.close()  # its session stays
    sender = started(broker, "vehicle1")
    message = notification(TOPIC, ENTITY, ttl=60_000)
    short = notification(TOPIC, ENTITY, ttl=1000)
    assert sender.deliver(ENTITY, [message, short]) == [None, None]
    time.sleep(2.1)
    stored: list[UMessage] = []
    receiver = started(broker, "cloud", stored.extend)
    until(lambda: stored)
    time.sleep(0.1)
    assert stored == [message]
    sender.close()
    receiver.close()


def test_a_message_larger_than_the_broker_takes_is_refused(tmp_path: Path) -> None:
    with mosquitto(tmp_path, ["max_packet_size 2000"]) as broker:
        sender = started(broker, "vehicle1")
        large = notification(TOPIC, ENTITY, bytes(3000))
        first, second = sender.deliver(ENTITY, [large, large])
        assert first is not None
        assert first.code == UCode.RESOURCE_EXHAUSTED
        assert second is NOT_TRIED
        sender.close()


def test_a_broker_that_is_down_is_unavailable_at_once() -> None:
    nobody = MqttBroker(port=free_port(), client_id="vehicle1")
    sender = MqttLeg("vehicle1", "vehicle1", nobody)
    sender.start(lambda _: None, ["vehicle1"])
    assert not sender.is_up
    began = time.monotonic()
    first, second = sender.deliver(ENTITY, numbered(2))
    assert first is not None
    assert first.code == UCode.UNAVAILABLE
    assert second is NOT_TRIED
    sender.stop()
    sender.close()
    assert time.monotonic() - began < 3
    sender.close()
    [status] = sender.deliver(ENTITY, numbered(1))
    assert status is not None


def test_a_broker_that_is_killed_is_found_again_and_nothing_acknowledged_is_lost(
    tmp_path: Path,
) -> None:
    lines = ["persistence true", f"persistence_location {tmp_path}/"]
    with mosquitto(tmp_path, lines) as broker:
        stored: list[UMessage] = []
        receiver = started(broker, "cloud", stored.extend)
        sender = started(broker, "vehicle1")
        rest = numbered(300)
        everything = list(rest)
        sender.deliver(ENTITY, rest[:100])
        rest = rest[100:]
        broker.end()
        [status, *_] = sender.deliver(ENTITY, rest)
        assert status is not None
        assert status.code == UCode.UNAVAILABLE
        broker.start()
        deadline = time.monotonic() + 30
        while rest:
            assert time.monotonic() < deadline
            done = sender.deliver(ENTITY, rest)
            rest = rest[done.index(next((it for it in done if it), None)) :] if any(done) else []
            time.sleep(0.05)
        ids = {message.attributes.id for message in everything}
        until(lambda: {message.attributes.id for message in stored} == ids)
        assert sender.statistics()["connections"] == 2
        sender.close()
        receiver.close()


def test_without_a_session_subscriptions_are_made_again(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:  # which forgets all sessions when it ends
        stored: list[UMessage] = []
        receiver = started(broker, "cloud", stored.extend)
        receiver.listen(TOPIC)
        sender = started(broker, "vehicle1")
        broker.kill()
        until(lambda: receiver.await_connection(0) and sender.await_connection(0))
        other = TOPIC.with_resource(0x8001)
        receiver.listen(other)
        receiver.unlisten(TOPIC)
        broker.start()
        assert sender.await_connection(15) is None
        assert receiver.await_connection(15) is None
        until(lambda: sender.deliver(ENTITY, numbered(1)) == [None])
        sender.deliver(ENTITY, [publish(TOPIC), publish(other)])
        until(lambda: any(it.attributes.source == other for it in stored))
        assert not any(it.attributes.type == UMessageType.PUBLISH for it in stored[:-1])
        sender.close()
        receiver.close()


def test_what_was_not_stored_is_not_acknowledged_and_comes_again(broker: Mosquitto) -> None:
    attempts: list[int] = []

    def never(messages: Sequence[UMessage]) -> None:
        attempts.append(len(messages))
        raise StorageError("writing", "it", OSError(28, "no space"))

    receiver = started(broker, "cloud", never)
    sender = started(broker, "vehicle1")
    messages = numbered(50)
    assert sender.deliver(ENTITY, messages) == [None] * 50
    until(lambda: len(attempts) > 2)
    receiver.close()
    assert receiver.statistics()["ingest_failures"] == len(attempts)
    stored: list[UMessage] = []
    again = started(broker, "cloud", stored.extend)
    until(lambda: len(stored) == 50)
    assert stored == messages
    again.close()
    # All of these are acknowledged now.
    last: list[UMessage] = []
    third = started(broker, "cloud", last.extend)
    extra = numbered(1)
    sender.deliver(ENTITY, extra)
    until(lambda: last)
    assert last == extra
    third.close()
    sender.close()


def test_no_more_are_unacknowledged_than_the_receive_maximum(broker: Mosquitto) -> None:
    go_on = threading.Event()
    seen: list[int] = []

    def slow(messages: Sequence[UMessage]) -> None:
        seen.append(len(messages))
        assert go_on.wait(20)

    receiver = started(broker, "cloud", slow, receive_maximum=10)
    sender = started(broker, "vehicle1")
    assert sender.deliver(ENTITY, numbered(100)) == [None] * 100
    until(lambda: seen)
    time.sleep(0.2)
    assert receiver._intake is not None
    assert len(receiver._intake._pump._waiting) + seen[0] <= 10
    go_on.set()
    until(lambda: receiver.statistics()["received"] == 100)
    assert sum(seen) == 100
    sender.close()
    receiver.close()


def test_a_broker_that_hangs_makes_nobody_hang(broker: Mosquitto) -> None:
    sender = started(broker, "vehicle1", ack_timeout=0.5, connect_timeout=1.0)
    broker.freeze()
    try:
        began = time.monotonic()
        [status, *_] = sender.deliver(ENTITY, numbered(3))
        assert status is not None
        assert status.code == UCode.UNAVAILABLE
        sender.deliver(ENTITY, numbered(3))
        sender.close()
        assert time.monotonic() - began < 8
    finally:
        broker.thaw()


def test_a_transport_says_what_the_broker_says(tmp_path: Path) -> None:
    access = tmp_path / "acl"
    access.write_text("topic readwrite vehicle1/10AB/0/3/80CD\n")
    with mosquitto(tmp_path, [f"acl_file {access}"]) as broker:
        options = MqttBroker.parse(broker.url)
        with MqttTransport("vehicle1", options, must_be_heard=True) as transport:
            transport.send(publish(TOPIC))
            with pytest.raises(UStatusError) as error:
                transport.send(publish(TOPIC.with_resource(0x8001)))
            assert error.value.code == UCode.PERMISSION_DENIED


def test_a_refusal_stays_one_when_the_broker_hangs_up_after_it(tmp_path: Path) -> None:
    # As some versions of mosquitto do: what is behind it may work with the next connection.
    access = tmp_path / "acl"
    access.write_text("topic readwrite vehicle1/10AB/0/3/80CD\n")
    refused: list[UStatus] = []
    with (
        mosquitto(tmp_path, [f"acl_file {access}"]) as broker,
        MqttLeg("vehicle1", "vehicle1", MqttBroker.parse(broker.url)) as sender,
    ):
        sender.start(lambda _: None, ())
        messages = [publish(TOPIC.with_resource(0x8001)), *(publish(TOPIC) for _ in range(3))]
        while len(refused) < 5:
            assert sender.await_connection(10) is None
            status = sender.deliver(TOPIC, messages)[0]
            assert status is not None
            if status.message.startswith(REFUSED):  # else it hung up before that was heard
                refused.append(status)
    assert {status.code for status in refused} == {UCode.PERMISSION_DENIED}


def test_a_transport_without_a_broker_is_unavailable() -> None:
    nobody = MqttBroker(port=free_port(), connect_timeout=0.3)
    with MqttTransport("vehicle1", nobody) as transport:
        with pytest.raises(UStatusError, match="UNAVAILABLE"):
            transport.send(publish(TOPIC))
        with pytest.raises(UStatusError, match="UNAVAILABLE"):
            transport.register_listener(TOPIC, print)
        assert transport.statistics()["listeners"] == 0


@pytest.mark.parametrize("topics", ["e2e", "d2d"])
def test_a_listener_is_called_once_however_many_patterns_match(
    broker: Mosquitto, topics: Any
) -> None:
    options = MqttBroker.parse(broker.url)
    with (
        MqttTransport("vehicle1", options, topics=topics) as sender,
        MqttTransport("cloud", options, topics=topics) as receiver,
    ):
        heard: list[UMessage] = []
        others: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append, UUri.ANY.with_authority("cloud"))
        receiver.register_listener(UUri.ANY, others.append, ENTITY)
        sent = notification(TOPIC, ENTITY)
        for _ in range(2):
            sender.send(sent)
        last = notification(TOPIC, ENTITY.with_authority("cloud"), b"last")
        sender.send(last)
        until(lambda: last in heard and last in others)
        time.sleep(0.1)
        assert heard == others == [sent, sent, last]
        receiver.unregister_listener(UUri.ANY, others.append, ENTITY)
        sender.send(sent)
        until(lambda: len(heard) == 4)
        assert len(others) == 3


@pytest.mark.parametrize(
    ("options", "is_lasting"),
    [({}, False), ({"client_id": "c"}, True), ({"client_id": "c", "clean_start": True}, False)],
)
def test_a_leg_lasts_if_the_next_one_gets_what_it_did_not_acknowledge(
    options: dict[str, Any], is_lasting: bool
) -> None:
    broker = MqttBroker.parse("mqtt://127.0.0.1", **options)
    assert MqttLeg("far", "hub", broker).is_lasting == is_lasting


def test_brokers_are_written_as_urls() -> None:
    made = MqttBroker.parse("mqtts://me:p%40ss@broker.example:99", client_id="x")
    assert (made.host, made.port, made.tls) == ("broker.example", 99, True)
    assert (made.username, made.password, made.client_id) == ("me", "p@ss", "x")
    assert "p@ss" not in repr(made)
    assert MqttBroker.parse("mqtts://b").port == 8883
    for bad in ("http://b", "mqtt:", "mqtt://b/path", "mqtt://b:99999"):
        with pytest.raises(InvalidURL):
            MqttBroker.parse(bad)
    with pytest.raises(InvalidOption):
        MqttBroker.parse("mqtt://b", window=0)
    with pytest.raises(InvalidOption):
        MqttBroker.parse("mqtt://b", nonsense=0)
