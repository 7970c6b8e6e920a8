"""Topics of others: one uSubscription subscribes at another (docs/specs/uprotocol.md 6.1)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import StorageError
from penstock.dispatch.services.subscriptions import Record, Subscription, SubscriptionTable
from penstock.protocols.uprotocol import (
    UUID7,
    SubscriptionStatus,
    UCode,
    UMessageType,
    UPayloadFormat,
    UUri,
    error_response,
    notification,
    proto,
    response,
)
from support.dispatching import START_NS, status
from support.service_bus import ServiceBus, connect, run_all

SUBSCRIBED = SubscriptionStatus.SUBSCRIBED
PENDING = SubscriptionStatus.SUBSCRIBE_PENDING
UNSUBSCRIBED = SubscriptionStatus.UNSUBSCRIBED
TOPIC = UUri("there", 0x10, 1, 0x8001)
ITSELF = UUri("here", 0, 4, 0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ServiceBus, ServiceBus]]:
    """Two dispatchers that reach each other."""
    clock = ManualClock(START_NS)
    here = ServiceBus(tmp_path / "here", clock=clock)
    there = ServiceBus(tmp_path / "there", clock=clock, name="there", others="here")
    connect(here, there)
    yield here, there
    run_all([here, there])
    here.close()
    there.close()


def test_the_first_subscriber_to_a_topic_elsewhere_has_it_subscribed_there(
    two: tuple[ServiceBus, ServiceBus],
) -> None:
    here, there = two
    alice = here.entity(0x20)
    assert here.subscribe(alice, TOPIC).status == PENDING
    run_all([here, there])
    assert [(one.topic, one.subscriber) for one in there.table] == [(TOPIC, ITSELF)]
    told = [change.status for _, change in here.changes(alice)]
    assert told == [PENDING, SUBSCRIBED]
    there.publish(TOPIC, b"from there")
    run_all([here, there])
    assert here.payloads(alice) == [b"from there"]


def test_the_second_subscriber_is_subscribed_at_once_and_only_the_last_ends_it(
    two: tuple[ServiceBus, ServiceBus],
) -> None:
    here, there = two
    alice, bob = here.entity(0x20), here.entity(0x30)
    here.subscribe(alice, TOPIC)
    run_all([here, there])
    assert here.subscribe(bob, TOPIC).status == SUBSCRIBED
    here.unsubscribe(alice, TOPIC)
    run_all([here, there])
    assert there.table.count == 1
    assert here.unsubscribe(bob, TOPIC) == proto.UnsubscribeResponse()
    assert here.table.count == 0
    run_all([here, there])
    assert there.table.count == 0
    assert here.table.notes == {}


def test_the_sample_period_there_is_the_shortest_of_those_here(
    two: tuple[ServiceBus, ServiceBus],
) -> None:
    here, there = two
    alice, bob = here.entity(0x20), here.entity(0x30)

    def period() -> int | None:
        run_all([here, there])
        [one] = there.table
        return one.sample_period_ms

    here.subscribe(alice, TOPIC, sample_period=3000)
    assert period() == 3000
    here.subscribe(bob, TOPIC, sample_period=500)
    assert period() == 500
    here.subscribe(bob, TOPIC)
    assert period() is None
    here.unsubscribe(bob, TOPIC)
    assert period() == 3000


def test_a_call_that_fails_is_made_again_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    here.far.always = status("PERMISSION_DENIED")
    assert here.subscribe(alice, TOPIC).status == PENDING
    here.run(300)
    tried = len(here.far.calls)
    assert 5 <= tried <= 12  # 1, 2, 4 … 60 seconds apart
    assert [one.status for one in here.table] == [PENDING]
    here.run(300)
    assert len(here.far.calls) > tried
    here.unsubscribe(alice, TOPIC)
    here.far.always = None
    here.run(300)
    last = here.far.arrived[UUri("there", 0, 0, 0)][-1]
    assert last.attributes.sink == UUri("there", 0, 4, 2)
    here.close()


def test_a_call_without_an_answer_is_made_again_after_five_minutes(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    here.subscribe(here.entity(0x20), TOPIC)
    there = UUri("there", 0, 0, 0)
    assert len(here.far.arrived[there]) == 1
    asked = here.far.arrived[there][0].attributes
    assert (asked.ttl, asked.source) == (300_000, ITSELF)
    here.run(299)
    assert len(here.far.arrived[there]) == 1
    here.run(10)
    assert len(here.far.arrived[there]) == 2
    here.close()


def test_what_is_pending_is_taken_up_after_a_restart(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    here.far.always = status("UNAVAILABLE")
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    here = here.reopen()
    clock = here.clock
    there = ServiceBus(tmp_path / "there", clock=clock, name="there", others="here")
    connect(here, there)
    run_all([here, there], 20)
    assert there.table.count == 1
    assert [one.status for one in here.table] == [SUBSCRIBED]
    here = here.reopen()
    connect(here, there)
    here.unsubscribe(alice, TOPIC)
    run_all([here, there], 5)
    assert there.table.count == 0
    here.close()
    there.close()


def test_who_waits_for_the_answer_gets_publishes_already(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    assert here.subscribe(alice, TOPIC).status == PENDING
    assert TOPIC in here.far.listens
    here.publish(TOPIC, b"early", leg="far")
    assert here.payloads(alice) == [b"early"]
    here.unsubscribe(alice, TOPIC)
    assert TOPIC not in here.far.listens
    here.close()


def test_after_a_reset_there_it_is_subscribed_anew(two: tuple[ServiceBus, ServiceBus]) -> None:
    here, there = two
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    run_all([here, there])
    here.changes(alice)
    there.ask(UUri("here", 0, 4, 0), UUri("there", 0, 4, 6), leg="far")
    run_all([here, there], 5)
    assert there.table.count == 1
    assert [change.status for _, change in here.changes(alice)] == [PENDING, SUBSCRIBED]


def test_a_usubscription_speaks_for_its_own_topics_only(
    two: tuple[ServiceBus, ServiceBus],
) -> None:
    here, _ = two
    alice = here.entity(0x20)
    own = UUri("here", 0x10, 1, 0x8001)
    here.subscribe(alice, own)
    change = proto.Subscription(topic=own.to_proto(), subscriber=ITSELF.to_proto(), status=1)
    notify = UUri("there", 0, 4, 0x8000)
    message = notification(
        notify,
        ITSELF,
        change.SerializeToString(),
        payload_format=UPayloadFormat.PROTOBUF,
        id=UUID7.new(here.now_ms),
    )
    here.dispatcher.ingest("far", [message.to_bytes()])
    here.run()
    assert [one.status for one in here.table] == [SUBSCRIBED]


def test_topics_of_an_authority_that_has_no_usubscription_count_as_own(tmp_path: Path) -> None:
    more = "services: {subscription: {serves: [there]}}"
    here = ServiceBus(tmp_path / "state", more=more)
    alice = here.entity(0x20)
    assert here.subscribe(alice, TOPIC).status == SUBSCRIBED
    assert here.far.calls == []
    here.publish(TOPIC, b"x", leg="far")
    assert here.payloads(alice) == [b"x"]
    here.close()


def test_an_answer_that_says_unsubscribed_ends_the_subscriptions(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    [asked] = here.far.arrived[UUri("there", 0, 0, 0)]
    assert asked.attributes.type == UMessageType.REQUEST
    said = proto.SubscribeResponse(topic=TOPIC.to_proto(), status=int(UNSUBSCRIBED))
    answer = response(
        asked,
        said.SerializeToString(),
        payload_format=UPayloadFormat.PROTOBUF,
        id=UUID7.new(here.now_ms),
    )
    here.dispatcher.ingest("far", [answer.to_bytes()])
    here.run()
    assert here.table.count == 0
    assert [change.status for _, change in here.changes(alice)] == [PENDING, UNSUBSCRIBED]
    here.close()


def test_the_code_of_an_error_is_not_an_answer(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    here.subscribe(here.entity(0x20), TOPIC)
    there = UUri("there", 0, 0, 0)
    [asked] = here.far.arrived[there]
    answer = error_response(asked, UCode.INTERNAL, "not now", id=UUID7.new(here.now_ms))
    here.dispatcher.ingest("far", [answer.to_bytes()])
    here.run(2)
    assert len(here.far.arrived[there]) == 2
    here.close()


def _answer_with(here: ServiceBus, said: SubscriptionStatus) -> None:
    """Answer the last call of the uSubscription here."""
    asked = here.far.arrived[UUri("there", 0, 0, 0)][-1]
    answer = response(
        asked,
        proto.SubscribeResponse(topic=TOPIC.to_proto(), status=int(said)).SerializeToString(),
        payload_format=UPayloadFormat.PROTOBUF,
        id=UUID7.new(here.now_ms),
    )
    here.dispatcher.ingest("far", [answer.to_bytes()])
    here.run()


def _notify_of(here: ServiceBus, said: SubscriptionStatus) -> None:
    """Notify the uSubscription here of a change there."""
    change = proto.Subscription(
        topic=TOPIC.to_proto(), subscriber=ITSELF.to_proto(), status=int(said)
    )
    message = notification(
        UUri("there", 0, 4, 0x8000),
        ITSELF,
        change.SerializeToString(),
        payload_format=UPayloadFormat.PROTOBUF,
        id=UUID7.new(here.now_ms),
    )
    here.dispatcher.ingest("far", [message.to_bytes()])
    here.run()


def test_what_is_pending_elsewhere_is_pending_here_until_a_notification(tmp_path: Path) -> None:
    here = ServiceBus(tmp_path / "state")
    alice, bob, carol = (here.entity(number) for number in (0x20, 0x30, 0x40))
    here.subscribe(alice, TOPIC)
    _answer_with(here, PENDING)
    assert here.subscribe(bob, TOPIC).status == PENDING
    here.run(1000)
    assert len(here.far.arrived[UUri("there", 0, 0, 0)]) == 1  # no call again: it was answered
    _notify_of(here, SUBSCRIBED)
    assert here.subscribe(carol, TOPIC).status == SUBSCRIBED
    for entity in alice, bob:
        assert [change.status for _, change in here.changes(entity)] == [PENDING, SUBSCRIBED]
    here = here.reopen()
    here.run(1000)
    assert [one.status for one in here.table] == [SUBSCRIBED] * 3
    assert here.far.calls == []
    here.close()


@pytest.mark.parametrize(
    ("notified", "status_here"),
    [([SUBSCRIBED], SUBSCRIBED), ([SUBSCRIBED, UNSUBSCRIBED], PENDING)],
)
def test_a_notification_that_overtakes_the_answer_pending_counts(
    tmp_path: Path, notified: list[SubscriptionStatus], status_here: SubscriptionStatus
) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    for said in notified:
        _notify_of(here, said)
    _answer_with(here, PENDING)
    assert [one.status for one in here.table] == [status_here]
    here.close()


def test_what_is_pending_elsewhere_is_pending_and_asked_for_again_after_a_restart(
    tmp_path: Path,
) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    _answer_with(here, PENDING)
    here = here.reopen()
    here.run(5)
    assert [one.status for one in here.table] == [PENDING]
    assert here.changes(alice) == []
    _answer_with(here, SUBSCRIBED)
    assert [change.status for _, change in here.changes(alice)] == [SUBSCRIBED]
    here.close()


def test_what_was_pending_elsewhere_and_is_forgotten_there_is_asked_for_again(
    tmp_path: Path,
) -> None:
    here = ServiceBus(tmp_path / "state")
    here.subscribe(here.entity(0x20), TOPIC)
    _answer_with(here, PENDING)
    _notify_of(here, UNSUBSCRIBED)
    here.run(5)
    assert len(here.far.arrived[UUri("there", 0, 0, 0)]) == 2
    here.close()


def fail_once(table: SubscriptionTable, number: int, patch: pytest.MonkeyPatch) -> None:
    """Let one of the next appends to a table's file find a full disk."""
    append, numbers = table._journal.append, itertools.count(1)

    def append_or_fail(records: Iterable[Record]) -> None:
        if next(numbers) == number:
            raise StorageError("writing", "subscriptions", OSError(28, os.strerror(28)))
        append(records)

    patch.setattr(table._journal, "append", append_or_fail)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_both_sides_agree_when_the_disk_was_full_while_a_subscription_began(
    two: tuple[ServiceBus, ServiceBus], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here, there = two
    alice = here.entity(0x20)
    fail_once(here.table, number, monkeypatch)
    here.post(alice, 1, proto.SubscribeRequest(topic=TOPIC.to_proto()))
    run_all([here, there], 400)
    assert [one.status for one in here.table] == [SUBSCRIBED]
    assert there.table.count == 1
    assert [change.status for _, change in here.changes(alice)] == [PENDING, SUBSCRIBED]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_both_sides_agree_when_the_disk_was_full_while_a_subscription_ended(
    two: tuple[ServiceBus, ServiceBus], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here, there = two
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    here.ask(alice, here.subscription_method(4))  # else nobody tells who unsubscribed
    run_all([here, there])
    fail_once(here.table, number, monkeypatch)
    here.changes(alice)
    here.post(alice, 2, proto.UnsubscribeRequest(topic=TOPIC.to_proto()))
    run_all([here, there], 400)
    assert (here.table.count, here.table.notes, there.table.count) == (0, {}, 0)
    assert [change.status for _, change in here.changes(alice)] == [UNSUBSCRIBED]


@pytest.mark.parametrize("number", [1, 2])
def test_a_reset_reaches_the_other_side_although_the_disk_was_full(
    two: tuple[ServiceBus, ServiceBus], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here, there = two
    here.subscribe(here.entity(0x20), TOPIC)
    run_all([here, there])
    fail_once(here.table, number, monkeypatch)
    here.post(UUri("there", 0, 4, 0), 6, proto.ResetRequest(), leg="far")
    run_all([here, there], 400)
    assert (here.table.count, here.table.notes, there.table.count) == (0, {}, 0)


@pytest.mark.parametrize("number", [1, 2])
def test_subscribers_are_told_that_the_other_side_refuses_although_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here = ServiceBus(tmp_path / "state")
    alice = here.entity(0x20)
    here.subscribe(alice, TOPIC)
    [asked] = here.far.arrived[UUri("there", 0, 0, 0)]
    refused = proto.SubscribeResponse(topic=TOPIC.to_proto(), status=int(UNSUBSCRIBED))
    answer = response(
        asked, refused.SerializeToString(), payload_format=UPayloadFormat.PROTOBUF
    ).with_attributes(id=UUID7.new(here.now_ms))
    fail_once(here.table, number, monkeypatch)
    here.dispatcher.ingest("far", [answer.to_bytes()])
    here.run(100)
    assert (here.table.count, here.table.notes) == (0, {})
    assert [change.status for _, change in here.changes(alice)] == [PENDING, UNSUBSCRIBED]
    here.close()


WANTED = {"is_wanted": True, "period_ms": None, "is_granted": False}
GRANTED = {**WANTED, "is_granted": True}


@pytest.mark.parametrize(
    ("subscribed", "note", "status_there"),
    [(None, GRANTED, None), (PENDING, GRANTED, SUBSCRIBED), (PENDING, None, SUBSCRIBED)],
    ids=["ended", "granted", "begun"],
)
def test_a_change_of_which_a_crash_left_a_part_is_completed_at_the_next_start(
    tmp_path: Path,
    subscribed: SubscriptionStatus | None,
    note: Record | None,
    status_there: SubscriptionStatus | None,
) -> None:
    table = SubscriptionTable(tmp_path / "here" / "subscriptions")
    if subscribed is not None:
        table.put(Subscription(TOPIC, UUri("here", 0x20, 1, 0), subscribed))
    table.note(TOPIC, note)
    table.close()
    clock = ManualClock(START_NS)
    here = ServiceBus(tmp_path / "here", clock=clock)
    there = ServiceBus(tmp_path / "there", clock=clock, name="there", others="here")
    there.table.put(Subscription(TOPIC, ITSELF))
    connect(here, there)
    run_all([here, there], 1)
    statuses, notes = [one.status for one in here.table], here.table.notes
    here.close()
    there.close()
    assert statuses == ([] if status_there is None else [status_there])
    assert there.table.count == len(statuses)
    assert notes == ({} if status_there is None else {TOPIC: GRANTED})
