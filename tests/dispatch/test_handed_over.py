"""A transport that acknowledges nothing: what it took over counts as delivered some time later."""

from __future__ import annotations

import pytest

from support.dispatching import BOB, World, status

NUMBERS = [b"%d" % i for i in range(10)]


@pytest.fixture
def unsure(world: World) -> World:
    """A dispatcher whose messages may be lost for a second after they were taken over."""
    world.local.settle_after = 1.0
    world.ingest(*(world.notify(number) for number in NUMBERS))
    return world


def test_what_was_taken_over_is_queued_until_its_time_is_over(unsure: World) -> None:
    unsure.run(0.99)
    assert unsure.local.payloads(BOB) == NUMBERS
    assert (unsure.queued, unsure.dispatcher.books().copies.acked) == (10, 0)
    unsure.run(0.02)
    assert (unsure.queued, unsure.dispatcher.books().copies.acked) == (0, 10)
    assert unsure.local.payloads(BOB) == NUMBERS


def test_what_was_on_its_way_is_delivered_again_after_a_restart(unsure: World) -> None:
    unsure.run(0.5)
    again = unsure.reopen()
    again.run(3)
    assert again.local.payloads(BOB) == NUMBERS
    again.balance()
    again.close()


def test_what_was_on_its_way_when_a_link_was_lost_is_delivered_again_in_order(
    unsure: World,
) -> None:
    unsure.run(0.5)
    unsure.local.lost += 1
    unsure.ingest(unsure.notify(b"later"))
    unsure.run(3)
    assert unsure.local.payloads(BOB) == [*NUMBERS, *NUMBERS, b"later"]
    assert unsure.queued == 0


def test_what_fails_behind_it_waits_without_it(unsure: World) -> None:
    unsure.run(0.1)
    unsure.local.always = status("UNAVAILABLE")
    unsure.ingest(unsure.notify(b"later"))
    unsure.run(2)
    assert (unsure.queued, unsure.dispatcher.books().copies.acked) == (1, 10)
    unsure.local.always = None
    unsure.run(10)
    assert unsure.local.payloads(BOB) == [*NUMBERS, b"later"]
