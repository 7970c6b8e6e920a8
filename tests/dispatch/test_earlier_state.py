"""The state that release 0.2 left when it was killed opens, and nothing of it is lost."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from penstock.dispatch import Policy
from penstock.dispatch.dead_letters import QUARANTINE, strays
from penstock.protocols.uprotocol import UCode, UUri
from support.dispatching import ALICE, BOB, TOPIC, World

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "dispatcher-state" / "state.tar.xz"
NEW = UUri("here", 0x40, 1, 0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    made = World(tmp_path / "state", policies=[Policy(topic=TOPIC, order="priority")])
    made.table.add(TOPIC, BOB)
    return made


def test_what_was_queued_is_delivered_and_what_was_delivered_is_not(world: World) -> None:
    assert world.dispatcher.books().copies.acked == 31
    assert world.queued == 94
    world.run()
    assert world.queued == 0
    bob = [payload for payload in world.local.payloads(BOB) if payload]
    # Of three sources, the messages of one were taken as they came, of the others none; and one
    # in between whose class came first.
    kept = [number for number in range(90) if number % 3] + list(range(90, 100))
    assert sorted(bob) == sorted(b"bob %04d" % number for number in kept if number != 90)
    assert world.local.payloads(NEW) == [b"new %04d" % number for number in range(5)]
    far = world.far.payloads(UUri("there", 0, 0, 0))
    assert far == [b"far %04d" % number for number in range(20)]
    world.balance()
    world.close()


def test_messages_of_one_source_keep_their_order(world: World) -> None:
    world.run()
    for ue_id in (0x11, 0x12, 0x13):
        source = UUri("here", ue_id, 1, 0x8001)
        came = [m.payload or b"" for m in world.local.arrived[BOB] if m.attributes.source == source]
        assert came == sorted(came)
    world.close()


def test_its_dead_letters_stops_and_undecodable_bytes_are_there(world: World) -> None:
    (letter,) = world.letters
    assert letter.code == UCode.DEADLINE_EXCEEDED
    assert letter.original is not None
    assert letter.original.payload == b"expired"
    (stop,) = world.dispatcher.switches
    assert (stop.topic, stop.receiver) == (UUri("here", 0x99, 1, 0x8001), ALICE)
    assert [stray.data for stray in strays(world.state / QUARANTINE)] == [b"\xffnot a message"]
    world.dispatcher.retry_dead_letter(letter.number)
    world.close()


def test_it_goes_on_from_there_and_can_be_opened_again(world: World) -> None:
    world.run()
    world.ingest(world.notify(b"later"))
    again = world.reopen()
    assert again.queued == 1
    again.run()
    assert again.local.payloads(BOB) == [b"later"]
    again.balance()
    again.close()
