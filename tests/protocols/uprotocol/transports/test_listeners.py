from __future__ import annotations

import threading
from functools import partial
from itertools import chain
from typing import Any

import pytest

from penstock.core.clock import ManualClock
from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatusError,
    UUri,
    notification,
    publish,
    request,
    response,
)
from penstock.protocols.uprotocol.transports.listeners import (
    Acknowledging,
    ListenerLimits,
    ListenerRegistry,
)
from protocols.uprotocol.vectors import cases
from support.until import until
from support.waiting import SOON, background, waits

TOPIC = UUri("vehicle1", 0x10AB, 1, 0x8001)
ENTITY = UUri("vehicle1", 0x20AB, 1, 0)
METHOD = UUri("vehicle1", 0x20AB, 1, 7)


def registry(clock: ManualClock | None = None, **limits: Any) -> ListenerRegistry:
    return ListenerRegistry("vehicle1", ListenerLimits(**limits), clock or ManualClock())


def listen(
    where: ListenerRegistry, listener: Any, source: UUri = TOPIC, sink: UUri | None = None
) -> bool:
    return where.add(where.pattern(source, sink), listener)


def unlisten(
    where: ListenerRegistry, listener: Any, source: UUri = TOPIC, sink: UUri | None = None
) -> bool:
    was_last, await_calls = where.remove(where.pattern(source, sink), listener)
    await_calls()
    return was_last


def balances(where: ListenerRegistry) -> bool:
    books = where.statistics()
    ways = (
        "delivered",
        "received",
        "waiting",
        "expired",
        "invalid",
        "unheard",
        "overflowed",
        "displaced",
        "cleared",
        "repeated",
    )
    return books["arrived"] == sum(books[way] for way in ways)


@pytest.mark.parametrize("case", cases("listener_filters"))
def test_filters_are_those_of_the_table_and_of_up_rust_when_loose(case: dict[str, Any]) -> None:
    source = UUri("vehicle1", 0x10AB, 1, case["source_resource"])
    resource = case["sink_resource"]
    sink = None if resource is None else UUri("vehicle1", 0x20AB, 1, resource)
    for loose, is_good in (
        (False, case["register_ok_spec_table"]),
        (True, case["register_ok_up_rust"]),
    ):
        there = registry(loose=loose)
        if is_good:
            assert listen(there, print, source, sink)
            assert unlisten(there, print, source, sink)
        else:
            for call in (listen, unlisten):
                with pytest.raises(UStatusError) as error:
                    call(there, print, source, sink)
                assert error.value.code == UCode.INVALID_ARGUMENT


def test_a_listener_without_sink_gets_publishes_and_one_with_a_sink_the_others() -> None:
    there = registry()
    publishes: list[UMessage] = []
    others: list[UMessage] = []
    listen(there, publishes.append, UUri.ANY)
    listen(there, others.append, UUri.ANY, UUri.ANY)
    sent = [
        publish(TOPIC),
        notification(TOPIC, ENTITY),
        request(ENTITY, METHOD),
        publish(TOPIC, sink=UUri.ANY.with_authority("cloud")),
    ]
    for message in sent:
        there.dispatch(message)
    assert publishes == [sent[0]]
    assert others == sent[1:]
    assert balances(there)


def test_an_authority_that_is_left_out_is_the_own_one() -> None:
    there = registry()
    heard: list[UMessage] = []
    listen(there, heard.append, TOPIC.with_authority(""))
    listen(there, heard.append, TOPIC.with_authority(""), ENTITY)
    sent = [publish(TOPIC), publish(TOPIC.with_authority(""))]
    sent += [notification(TOPIC, ENTITY.with_authority(""))]
    for message in sent:
        there.dispatch(message)
    there.dispatch(publish(TOPIC.with_authority("another")))
    assert heard == sent


def test_registering_again_changes_nothing() -> None:
    there = registry()
    heard: list[UMessage] = []

    class Listener:
        def on_receive(self, message: UMessage) -> None:
            heard.append(message)

    listener = Listener()
    for same in (listener, listener.on_receive):
        assert listen(there, same) is (same is listener)
        assert listen(there, same) is False
    there.dispatch(publish(TOPIC))
    assert len(heard) == 2
    assert there.statistics()["listeners"] == 2
    assert unlisten(there, listener) is False
    assert unlisten(there, listener.on_receive) is True
    there.dispatch(publish(TOPIC))
    assert len(heard) == 2


def test_what_is_no_listener_is_refused() -> None:
    with pytest.raises(UStatusError, match="INVALID_ARGUMENT"):
        listen(registry(), 5)


