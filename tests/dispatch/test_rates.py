"""Is a sender that is too fast refused, and nobody else? (docs/specs/uprotocol.md 10.2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.errors import InvalidOption
from penstock.dispatch import Limits, Rate
from penstock.protocols.uprotocol import UCode, UUri
from support.dispatching import ALICE, BOB, TOPIC, World

OTHER = UUri("here", 0x11, 1, 0x8001)


def test_more_messages_than_a_leg_may_send_are_dead_letters(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(leg=10)}))
    world.ingest(*[world.notify(b"%d" % i) for i in range(25)])
    world.run()
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(10)]
    assert world.codes == [UCode.RESOURCE_EXHAUSTED] * 15
    assert "more than 10 messages a second" in world.letters[0].message
    assert world.dispatcher.books().counts.rate_limited == 15


def test_with_time_more_may_come(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(leg=10)}))
    world.ingest(*[world.notify() for _ in range(10)])
    world.run(0.5)
    world.ingest(*[world.notify() for _ in range(10)])
    world.run(100.0)
    world.ingest(*[world.notify() for _ in range(11)])
    world.run()
    assert len(world.local.arrived[BOB]) == 10 + 5 + 10


def test_one_entity_is_bounded_over_all_of_its_topics_and_the_others_are_not(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(source=3)}))
    of_one = [world.notify(source=TOPIC.with_resource(0x8001 + i)) for i in range(5)]
    world.ingest(*of_one, *[world.notify(source=OTHER) for _ in range(3)])
    world.run()
    assert len(world.local.arrived[BOB]) == 6
    assert [letter.header.source for letter in world.letters] == [
        TOPIC.with_resource(0x8004),
        TOPIC.with_resource(0x8005),
    ]


def test_a_request_too_many_is_answered_once(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(source=1)}))
    world.ingest(world.request(ttl=1000), world.request(ttl=1000))
    world.run()
    assert [m.attributes.commstatus for m in world.responses(ALICE)] == [UCode.RESOURCE_EXHAUSTED]
    assert world.codes == [UCode.RESOURCE_EXHAUSTED]


def test_a_message_that_was_refused_can_be_sent_again(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(leg=1)}))
    first, second = world.notify(b"1"), world.notify(b"2")
    world.ingest(first, second, first)
    world.run(1.0)
    world.ingest(second)
    world.run()
    assert world.local.payloads(BOB) == [b"1", b"2"]
    counts = world.dispatcher.books().counts
    assert (counts.rate_limited, counts.duplicates) == (1, 1)


def test_other_legs_have_no_bound(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(leg_rates={"local": Rate(leg=1), "far": Rate()}))
    there = UUri("there", 0x30, 1, 0x8001)
    world.ingest(*[world.notify(source=there) for _ in range(50)], leg="far")
    world.run()
    assert len(world.local.arrived[BOB]) == 50


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(InvalidOption):
        Rate(leg=rate)
    with pytest.raises(InvalidOption):
        Rate(source=rate)
