"""Who gets which topics: the service uSubscription, version 4 (docs/specs/uprotocol.md 6.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocols.uprotocol import (
    UUID7,
    SubscriptionStatus,
    UCode,
    UMessageType,
    UPayloadFormat,
    UUri,
    notification,
    proto,
    request,
)
from support.service_bus import ServiceBus

SUBSCRIBED = SubscriptionStatus.SUBSCRIBED
UNSUBSCRIBED = SubscriptionStatus.UNSUBSCRIBED
TOPIC = UUri("here", 0x10, 1, 0x8001)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[ServiceBus]:
    made = ServiceBus(tmp_path / "state")
    yield made
    made.close()


def test_who_subscribes_gets_the_publishes_and_nobody_else(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    answer = bus.subscribe(alice, TOPIC)
    assert (UUri.from_proto(answer.topic), answer.status) == (TOPIC, SUBSCRIBED)
    bus.publish(TOPIC, b"hello")
    assert bus.payloads(alice) == [b"hello"]
    assert bus.payloads(bob) == []


def test_who_unsubscribes_gets_no_more_and_may_do_it_again(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC)
    assert bus.unsubscribe(alice, TOPIC) == proto.UnsubscribeResponse()
    bus.publish(TOPIC)
    assert bus.payloads(alice) == []
    assert bus.unsubscribe(alice, TOPIC) == proto.UnsubscribeResponse()


@pytest.mark.parametrize(
    "topic",
    [
        UUri("here", 0x10, 1, 0x7FFF),
        UUri("here", 0x10, 1, 0),
        UUri("here", 0x10, 1, 0xFFFF),
        UUri("", 0x10, 1, 0x8001),
        UUri("*", 0x10, 1, 0x8001),
        UUri("here", 0xFFFF, 1, 0x8001),
        UUri("here", 0xFFFFFFFF, 1, 0x8001),
        UUri.unchecked("UPPER", 0x10, 1, 0x8001),
        UUri.unchecked("here", 0x10, 0x100, 0x8001),
    ],
)
def test_what_is_not_a_topic_cannot_be_subscribed_to(bus: ServiceBus, topic: UUri) -> None:
    assert bus.subscribe(bus.entity(0x20), topic) == UCode.INVALID_ARGUMENT
    assert bus.unsubscribe(bus.entity(0x20), topic) == UCode.INVALID_ARGUMENT
    assert bus.table.count == 0


def test_a_wildcard_for_the_instance_is_a_topic_of_all_instances(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    assert bus.subscribe(alice, UUri("here", 0xFFFF0010, 1, 0x8001)).status == SUBSCRIBED
    bus.publish(UUri("here", 0x10, 1, 0x8001), b"0")
    bus.publish(UUri("here", 0x70010, 1, 0x8001), b"7")
    bus.publish(UUri("here", 0x11, 1, 0x8001), b"other")
    assert bus.payloads(alice) == [b"0", b"7"]


def test_a_payload_that_is_no_request_is_an_invalid_argument(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    for payload in (b"\xff\xff", b"", None):
        answer = bus.ask(alice, bus.subscription_method(1), payload)
        assert answer.attributes.commstatus == UCode.INVALID_ARGUMENT
    text = bus.ask(alice, bus.subscription_method(1), b"topic", payload_format=UPayloadFormat.TEXT)
    assert text.attributes.commstatus == UCode.INVALID_ARGUMENT


def test_a_request_in_an_any_is_answered_in_an_any(bus: ServiceBus) -> None:
    asked = proto.Any_(
        type_url="type.googleapis.com/uprotocol.core.usubscription.v4.SubscribeRequest",
        value=proto.SubscribeRequest(topic=TOPIC.to_proto()).SerializeToString(),
    )
    wrapped = UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY
    answer = bus.ask(bus.entity(0x20), bus.subscription_method(1), asked, payload_format=wrapped)
    assert answer.attributes.payload_format == wrapped
    inside = proto.Any_.FromString(answer.payload or b"")
    assert inside.type_url.endswith("v4.SubscribeResponse")
    assert proto.SubscribeResponse.FromString(inside.value).status == SUBSCRIBED


@pytest.mark.parametrize("method", [7, 8, 9])
def test_a_method_that_there_is_not_is_unimplemented(bus: ServiceBus, method: int) -> None:
    answer = bus.ask(bus.entity(0x20), bus.subscription_method(method))
    assert answer.attributes.commstatus == UCode.UNIMPLEMENTED


def test_the_methods_of_version_2_are_unimplemented(bus: ServiceBus) -> None:
    asked = proto.SubscribeRequest(topic=TOPIC.to_proto())
    answer = bus.ask(bus.entity(0x20), UUri("here", 0, 2, 1), asked)
    assert answer.attributes.commstatus == UCode.UNIMPLEMENTED


def test_dead_letters_go_to_who_subscribed_to_them(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, UUri("here", 4, 1, 0x8001))
    lost = notification(TOPIC, UUri("nowhere", 1, 1, 0), id=UUID7.new(bus.now_ms))
    bus.dispatcher.ingest("local", [lost.to_bytes()])
    bus.run()
    [payload] = bus.payloads(alice)
    letter = proto.DeadLetter.FromString(payload or b"")
    assert letter.code == UCode.UNAVAILABLE
    assert letter.full.attributes.id.msb == lost.attributes.id.msb  # type: ignore[union-attr]


# --- changes --------------------------------------------------------------------------------------


def test_a_change_is_told_in_three_ways(bus: ServiceBus) -> None:
    alice, bob, carol = bus.entity(0x20), bus.entity(0x30), bus.entity(0x40)
    bus.subscribe(carol, UUri("here", 0, 4, 0x8000))  # to the changes
    bus.ask(bob, bus.subscription_method(4))  # registers
    for who in (alice, bob, carol):
        bus.changes(who)
    bus.subscribe(alice, TOPIC, expires_ms=bus.now_ms + 60_000, sample_period=50)
    [(as_holder, told), [to_watcher], [published]] = (
        bus.changes(alice)[0],
        bus.changes(bob),
        bus.changes(carol),
    )
    assert as_holder == UMessageType.NOTIFICATION
    assert to_watcher == (UMessageType.NOTIFICATION, told)
    assert published == (UMessageType.PUBLISH, told)
    assert UUri.from_proto(told.topic) == TOPIC
    assert UUri.from_proto(told.subscriber) == alice
    assert (told.status, told.sample_period) == (SUBSCRIBED, 50)
    assert told.expiration.ToMilliseconds() == bus.now_ms + 60_000


def test_nothing_is_told_when_nothing_changes(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC)
    bus.changes(alice)
    assert bus.subscribe(alice, TOPIC).status == SUBSCRIBED
    assert bus.changes(alice) == []
    bus.subscribe(alice, TOPIC, sample_period=10)
    assert [told.sample_period for _, told in bus.changes(alice)] == [10]


def test_who_unsubscribes_is_told_no_more_but_the_others_are(bus: ServiceBus) -> None:
    alice, bob, carol = bus.entity(0x20), bus.entity(0x30), bus.entity(0x40)
    bus.ask(bob, bus.subscription_method(4))
    bus.subscribe(carol, UUri("here", 0, 4, 0x8000))
    bus.subscribe(alice, TOPIC)
    for who in (alice, bob, carol):
        bus.changes(who)
    bus.unsubscribe(alice, TOPIC)
    assert bus.changes(alice) == []
    for who in (bob, carol):
        [(_, told)] = bus.changes(who)
        assert (UUri.from_proto(told.subscriber), told.status) == (alice, UNSUBSCRIBED)


def test_who_registered_is_told_of_the_own_unsubscription_too(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.ask(alice, bus.subscription_method(4))
    bus.subscribe(alice, TOPIC)
    bus.changes(alice)
    bus.unsubscribe(alice, TOPIC)
    assert [told.status for _, told in bus.changes(alice)] == [UNSUBSCRIBED]


def test_who_unregisters_is_told_no_more(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    bus.ask(bob, bus.subscription_method(4))
    bus.ask(bob, bus.subscription_method(5))
    bus.subscribe(alice, TOPIC)
    assert bus.changes(bob) == []


# --- time -----------------------------------------------------------------------------------------


def test_a_subscription_ends_at_its_expiration(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC, expires_ms=bus.now_ms + 1000)
    bus.changes(alice)
    bus.run(0.999)
    assert bus.table.count == 1
    bus.run(0.002)
    assert bus.table.count == 0
    assert [told.status for _, told in bus.changes(alice)] == [UNSUBSCRIBED]
    bus.publish(TOPIC)
    assert bus.payloads(alice) == []


def test_an_expiration_in_the_past_subscribes_nobody_and_unsubscribes(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    assert bus.subscribe(alice, TOPIC, expires_ms=bus.now_ms - 1).status == UNSUBSCRIBED
    assert bus.changes(alice) == []
    bus.subscribe(alice, TOPIC)
    assert bus.subscribe(alice, TOPIC, expires_ms=1).status == UNSUBSCRIBED
    assert bus.table.count == 0


def test_another_expiration_takes_the_place_of_the_first(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC, expires_ms=bus.now_ms + 1000)
    bus.subscribe(alice, TOPIC, expires_ms=bus.now_ms + 5000)
    bus.run(2)
    assert bus.table.count == 1
    bus.subscribe(alice, TOPIC)
    bus.run(10)
    assert bus.table.count == 1


def test_a_sample_period_thins_the_publishes_out(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC, sample_period=1000)
    for number in range(25):
        bus.publish(TOPIC, b"%d" % number)
        bus.run(0.1)
    bus.run(2)
    assert bus.payloads(alice)[0] == b"0"
    assert bus.payloads(alice)[-1] == b"24"
    assert len(bus.payloads(alice)) in (3, 4)


# --- looking --------------------------------------------------------------------------------------


def test_subscriptions_are_fetched_by_topic_and_by_subscriber(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    other = TOPIC.with_resource(0x8002)
    bus.subscribe(alice, TOPIC)
    bus.subscribe(bob, TOPIC)
    bus.subscribe(bob, other)

    def pairs(**filters: UUri) -> set[tuple[UUri, UUri]]:
        return {
            (UUri.from_proto(one.topic), UUri.from_proto(one.subscriber))
            for one in bus.fetch(alice, **filters)
        }

    assert pairs() == {(TOPIC, alice), (TOPIC, bob), (other, bob)}
    assert pairs(topic_filter=TOPIC) == {(TOPIC, alice), (TOPIC, bob)}
    assert pairs(subscriber_filter=bob) == {(TOPIC, bob), (other, bob)}
    assert pairs(topic_filter=UUri.ANY, subscriber_filter=alice) == {(TOPIC, alice)}
    assert pairs(topic_filter=UUri("there", 1, 1, 0x8001)) == set()
    # A local address is one of this authority.
    assert pairs(subscriber_filter=alice.with_authority("")) == {(TOPIC, alice)}
    assert pairs(topic_filter=UUri("", 0x10, 0xFF, 0xFFFF)) == pairs()


def test_more_subscriptions_than_fit_into_a_response_need_a_filter(tmp_path: Path) -> None:
    bus = ServiceBus(tmp_path / "state", more="limits: {message: 2k}")
    alice = bus.entity(0x20)
    for number in range(40):
        bus.subscribe(alice, TOPIC.with_resource(0x8001 + number))
    answer = bus.ask(alice, bus.subscription_method(3))
    assert answer.attributes.commstatus == UCode.RESOURCE_EXHAUSTED
    assert len(bus.fetch(alice, topic_filter=TOPIC)) == 1
    bus.close()


def test_there_are_no_more_subscriptions_than_allowed(tmp_path: Path) -> None:
    more = "services: {subscription: {subscriptions: 2, registrations: 1}}"
    bus = ServiceBus(tmp_path / "state", more=more)
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    bus.subscribe(alice, TOPIC)
    bus.subscribe(bob, TOPIC)
    other = TOPIC.with_resource(0x8002)
    assert bus.subscribe(alice, other) == UCode.RESOURCE_EXHAUSTED
    assert bus.subscribe(alice, TOPIC).status == SUBSCRIBED
    bus.ask(alice, bus.subscription_method(4))
    answer = bus.ask(bob, bus.subscription_method(4))
    assert answer.attributes.commstatus == UCode.RESOURCE_EXHAUSTED
    bus.close()


# --- rights ---------------------------------------------------------------------------------------


def test_only_another_usubscription_may_reset(bus: ServiceBus) -> None:
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    bus.subscribe(alice, TOPIC)
    bus.ask(bob, bus.subscription_method(4))
    bus.changes(alice)
    refused = bus.ask(alice, bus.subscription_method(6))
    assert refused.attributes.commstatus == UCode.PERMISSION_DENIED
    assert bus.table.count == 1
    other = UUri("there", 0, 4, 0)
    bus.ask(other, bus.subscription_method(6), leg="far")
    assert bus.table.count == 0
    assert bus.table.watchers == []
    assert [told.status for _, told in bus.changes(alice)] == [UNSUBSCRIBED]
    assert [told.status for _, told in bus.changes(bob)] == [UNSUBSCRIBED]


def test_nobody_else_can_be_the_service_itself(bus: ServiceBus) -> None:
    alice = bus.entity(0x20)
    bus.subscribe(alice, TOPIC)
    reset = request(UUri("here", 0, 4, 0), bus.subscription_method(6), id=UUID7.new(bus.now_ms))
    bus.dispatcher.ingest("local", [reset.to_bytes()])
    bus.run()
    assert bus.table.count == 1
    assert [letter.code for letter in bus.dispatcher.dead_letters] == [UCode.UNAUTHENTICATED]


def test_a_topic_that_the_rules_do_not_allow_is_denied(tmp_path: Path) -> None:
    more = """