def test_listeners_are_limited_in_all_and_per_pattern() -> None:
    there = registry(listeners=3, per_pattern=2)
    heard: list[UMessage] = []
    functions = [partial(heard.append) for _ in range(3)]
    listen(there, functions[0])
    listen(there, functions[1])
    listen(there, functions[1])
    with pytest.raises(UStatusError, match="with these filters") as error:
        listen(there, functions[2])
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    listen(there, functions[2], UUri.ANY)
    with pytest.raises(UStatusError, match="3 listeners already") as error:
        listen(there, functions[0], TOPIC.with_resource(0x8002))
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    unlisten(there, functions[0])
    assert listen(there, functions[0], TOPIC.with_resource(0x8002))


def test_a_listener_that_raises_stops_nobody() -> None:
    there = registry()
    heard: list[UMessage] = []

    def fails(message: UMessage) -> None:
        raise ValueError(str(message.payload))

    listen(there, fails)
    listen(there, heard.append)
    listen(there, heard.append, UUri.ANY)
    outcome = there.dispatch(publish(TOPIC))
    assert len(heard) == 2
    assert outcome.called == 3
    assert outcome.status is not None
    assert outcome.status.code == UCode.INTERNAL
    books = there.statistics()
    assert (books["listener_calls"], books["listener_failures"]) == (3, 1)
    assert balances(there)


def test_after_unregistering_no_call_begins_and_none_is_under_way() -> None:
    there = registry()
    entered, go_on, heard = threading.Event(), threading.Event(), []

    def slow(message: UMessage) -> None:
        entered.set()
        assert go_on.wait(SOON)
        heard.append(message)

    listen(there, slow)
    with background(there.dispatch, publish(TOPIC)) as call:
        assert entered.wait(SOON)
        with background(unlisten, there, slow) as removal:
            assert waits(removal)
            there.dispatch(publish(TOPIC))
            go_on.set()
            assert removal.result(SOON) is True
        assert len(heard) == 1
        call.result(SOON)
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        unlisten(there, slow)


def test_a_listener_may_unregister_itself() -> None:
    there = registry()
    heard: list[UMessage] = []

    def once(message: UMessage) -> None:
        heard.append(message)
        unlisten(there, once)

    listen(there, once)
    there.dispatch(publish(TOPIC))
    there.dispatch(publish(TOPIC))
    assert len(heard) == 1


def test_invalid_messages_reach_nobody_and_wait_for_nobody() -> None:
    where = registry()
    heard: list[UMessage] = []
    listen(where, heard.append)
    listen(where, heard.append, UUri.ANY, UUri.ANY)
    asked = request(ENTITY, METHOD)
    good = [publish(TOPIC), notification(TOPIC, ENTITY), asked, response(asked)]
    for message in good:
        assert where.dispatch(message).status is None
    v4 = UUID7.unchecked(good[0].attributes.id.msb ^ 0x3000, 1 << 63)  # type: ignore[union-attr]
    bad = [
        good[0].with_attributes(id=None),
        good[0].with_attributes(id=v4),
        good[0].with_attributes(payload_format=UPayloadFormat.TEXT),
        good[0].with_attributes(traceparent="x"),
        good[1].with_attributes(type=UMessageType.UNSPECIFIED),
        good[1].with_attributes(source=METHOD),
        asked.with_attributes(ttl=0),
        asked.with_attributes(priority=UPriority.CS3),
        good[3].with_attributes(reqid=None),
    ]
    for message in bad:
        outcome = where.dispatch(message)
        assert outcome.status is not None
        assert (outcome.is_kept, outcome.status.code) == (False, UCode.INVALID_ARGUMENT)
    assert heard == good
    assert where.statistics()["invalid"] == len(bad)
    assert balances(where)


def test_a_response_without_a_ttl_is_heard_as_some_sdks_send_them() -> None:
    where = registry()
    heard: list[UMessage] = []
    listen(where, heard.append, METHOD, ENTITY)
    answer = response(request(ENTITY, METHOD)).with_attributes(ttl=None)
    assert where.dispatch(answer).status is None
    assert heard == [answer]


def test_expired_messages_reach_nobody() -> None:
    now = UUID7.new().time_ms
    clock = ManualClock((now + 1000) * 1_000_000)
    there = registry(clock)
    heard: list[UMessage] = []
    listen(there, heard.append)
    late = publish(TOPIC, ttl=999, id=UUID7.new(now))
    just = publish(TOPIC, ttl=1000, id=UUID7.new(now))
    outcome = there.dispatch(late)
    assert outcome.status is not None
    assert outcome.status.code == UCode.DEADLINE_EXCEEDED
    there.dispatch(just)
    assert heard == [just]
    assert there.statistics()["expired"] == 1
    assert balances(there)


