"""Is a batch of messages that are alike treated as if they came one by one?"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.dispatch import Routes
from penstock.protocols.uprotocol import UUID7, UMessage
from support.dispatching import BOB, CAROL, TOPIC, World, status

COUNT = 16


def outcome(world: World) -> Any:
    world.run()
    world.balance()
    world.run(1.5)
    counts = world.dispatcher.books().counts
    return (
        [world.local.payloads(BOB), world.far.payloads(CAROL.with_resource(0))],
        [
            (
                letter.code,
                letter.dead_ms,
                letter.header.id,
                letter.original and letter.original.payload,
            )
            for letter in world.letters
        ],
        counts,
    )


def both(batches: list[list[bytes]], legs: list[str], *, is_away: bool) -> None:
    with TemporaryDirectory() as folder:
        at_once, one_by_one = World(Path(folder) / "a"), World(Path(folder) / "b")
        for world in (at_once, one_by_one):
            world.table.add(TOPIC, BOB)
            world.local.always = status("UNAVAILABLE") if is_away else None
        for batch, leg in zip(batches, legs, strict=True):
            at_once.ingest(*batch, leg=leg)
            for raw in batch:
                one_by_one.ingest(raw, leg=leg)
        assert outcome(at_once) == outcome(one_by_one)
        at_once.close()
        one_by_one.close()


def changed(message: UMessage, at: int, to: int) -> bytes:
    raw = bytearray(message.to_bytes())
    raw[at % len(raw)] = to
    return bytes(raw)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_in_it(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        world = World(Path(folder))
        known = [world.publish(bytes(8)) for _ in range(8)]
        batches = []
        for _ in range(data.draw(st.integers(1, 3))):
            ttl = data.draw(st.sampled_from([None, 1, 1000, 0xFFFF_FFFF]))
            age = data.draw(st.sampled_from([0, 500, 2000, -30_000, -10_000_000]))
            others = data.draw(st.sampled_from([ttl, 3000]))  # those between have other attributes
            batch = [
                world.publish(
                    b"%08d" % i,
                    ttl=others if i % 3 else ttl,
                    id=UUID7.new(world.now_ms - age),
                ).to_bytes()
                for i in range(COUNT + 4)
            ]
            for at in data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=3)):
                batch[at] = data.draw(
                    st.sampled_from(known).map(UMessage.to_bytes)
                    | st.builds(
                        changed, st.sampled_from(known), st.integers(0, 80), st.integers(0, 255)
                    )
                    | st.binary(max_size=80)
                )
            batches.append(batch)
        world.close()
    # By the leg of another authority they are refused, and not remembered.
    legs = data.draw(
        st.lists(st.sampled_from(["local", "far"]), min_size=len(batches), max_size=len(batches))
    )
    both(batches, legs, is_away=data.draw(st.booleans()))


def test_duplicates_conflicts_and_others_in_it_are_found(tmp_path: Path) -> None:
    world = World(tmp_path)
    batch = [world.notify(b"%04d" % i) for i in range(3 * COUNT)]
    world.ingest(*batch)
    world.ingest(*batch)
    other = [message.replace(payload=b"else") for message in batch]
    world.ingest(*other)
    within = [world.notify(b"%04d" % i) for i in range(COUNT)] * 2
    world.ingest(*within)
    world.run()
    counts = world.dispatcher.books().counts
    assert counts.routed == 4 * COUNT
    assert counts.duplicates == 3 * COUNT + COUNT
    assert counts.conflicts == 3 * COUNT
    assert len(world.local.arrived[BOB]) == 4 * COUNT
    world.balance()
    world.close()


def test_what_comes_again_by_another_leg_is_a_loop(tmp_path: Path) -> None:
    routes = Routes(authorities={"local": ["here"], "far": ["there", "*"]})
    world = World(tmp_path, routes=routes)
    batch = [world.notify(b"%04d" % i) for i in range(COUNT)]
    for leg in ("far", "local", "far"):  # the one with the number 1 first
        world.ingest(*batch, leg=leg)
    world.run()
    counts = world.dispatcher.books().counts
    assert (counts.routed, counts.loops, counts.duplicates) == (COUNT, COUNT, COUNT)
    world.balance()
    world.close()
