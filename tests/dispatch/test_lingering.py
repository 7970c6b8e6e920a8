"""Does a delivery wait for more messages, where that is asked for, and not too long? (R7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.errors import InvalidOption
from penstock.dispatch import Limits
from penstock.protocols.uprotocol import UCode
from support.dispatching import BOB, World, status


def test_messages_that_come_within_the_time_go_together(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(linger=0.05))
    for i in range(4):
        world.ingest(world.notify(b"%d" % i))
        world.run(0.01)
    assert world.local.calls == []
    world.run(0.01)
    assert world.local.calls == [4]
    world.ingest(world.notify(b"4"))
    world.run(0.049)
    assert world.local.calls == [4]
    world.run(0.001)
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(5)]


@pytest.mark.parametrize("limits", [Limits(linger=9, batch=3), Limits(linger=9, batch_bytes=120)])
def test_a_full_delivery_waits_for_nothing(
    make_world: Callable[..., World], limits: Limits
) -> None:
    world = make_world(limits=limits)
    world.ingest(world.notify(b"1"))
    world.run()
    assert world.local.calls == []
    world.ingest(world.notify(b"2"), world.notify(b"3"))
    world.run()
    assert world.local.payloads(BOB)[:2] == [b"1", b"2"]


def test_what_expires_meanwhile_is_a_dead_letter_in_time(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(linger=1.0))
    message = world.notify(ttl=100)
    world.ingest(message)
    world.run(0.11)
    assert world.codes == [UCode.DEADLINE_EXCEEDED]
    assert world.letters[0].dead_ms <= world.now_ms
    world.run(2.0)
    assert world.local.calls == []


def test_what_failed_is_tried_again_after_its_pause(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(linger=0.02))
    world.local.next.append(status("UNAVAILABLE"))
    world.ingest(world.notify(b"1"), world.notify(b"2"))
    world.run(0.02)
    assert world.local.calls == [2]
    world.run(1.0)
    assert world.local.payloads(BOB) == [b"1", b"2"]


def test_a_wait_is_bounded() -> None:
    for wrong in (-1, 11, float("nan")):
        with pytest.raises(InvalidOption):
            Limits(linger=wrong)
