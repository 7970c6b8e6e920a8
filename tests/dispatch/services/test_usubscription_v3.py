"""What do SDKs get that speak uSubscription, version 3? (docs/specs/uprotocol.md 6.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.uprotocol import SubscriptionStatus, UCode, UMessage, UUri, proto
from support.service_bus import ServiceBus

TOPIC = UUri("here", 0x10, 1, 0x8001)
CHANGES_3 = UUri("here", 0, 3, 0x8000)
CHANGES_4 = UUri("here", 0, 4, 0x8000)
SUBSCRIBED_3 = 2


def v3(name: str, **fields: Any) -> Any:
    return proto.message_class(f"uprotocol.core.usubscription.v3.{name}")(**fields)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[ServiceBus]:
    made = ServiceBus(tmp_path / "state")
    yield made
    made.close()


def ask(bus: ServiceBus, who: UUri, number: int, payload: Any) -> UMessage:
    return bus.ask(who, UUri("here", 0, 3, number), payload)


def answer(bus: ServiceBus, who: UUri, number: int, payload: Any, name: str) -> Any:
    message = ask(bus, who, number, payload)
    assert message.attributes.commstatus in (None, UCode.OK)
    assert message.attributes.source == UUri("here", 0, 3, number)
    return type(v3(name)).FromString(message.payload or b"")


def subscribe(bus: ServiceBus, who: UUri, topic: UUri = TOPIC, **attributes: Any) -> Any:
    asked = v3("SubscriptionRequest", topic=topic.to_proto())
    if attributes:
        asked.attributes.CopyFrom(v3("SubscribeAttributes", **attributes))
    return answer(bus, who, 1, asked, "SubscriptionResponse")


def told(bus: ServiceBus, who: UUri, source: UUri) -> list[bytes]:
    return [
        message.payload or b""
        for message in bus.local.arrived[who]
        if message.attributes.source == source
    ]


def test_who_subscribes_in_version_3_gets_the_publishes_and_hears_of_it_in_that(
    bus: ServiceBus,
) -> None:
    alice = bus.entity(0x20)
    said = subscribe(bus, alice, sample_period_ms=0)
    assert (said.status.state, UUri.from_proto(said.topic)) == (SUBSCRIBED_3, TOPIC)
    bus.publish(TOPIC, b"hello")
    assert b"hello" in bus.payloads(alice)
    (update,) = told(bus, alice, CHANGES_3)
    change = type(v3("Update")).FromString(update)
    assert UUri.from_proto(change.topic) == TOPIC
    assert UUri.from_proto(change.subscriber.uri) == alice
    assert change.status.state == SUBSCRIBED_3
    assert told(bus, alice, CHANGES_4) == []


def test_both_versions_have_the_same_subscriptions(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    subscribe(bus, alice, sample_period_ms=500)
    bus.subscribe(bob, TOPIC)
    asked = v3("FetchSubscriptionsRequest", topic=TOPIC.to_proto())
    found = answer(bus, alice, 3, asked, "FetchSubscriptionsResponse").subscriptions
    assert {UUri.from_proto(one.subscriber.uri) for one in found} == {alice, bob}
    assert {one.attributes.sample_period_ms for one in found} == {500, 0}
    asked = v3("FetchSubscribersRequest", topic=TOPIC.to_proto())
    those = answer(bus, alice, 8, asked, "FetchSubscribersResponse").subscribers
    assert {UUri.from_proto(one.uri) for one in those} == {alice, bob}
    whose = v3("SubscriberInfo", uri=bob.to_proto())
    asked = v3("FetchSubscriptionsRequest", subscriber=whose)
    (found,) = answer(bus, alice, 3, asked, "FetchSubscriptionsResponse").subscriptions
    assert UUri.from_proto(found.subscriber.uri) == bob
    answer(bus, alice, 2, v3("UnsubscribeRequest", topic=TOPIC.to_proto()), "UnsubscribeResponse")
    assert [one.subscriber for one in bus.table] == [bob]


def test_who_registers_for_a_topic_hears_of_that_topic_only_also_after_a_restart(
    tmp_path: Path,
) -> None:
    bus = ServiceBus(tmp_path / "state")
    watcher, alice = bus.entity(0x40), bus.entity(0x20)
    asked = v3("NotificationsRequest", topic=TOPIC.to_proto())
    answer(bus, watcher, 6, asked, "NotificationsResponse")
    clock = bus.clock
    bus.close()
    bus = ServiceBus(tmp_path / "state", clock=clock)
    bus.subscribe(alice, TOPIC)
    subscribe(bus, alice, TOPIC.with_resource(0x8002))
    (update,) = told(bus, watcher, CHANGES_3)
    assert UUri.from_proto(type(v3("Update")).FromString(update).topic) == TOPIC
    answer(bus, watcher, 7, asked, "NotificationsResponse")
    bus.unsubscribe(alice, TOPIC)
    assert len(told(bus, watcher, CHANGES_3)) == 1
    bus.close()


def test_whoever_subscribes_to_the_changes_of_version_3_gets_them(bus: ServiceBus) -> None:
    watcher = bus.entity(0x40)
    subscribe(bus, watcher, CHANGES_3)
    bus.subscribe(bus.entity(0x20), TOPIC)
    states = [
        type(v3("Update")).FromString(it).status.state for it in told(bus, watcher, CHANGES_3)
    ]
    assert SUBSCRIBED_3 in states


def test_an_expiration_that_is_past_subscribes_nobody(bus: ServiceBus) -> None:
    said = subscribe(bus, bus.entity(0x20), expire={"seconds": 1})
    assert said.status.state == int(SubscriptionStatus.UNSUBSCRIBED) - 1
    assert bus.table.count == 0


@pytest.mark.parametrize(
    ("number", "payload"),
    [
        (1, v3("SubscriptionRequest")),
        (1, v3("SubscriptionRequest", topic=TOPIC.with_resource(1).to_proto())),
        (1, b"\xff"),
        (2, v3("UnsubscribeRequest")),
        (3, v3("FetchSubscriptionsRequest", subscriber=v3("SubscriberInfo"))),
        (6, v3("NotificationsRequest")),
        (8, v3("FetchSubscribersRequest")),
    ],
)
def test_what_is_missing_or_wrong_is_an_invalid_argument(
    bus: ServiceBus, number: int, payload: Any
) -> None:
    said = ask(bus, bus.entity(0x20), number, payload)
    assert said.attributes.commstatus == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "topic",
    [
        UUri("*", 0x10, 1, 0x8001),
        UUri("here", 0xFFFF, 1, 0x8001),
        UUri("here", 0xFFFFFFFF, 1, 0x8001),
        UUri("here", 0x10, 0xFF, 0x8001),
        UUri("here", 0x10, 1, 0xFFFF),
    ],
)
def test_a_wildcard_is_an_invalid_argument(bus: ServiceBus, topic: UUri) -> None:
    uri = topic.to_proto()
    for number, payload in (
        (1, v3("SubscriptionRequest", topic=uri)),
        (2, v3("UnsubscribeRequest", topic=uri)),
        (3, v3("FetchSubscriptionsRequest", topic=uri)),
        (3, v3("FetchSubscriptionsRequest", subscriber=v3("SubscriberInfo", uri=uri))),
        (6, v3("NotificationsRequest", topic=uri)),
        (7, v3("NotificationsRequest", topic=uri)),
        (8, v3("FetchSubscribersRequest", topic=uri)),
    ):
        if number == 3 and payload.HasField("subscriber") and topic.has_wildcard_version:
            continue  # the version is said of topics only
        said = ask(bus, bus.entity(0x20), number, payload)
        assert said.attributes.commstatus == UCode.INVALID_ARGUMENT, number
    assert bus.table.count == 0
    assert bus.table.watchers == []


def test_a_local_topic_is_one_of_this_authority(bus: ServiceBus) -> None:
    alice, watcher = bus.entity(0x20), bus.entity(0x40)
    local = TOPIC.with_authority("")
    asked = v3("NotificationsRequest", topic=local.to_proto())
    answer(bus, watcher, 6, asked, "NotificationsResponse")
    said = subscribe(bus, alice, local)
    assert (said.status.state, UUri.from_proto(said.topic)) == (SUBSCRIBED_3, local)
    bus.publish(TOPIC, b"hello")
    assert b"hello" in bus.payloads(alice)
    assert len(told(bus, watcher, CHANGES_3)) == 1
    for number, name in ((3, "FetchSubscriptions"), (8, "FetchSubscribers")):
        found = answer(
            bus, alice, number, v3(f"{name}Request", topic=local.to_proto()), f"{name}Response"
        )
        assert found.ByteSize()
    whose = v3("SubscriberInfo", uri=alice.with_authority("").to_proto())
    asked = v3("FetchSubscriptionsRequest", subscriber=whose)
    assert len(answer(bus, alice, 3, asked, "FetchSubscriptionsResponse").subscriptions) == 1
    asked = v3("UnsubscribeRequest", topic=local.to_proto())
    answer(bus, alice, 2, asked, "UnsubscribeResponse")
    assert bus.table.count == 0
    # In this version the subscriber hears of that, too.
    assert len(told(bus, alice, CHANGES_3)) == 2


def test_a_streamer_that_looks_for_nothing_in_particular_gets_all(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    subscribe(bus, alice)
    subscribe(bus, bob, TOPIC.with_resource(0x8002))
    asked = v3("FetchSubscriptionsRequest")
    found = answer(bus, alice, 3, asked, "FetchSubscriptionsResponse").subscriptions
    assert {UUri.from_proto(one.subscriber.uri) for one in found} == {alice, bob}


def test_methods_that_version_3_does_not_have_are_not_implemented(bus: ServiceBus) -> None:
    for number in (4, 5, 10):
        said = ask(bus, bus.entity(0x20), number, None)
        assert said.attributes.commstatus == UCode.UNIMPLEMENTED


def test_a_reset_is_for_another_usubscription_only(bus: ServiceBus) -> None:
    subscribe(bus, bus.entity(0x20))
    said = ask(bus, bus.entity(0x20), 9, v3("ResetRequest"))
    assert said.attributes.commstatus == UCode.PERMISSION_DENIED
    said = bus.ask(UUri("there", 0, 3, 0), UUri("here", 0, 3, 9), v3("ResetRequest"), leg="far")
    assert said.attributes.commstatus in (None, UCode.OK)
    assert bus.table.count == 0
