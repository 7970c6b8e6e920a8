"""R1 to R12 (docs/specs/uprotocol.md 10.1): does each message arrive, or end as it should?"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.clock import SYSTEM_CLOCK, ManualClock
from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.errors import InvalidOption
from penstock.dispatch import Delivery, Limits, Policy, Retry, Routes, dead_letter_topic
from penstock.dispatch.routes import Receiver
from penstock.protocols.uprotocol import (
    UCode,
    UPayloadFormat,
    UPriority,
    UUri,
)
from support.dispatching import (
    ALICE,
    BOB,
    CAROL,
    METHOD,
    TOPIC,
    World,
    in_order,
    status,
)
from support.until import until

THERE = UUri("there", 0, 0, 0)
DLT = dead_letter_topic("here")
RETRYABLE = [
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN"),
    *("INTERNAL", "CANCELLED"),
]
PERMANENT = [
    *("INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND"),
    *("UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE"),
]


def test_r1_every_message_arrives_after_some_sends_failed(world: World) -> None:
    world.local.next.extend([status("UNAVAILABLE")] * 3)
    sent = [world.notify(b"%d" % i) for i in range(50)]
    world.ingest(*sent)
    world.run(60)
    assert world.local.payloads(BOB) == [message.payload for message in sent]
    assert world.queued == 0
    assert world.letters == []


def test_r1_what_is_not_delivered_at_a_restart_is_delivered_after_it(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(b"%d" % i) for i in range(10)))
    world.run(0.05)
    again = world.reopen()
    again.run(1)
    assert again.local.payloads(BOB) == [b"%d" % i for i in range(10)]
    again.balance()
    again.close()


def test_r2_messages_are_queued_until_the_transport_acknowledges(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(b"%d" % i) for i in range(5)))
    world.run(3)
    assert world.queued == 5
    world.local.always = None
    world.run(10)
    assert world.queued == 0
    assert world.dispatcher.books().copies.acked == 5


@pytest.mark.parametrize("code", RETRYABLE)
def test_r3_what_may_work_later_is_tried_with_growing_pauses(world: World, code: str) -> None:
    world.local.next.extend([status(code)] * 4)
    world.ingest(world.notify())
    calls: list[float] = []
    for _ in range(2000):
        world.run(0.001)
        if len(world.local.calls) > len(calls):
            calls.append(world.clock.monotonic())
    assert len(world.local.calls) == 5
    gaps = [b - a for a, b in itertools.pairwise(calls)]
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.003)
    assert len(world.local.arrived[BOB]) == 1


@pytest.mark.parametrize("code", PERMANENT)
def test_r3_what_will_not_work_later_is_a_dead_letter_at_once(world: World, code: str) -> None:
    world.local.next.append(status(code))
    world.ingest(world.notify(b"bad"), world.notify(b"good"))
    world.run()
    assert [letter.code.name for letter in world.letters] == [code]
    assert world.letters[0].attempts == 1
    assert world.local.payloads(BOB) == [b"good"]


def test_r3_a_message_that_never_expires_is_tried_until_it_is_delivered(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(b"%d" % number) for number in range(3)))
    world.run(3600)
    assert len(world.local.calls) > 300
    assert isinstance(world.clock, ManualClock)
    world.clock.advance(30 * 86_400)
    world.run(60)
    assert world.letters == []
    world.local.always = None
    world.run(20)
    assert world.local.payloads(BOB) == [b"0", b"1", b"2"]
    world.balance()


def test_r3_a_limit_of_attempts_holds_where_it_is_asked_for(tmp_path: Path) -> None:
    world = World(tmp_path, retry=Retry(max_attempts=10))
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify())
    world.run(600)
    assert len(world.local.calls) == 10
    assert [(letter.code, letter.attempts) for letter in world.letters] == [(UCode.UNAVAILABLE, 10)]
    world.close()


def test_r5_an_entity_that_is_away_delays_no_other_of_its_authority(world: World) -> None:
    away = CAROL
    here = UUri("there", 0x31, 1, 0)
    world.far.judge = lambda _, message: (
        status("UNAVAILABLE") if message.attributes.sink == away else None
    )
    for number in range(5):
        world.ingest(
            world.notify(b"away %d" % number, sink=away), world.notify(b"%d" % number, sink=here)
        )
    world.run(1)
    device = UUri("there", 0, 0, 0)
    assert world.far.payloads(device) == [b"0", b"1", b"2", b"3", b"4"]
    world.far.judge = None
    world.run(20)
    assert world.far.payloads(device)[5:] == [b"away %d" % number for number in range(5)]
    world.balance()


def test_r3_a_message_with_a_ttl_is_tried_for_as_long_as_it_lives(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(ttl=200_000))
    world.run(190)
    assert len(world.local.calls) > 20
    assert world.queued == 1
    world.local.always = None
    world.run(10)
    assert world.codes == []
    assert len(world.local.arrived[BOB]) == 1


def test_r4_every_removal_from_a_queue_has_a_reason(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(queue_messages=4))
    rng = random.Random(11)
    codes = [None, None, *(status(code) for code in (*RETRYABLE, *PERMANENT))]
    world.local.judge = lambda _, __: rng.choice(codes)
    world.table.add(TOPIC, BOB)
    for i in range(300):
        ttl = rng.choice([None, 50, 5000])
        priority = UPriority(rng.randint(0, 7))
        kind = world.publish if i % 2 else world.notify
        world.ingest(kind(b"%d" % i, ttl=ttl, priority=priority))
        world.run(rng.random() / 10)
        world.balance()
    world.local.judge = None
    world.run(100)
    books = world.dispatcher.books()
    copies = books.copies
    assert copies.queued == 0
    assert copies.stored == copies.acked + copies.expired + copies.queue_full + copies.permanent
    assert min(copies.acked, copies.expired, copies.queue_full, copies.permanent) > 0
    assert books.counts.copies == 300


@pytest.mark.parametrize("order", ["arrival", "priority"])
def test_r5_the_messages_of_one_source_keep_their_order(
    make_world: Callable[..., World], order: str
) -> None:
    world = make_world(policies=[Policy(order=order)])  # type: ignore[arg-type]
    rng = random.Random(5)
    world.local.judge = lambda _, __: status("UNAVAILABLE") if rng.random() < 0.3 else None
    sources = [UUri("here", n, 1, 0x8001) for n in range(0x51, 0x55)]
    for i in range(200):
        world.ingest(world.notify(b"%d" % i, source=sources[i % 4], ttl=3_600_000))
        world.run(0.01)
    world.run(2000)
    arrived = world.local.arrived[BOB]
    for n, source in enumerate(sources):
        own = in_order(message for message in arrived if message.attributes.source == source)
        assert own == [b"%d" % i for i in range(200) if i % 4 == n]
    if order == "arrival":
        assert in_order(arrived) == [b"%d" % i for i in range(200)]


def test_r5_a_source_in_back_off_holds_up_no_other(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(order="priority")])
    other = UUri("here", 0x11, 1, 0x8001)
    world.local.judge = lambda _, message: (
        status("UNAVAILABLE") if message.attributes.source == TOPIC else None
    )
    world.ingest(world.notify(b"a1"), world.notify(b"a2"), world.notify(b"b1", source=other))
    world.run(0.01)
    assert world.local.payloads(BOB) == [b"b1"]
    world.local.judge = None
    world.run(1)
    assert world.local.payloads(BOB) == [b"b1", b"a1", b"a2"]


def test_r6_the_highest_class_leaves_first(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(order="priority")])
    world.ingest(*(world.notify(b"low %d" % i, priority=UPriority.CS0) for i in range(20)))
    world.ingest(world.notify(b"plain"))
    world.ingest(world.notify(b"high", priority=UPriority.CS6))
    world.run()
    assert world.local.payloads(BOB)[:3] == [b"high", b"plain", b"low 0"]


def test_r6_a_full_queue_evicts_the_lowest_class_first(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(queue_messages=3))
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"0", priority=UPriority.CS0))
    world.ingest(world.notify(b"1"), world.notify(b"1 too"))
    world.ingest(world.notify(b"6", priority=UPriority.CS6))
    assert [
        (letter.code, letter.original.payload) for letter in world.letters if letter.original
    ] == [(UCode.RESOURCE_EXHAUSTED, b"0")]
    world.ingest(world.notify(b"0 again", priority=UPriority.CS0))  # nobody makes room for it
    assert world.codes == [UCode.RESOURCE_EXHAUSTED] * 2
    world.local.always = None
    world.run(1)
    assert world.local.payloads(BOB) == [b"1", b"1 too", b"6"]


def test_r6_the_lowest_class_is_not_starved(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(order="priority")], limits=Limits(batch=10))
    world.ingest(world.notify(b"low", priority=UPriority.CS0))
    world.ingest(*(world.notify(b"%d" % i, priority=UPriority.CS6) for i in range(500)))
    world.run()
    assert world.local.payloads(BOB).index(b"low") <= 65


def test_r7_only_the_failed_tail_of_a_batch_is_sent_again(world: World) -> None:
    world.local.next.extend([None, None, None, status("UNAVAILABLE")])
    world.ingest(*(world.notify(b"%d" % i) for i in range(10)))
    world.run(1)
    assert world.local.calls == [10, 7]
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(10)]


def test_r7_a_batch_has_a_limit_of_messages_and_of_bytes(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(batch=4, batch_bytes=2500))
    world.ingest(*(world.notify(b"%d" % i) for i in range(9)))
    world.ingest(*(world.notify(bytes(1000)) for i in range(5)))
    world.run()
    assert max(world.local.calls) == 4
    assert world.local.calls[-2:] == [2, 2] or world.local.calls[-1] <= 2


def test_r8_who_subscribes_to_dead_letters_gets_whole_messages_with_reasons(world: World) -> None:
    world.table.add(DLT, ALICE)
    world.local.judge = lambda address, _: status("PERMISSION_DENIED") if address == BOB else None
    sent = world.notify(b"lost", traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-00")
    world.ingest(sent)
    world.run()
    (message,) = world.local.arrived[ALICE]
    attributes = message.attributes
    assert (attributes.source, attributes.priority) == (DLT, UPriority.CS2)
    assert attributes.payload_format == UPayloadFormat.PROTOBUF
    assert attributes.traceparent == sent.attributes.traceparent
    assert message.validate() == []
    (letter,) = world.letters
    told = type(letter).from_bytes(message.payload or b"")
    assert told.id == letter.id == attributes.id
    assert told.original == letter.original == sent
    assert (told.code, told.receiver, told.leg) == (UCode.PERMISSION_DENIED, BOB, "local")
    assert told.dispatcher == UUri("here", 4, 1, 0)
    assert told.dead_ms == world.now_ms


def test_r8_the_letter_about_a_letter_is_not_written(world: World) -> None:
    world.table.add(DLT, ALICE)
    world.local.always = status("PERMISSION_DENIED")
    world.ingest(world.notify())
    world.run()
    assert len(world.letters) == 1
    counts = world.dispatcher.books().counts
    assert (counts.letters_published, counts.letters_withheld) == (1, 1)


def test_r8_tokens_are_not_in_dead_letters(world: World) -> None:
    world.far.always = status("PERMISSION_DENIED")
    world.ingest(world.request(token="secret"))
    world.run()
    (letter,) = world.letters
    assert letter.header.token is None
    assert letter.original is not None
    assert b"secret" not in letter.original.to_bytes()
    assert not any(b"secret" in path.read_bytes() for path in (world.state / "dead").glob("*"))


def test_r9_attributes_pass_unchanged_with_those_nobody_knows(world: World) -> None:
    world.table.add(TOPIC, CAROL)
    unknown = b"\xa2\x06\x03new"  # field 100
    plain = world.publish(ttl=5000).to_bytes()
    attributes = plain[2 : 2 + plain[1]] + unknown
    raw = b"\x0a" + bytes([len(attributes)]) + attributes + plain[2 + plain[1] :] + b"\xa2\x06\x01x"
    asked = world.request(
        token="t", permission_level=3, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-00"
    )
    world.ingest(raw, asked)
    world.run()
    first, second = world.far.arrived[THERE]
    assert first.to_bytes() == raw
    assert second.to_bytes() == asked.to_bytes()


def test_r10_payloads_are_not_looked_into(world: World) -> None:
    payloads = [os.urandom(size) for size in (1, 100, 5000)]
    formats = [UPayloadFormat.PROTOBUF, UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, UPayloadFormat.JSON]
    for payload, kind in zip(payloads, formats, strict=True):
        world.ingest(world.notify(payload, payload_format=kind))
    world.run()
    assert world.local.payloads(BOB) == payloads


def test_r11_a_stopped_topic_waits_and_others_pass(world: World) -> None:
    other = UUri("here", 0x10, 1, 0x8002)
    world.dispatcher.stop_topic(TOPIC)
    world.dispatcher.stop_topic(TOPIC)
    world.ingest(world.notify(b"1"), world.notify(b"other", source=other), world.notify(b"2"))
    world.run(100)
    assert world.local.payloads(BOB) == [b"other"]
    assert world.queued == 2
    assert world.dispatcher.start_topic(TOPIC)
    assert not world.dispatcher.start_topic(TOPIC)
    world.run()
    assert world.local.payloads(BOB) == [b"other", b"1", b"2"]


def test_r11_a_stop_outlives_a_restart_and_the_ttl_still_holds(world: World) -> None:
    world.dispatcher.stop_topic(UUri("*", 0xFFFFFFFF, 0xFF, 0xFFFF), BOB)
    world.ingest(world.notify(b"short", ttl=1000), world.notify(b"long"))
    again = world.reopen()
    again.run(2)
    assert again.local.arrived == {}
    assert again.codes == [UCode.DEADLINE_EXCEEDED]
    again.dispatcher.start_topic(UUri.ANY, BOB)
    again.run()
    assert again.local.payloads(BOB) == [b"long"]
    again.balance()
    again.close()


def test_r11_a_method_is_stopped_for_its_requests(world: World) -> None:
    world.dispatcher.stop_topic(METHOD)
    world.ingest(world.request(), world.request(method=METHOD.with_resource(8), source=BOB))
    world.run(1)
    assert [message.attributes.sink for message in world.far.arrived[THERE]] == [
        METHOD.with_resource(8)
    ]
    world.dispatcher.start_topic(METHOD)
    world.run()
    assert len(world.far.arrived[THERE]) == 2


@pytest.mark.parametrize("end", ["expired", "dropped", "evicted"])
def test_r11_calls_behind_one_of_a_stopped_method_pass_once_it_has_gone(
    tmp_path: Path, end: str
) -> None:
    world = World(tmp_path, limits=Limits(queue_messages=1 if end == "evicted" else 10))
    other = METHOD.with_resource(8)
    world.dispatcher.stop_topic(METHOD)
    world.ingest(world.request(ttl=1000))
    world.run()
    if end == "expired":
        world.run(2)
    elif end == "dropped":
        assert world.dispatcher.drop_queued(Receiver("far", THERE)) == 1
    world.ingest(world.request(method=other, priority=UPriority.CS5))
    world.run()
    assert [message.attributes.sink for message in world.far.arrived[THERE]] == [other]
    world.balance()
    world.close()


def test_r11_calls_that_wait_behind_one_of_a_stopped_method_pass_when_it_expires(
    world: World,
) -> None:
    world.dispatcher.stop_topic(METHOD)
    calls = [world.request(ttl=1000), world.request(method=METHOD.with_resource(8))]
    world.ingest(*calls)
    world.run(0.5)
    assert world.far.arrived[THERE] == []  # a caller's calls to one entity keep their order
    world.run(1)
    assert world.far.arrived[THERE] == calls[1:]


def test_r11_calls_that_wait_behind_one_of_a_stopped_method_pass_when_it_is_superseded(
    make_world: Callable[..., World],
) -> None:
    world = make_world(policies=[Policy(topic=METHOD, delivery=Delivery.LATEST)])
    world.dispatcher.stop_topic(METHOD)
    behind = world.request(method=METHOD.with_resource(8))
    world.ingest(world.request(), behind)
    world.run(0.1)
    assert world.far.arrived[THERE] == []
    world.ingest(world.request())
    world.run(0.1)
    assert world.dispatcher.books().copies.superseded == 1
    assert world.far.arrived[THERE] == [behind]


def test_r11_stop_does_not_lose_what_is_in_flight_and_no_delivery_begins_after_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True)
    world.local.gate = threading.Event()
    world.ingest(world.notify(b"in flight"))
    assert world.local.entered.wait(10)
    assert not world.dispatcher.stop_topic(TOPIC, timeout=0.01)  # it goes on, and this says so
    stopping = threading.Thread(target=world.dispatcher.stop_topic, args=(TOPIC,))
    stopping.start()
    until(lambda: bool(world.dispatcher.switches))
    assert stopping.is_alive()  # the delivery is under way
    world.ingest(world.notify(b"later"))
    world.local.gate.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert world.dispatcher.stop_topic(TOPIC)
    calls = len(world.local.calls)
    assert world.local.payloads(BOB) == [b"in flight"]
    world.ingest(world.notify(b"later still"))
    world.dispatcher.stop(0.2)
    assert len(world.local.calls) == calls
    assert world.queued == 2
    world.balance()
    world.close()


def test_r12_latest_only_keeps_the_newest_of_what_waits(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(topic=TOPIC, delivery=Delivery.LATEST)])
    world.local.next.append(status("UNAVAILABLE"))
    world.ingest(world.notify(b"0"))
    world.run(0.01)
    world.ingest(*(world.notify(b"%d" % i) for i in range(1, 10)))
    other = UUri("here", 0x10, 1, 0x8002)
    world.ingest(world.notify(b"a", source=other), world.notify(b"b", source=other))
    world.run(5)
    assert world.local.payloads(BOB) == [b"9", b"a", b"b"]
    assert world.dispatcher.books().copies.superseded == 9
    assert world.letters == []


def test_r12_a_queue_of_a_size_keeps_the_newest_of_what_waits(
    make_world: Callable[..., World],
) -> None:
    world = make_world(policies=[Policy(topic=TOPIC, queue=DeliveryPolicy.parse("queue-size:3"))])
    world.local.next.append(status("UNAVAILABLE"))
    world.ingest(world.notify(b"0"))
    world.run(0.01)
    world.ingest(*(world.notify(b"%d" % i) for i in range(1, 10)))
    other = UUri("here", 0x10, 1, 0x8002)
    world.ingest(*(world.notify(b"%c" % name, source=other) for name in b"abcde"))
    world.run(5)
    assert world.local.payloads(BOB) == [b"7", b"8", b"9", b"a", b"b", b"c", b"d", b"e"]
    assert world.dispatcher.books().copies.superseded == 7
    assert world.letters == []
    assert world.dispatcher.books().problems() == []


def test_r12_a_queue_of_a_latency_lets_older_ones_expire(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(topic=TOPIC, queue=DeliveryPolicy.parse("latency:500ms"))])
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"0"))
    world.run(0.3)
    assert world.letters == []
    world.run(0.5)
    assert world.codes == [UCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(topic=TOPIC, queue=DeliveryPolicy.parse("latency:500us")),
        Policy(topic=TOPIC, queue=DeliveryPolicy.parse("latency:0s")),
        Policy(topic=TOPIC, max_age=0.0005),
    ],
    ids=["latency", "none", "age"],
)
def test_r12_a_limit_below_a_millisecond_is_one(
    make_world: Callable[..., World], policy: Policy
) -> None:
    world = make_world(policies=[policy])
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"0"))
    world.run(1)
    assert world.codes == [UCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize(
    "text", ["throttle", "synchronous", "queue-throttled:5", "queue-size:5:throttle"]
)
def test_r12_a_queue_does_not_make_a_sender_wait(text: str) -> None:
    with pytest.raises(InvalidOption, match="would make a sender wait"):
        Policy(queue=DeliveryPolicy.parse(text))


def test_r12_best_effort_is_tried_once(make_world: Callable[..., World]) -> None:
    world = make_world(policies=[Policy(topic=TOPIC, delivery=Delivery.BEST_EFFORT)])
    world.local.next.append(status("UNAVAILABLE"))
    world.ingest(world.notify(b"0", ttl=10_000), world.notify(b"1"))
    world.run()
    assert world.local.payloads(BOB) == [b"1"]
    assert world.codes == [UCode.UNAVAILABLE]


def test_r12_the_first_policy_that_matches_counts(make_world: Callable[..., World]) -> None:
    policies = [Policy(topic=TOPIC, max_attempts=2), Policy(topic=UUri.ANY, max_attempts=1)]
    world = make_world(policies=policies)
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"0"), world.notify(b"1", source=TOPIC.with_resource(0x8002)))
    world.run(100)
    assert [letter.attempts for letter in world.letters] == [2, 1]


def test_the_routes_name_only_legs_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the legs are far, local"):
        World(tmp_path, routes=Routes(authorities={"lokal": ["here"]}))