access:
  - {allow: publish}
  - {allow: subscribe, source: "/20/1/FFFF", sink: "//here/10/1/8001"}
"""
    bus = ServiceBus(tmp_path / "state", more=more)
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    assert bus.subscribe(alice, TOPIC).status == SUBSCRIBED
    assert bus.subscribe(bob, TOPIC) == UCode.PERMISSION_DENIED
    assert bus.subscribe(alice, TOPIC.with_resource(0x8002)) == UCode.PERMISSION_DENIED
    bus.publish(TOPIC, b"x")
    assert bus.payloads(alice) == [b"x"]
    assert [told.status for _, told in bus.changes(alice)] == [SUBSCRIBED]
    bus.close()


# --- crashes --------------------------------------------------------------------------------------


def test_subscriptions_and_registrations_outlive_a_restart(tmp_path: Path) -> None:
    bus = ServiceBus(tmp_path / "state")
    alice, bob = bus.entity(0x20), bus.entity(0x30)
    bus.subscribe(alice, TOPIC, sample_period=7)
    bus.subscribe(bob, TOPIC, expires_ms=bus.now_ms + 500)
    bus.ask(bob, bus.subscription_method(4))
    bus = bus.reopen()
    assert {(one.subscriber, one.sample_period_ms) for one in bus.table} == {
        (alice, 7),
        (bob, None),
    }
    assert bus.table.watchers == [(bob, None)]
    bus.run(1)
    assert [one.subscriber for one in bus.table] == [alice]
    assert [told.status for _, told in bus.changes(bob)] == [UNSUBSCRIBED]
    bus.close()


def test_subscriptions_of_the_configuration_are_always_there(tmp_path: Path) -> None:
    more = 'subscriptions: [{topic: "//here/10/1/FFFF", subscriber: "/20/1/0"}]'
    bus = ServiceBus(tmp_path / "state", more=more)
    alice = bus.entity(0x20)
    bus.publish(TOPIC, b"x")
    assert bus.payloads(alice) == [b"x"]
    assert [UUri.from_proto(one.subscriber) for one in bus.fetch(alice)] == [alice]
    bus.ask(UUri("there", 0, 4, 0), bus.subscription_method(6), leg="far")
    assert len(bus.fetch(alice)) == 1
    bus.close()