def test_what_no_listener_takes_is_received_oldest_first_unless_expired() -> None:
    now = UUID7.new().time_ms
    clock = ManualClock(now * 1_000_000)
    there = registry(clock)
    other = TOPIC.with_resource(0x8002)
    first = publish(TOPIC, b"1", ttl=50, id=UUID7.new(now))
    sent = [first, publish(other, b"2"), publish(TOPIC, b"3"), publish(TOPIC, b"4")]
    for message in sent:
        assert there.dispatch(message).is_kept
    clock.advance(0.051)
    assert there.take((TOPIC, None)) == sent[2]
    assert there.take((UUri.ANY, None)) == sent[1]
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        there.take((other, None))
    assert there.take((TOPIC, None)) == sent[3]
    assert there.statistics()["expired"] == 1
    assert balances(there)


def test_what_waits_is_limited_and_the_rest_is_counted() -> None:
    there = registry(waiting=2)
    outcomes = [there.dispatch(publish(TOPIC)) for _ in range(3)]
    assert [outcome.is_kept for outcome in outcomes] == [True, True, False]
    assert outcomes[2].status is not None
    assert there.statistics()["overflowed"] == 1
    there.clear()
    assert balances(there)


def test_a_crowd_displaces_no_message_of_a_listener_that_is_behind() -> None:
    acknowledged: list[object] = []
    there = ListenerRegistry(
        "vehicle1",
        ListenerLimits(waiting=32),
        acknowledging=Acknowledging(acknowledged.append, lambda _: False, most=16),
    )
    mine = [notification(TOPIC, ENTITY, b"%d" % number) for number in range(100)]
    others = [notification(TOPIC, ENTITY.replace(ue_id=9)) for _ in mine]
    there.dispatch(mine[0], token=mine[0])
    heard: list[UMessage] = []
    may_go_on = threading.Event()

    def hear(message: UMessage) -> None:
        may_go_on.wait(SOON)
        heard.append(message)

    listen(there, hear, TOPIC, ENTITY)

    def arrive() -> None:
        for message in chain(*zip(mine[1:], others, strict=False)):
            if not there.dispatch(message, token=message).is_kept:
                acknowledged.append(message)  # noqa: PERF401 - read meanwhile

    with background(arrive) as arriving:
        until(lambda: there.statistics()["waiting"] == 32)
        assert waits(arriving)  # for room
        assert 0 < len(acknowledged) < len(others)
        assert acknowledged == others[: len(acknowledged)]
        may_go_on.set()
    until(lambda: len(heard) == len(mine) and balances(there))
    assert heard == mine
    assert [it for it in acknowledged if it in mine] == mine
    assert there.statistics()["displaced"] == len(others) - 1 - there.statistics()["waiting"]


def test_a_crowd_displaces_nothing_that_came_for_a_subscription_of_an_earlier_process() -> None:
    acknowledged: list[object] = []
    there = ListenerRegistry(
        "vehicle1",
        ListenerLimits(waiting=8),
        acknowledging=Acknowledging(acknowledged.append, lambda _: False, most=4),
    )
    is_known = False
    for number in range(8):
        there.dispatch(publish(TOPIC), token=number, came_for=lambda: ((), is_known))
    assert acknowledged == []
    is_known = True  # none of its patterns has a listener
    there.dispatch(publish(TOPIC), token=8, came_for=lambda: ((), is_known))
    assert acknowledged == [0]
    assert there.statistics()["displaced"] == 1
    assert balances(there)


def test_without_room_to_wait_there_is_no_receive() -> None:
    there = registry(waiting=0)
    outcome = there.dispatch(publish(TOPIC))
    assert outcome.status is not None
    assert outcome.status.code == UCode.UNAVAILABLE
    with pytest.raises(UStatusError, match="UNIMPLEMENTED"):
        there.take((TOPIC, None))
    assert balances(there)


def test_a_message_that_comes_once_for_each_pattern_is_heard_once_by_each_listener() -> None:
    there = registry()
    patterns = [there.pattern(source, None) for source in (TOPIC, UUri.ANY)]
    heard: list[list[UMessage]] = [[], []]
    for pattern, mine in zip(patterns, heard, strict=True):
        there.add(pattern, mine.append)
    message = publish(TOPIC)
    for pattern in (*patterns, there.pattern(TOPIC.with_authority("*"), None)):
        there.dispatch(message, [pattern])
    assert heard == [[message], [message]]
    assert balances(there)


def test_a_message_that_comes_once_for_each_pattern_waits_once() -> None:
    there = registry()
    message = publish(TOPIC)
    for source in (TOPIC, UUri.ANY):
        there.dispatch(message, [there.pattern(source, None)])
    assert there.statistics()["waiting"] == 1
    assert balances(there)
