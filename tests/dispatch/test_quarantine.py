"""Is what could not be decoded kept, to look at, and bounded? (docs/specs/uprotocol.md 10.3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import penstock
from penstock.dispatch import Limits
from penstock.dispatch.dead_letters import QUARANTINE, Quarantine, Stray, strays
from support.dispatching import BOB, World


def kept(state: Path) -> list[Stray]:
    return list(strays(state / QUARANTINE))


def test_bytes_that_are_no_message_are_counted_and_kept(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.ingest(b"\xff\xfe", world.notify(b"1"), b"\x0a\xff")
    world.ingest(b"more", leg="far")
    world.run()
    assert [(one.leg, one.size, one.data) for one in kept(world.state)] == [
        ("local", 2, b"\xff\xfe"),
        ("local", 2, b"\x0a\xff"),
        ("far", 4, b"more"),
    ]
    assert all(one.came_ms == world.now_ms for one in kept(world.state))
    counts = world.dispatcher.books().counts
    assert (counts.undecodable, counts.quarantined) == (3, 3)
    assert world.local.payloads(BOB) == [b"1"]


def test_they_outlive_a_restart_and_take_a_bounded_part_of_the_disk(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(quarantine=1 << 20))
    rng = random.Random(1)
    for _ in range(100):
        world.ingest(*[b"\xff" + rng.randbytes(rng.randrange(200_000)) for _ in range(3)])
    world = world.reopen()
    world.ingest(b"\xff last")
    found = kept(world.state)
    assert found[-1].data == b"\xff last"
    assert max(len(one.data) for one in found) <= 65_536 < max(one.size for one in found)
    disk = sum(p.stat().st_blocks * 512 for p in (world.state / QUARANTINE).rglob("*"))
    assert disk < 2 << 20
    world.close()


def test_a_disk_that_refuses_stops_no_message(make_world: Callable[..., World]) -> None:
    world = make_world()
    (world.state / QUARANTINE).write_bytes(b"in the way")
    world.ingest(b"\xff", world.notify(b"1"))
    world.run()
    assert world.local.payloads(BOB) == [b"1"]
    counts = world.dispatcher.books().counts
    assert (counts.undecodable, counts.quarantined) == (1, 0)


def test_nothing_is_kept_when_that_is_said(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(quarantine=0))
    world.ingest(b"\xff")
    assert not (world.state / QUARANTINE).exists()
    assert kept(world.state) == []


def test_records_of_somebody_else_do_no_harm(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q", 1 << 20)
    assert quarantine.keep("leg", [b"1"], 7) == 1
    quarantine.close()
    with penstock.open_writer(f"log:{tmp_path / 'q'}") as writer:
        writer.write_many([b"", b"short", bytes(12) + b"\xff"])
    assert next(strays(tmp_path / "q")).data == b"1"
    assert len(list(strays(tmp_path / "q"))) == 2
