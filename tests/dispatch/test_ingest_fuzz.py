"""Do bytes from outside make nothing but counts and dead letters?"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from penstock.dispatch import Limits
from penstock.protocols.uprotocol import UMessage, UPayloadFormat, UPriority, UUri
from support.dispatching import ALICE, BOB, CAROL, METHOD, TOPIC, World


def _seeds(world: World) -> list[bytes]:
    asked = world.request(token="t", permission_level=2)
    return [
        message.to_bytes()
        for message in (
            world.publish(b"p" * 30),
            world.publish(b"", ttl=100),
            world.publish(sink=UUri("there", 0xFFFFFFFF, 0xFF, 0xFFFF)),
            world.notify(b"n" * 200, ttl=5),
            world.notify(sink=CAROL, priority=UPriority.CS6),
            world.notify(payload_format=UPayloadFormat.SHM, sink=CAROL),
            asked,
            world.response(asked, payload=b"r", payload_format=UPayloadFormat.RAW),
            world.request(traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-00"),
        )
    ]


def _mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    raw = bytearray(rng.choice(seeds))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 8])):
        kind = rng.randrange(6)
        at = rng.randrange(len(raw)) if raw else 0
        if kind == 0 and raw:
            raw[at] = rng.randrange(256)
        elif kind == 1 and raw:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del raw[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            raw[at:at] = os.urandom(rng.randrange(1, 9))
        elif kind == 4:
            del raw[at:]
        else:
            other = rng.choice(seeds)
            raw += other[rng.randrange(len(other)) :]
    return bytes(raw)


def _fuzz(tmp_path: Path, count: int, seed: int) -> None:
    world = World(tmp_path, limits=Limits(message=4096, receivers=20, dead=1 << 20))
    world.table.add(TOPIC, BOB)
    world.table.add(TOPIC, CAROL)
    world.table.add(world.dispatcher.topic, ALICE)
    rng = random.Random(seed)
    seeds = _seeds(world)
    done = 0
    while done < count:
        batch = [_mutated(rng, seeds) for _ in range(rng.randrange(1, 200))]
        before = world.dispatcher.books().counts.undecodable
        world.dispatcher.ingest(rng.choice(["local", "far"]), batch)
        undecodable = sum(not _decodes(raw) for raw in batch)
        assert world.dispatcher.books().counts.undecodable - before == undecodable
        done += len(batch)
        world.run(rng.random() / 100)
        if rng.random() < 0.05:
            seeds = _seeds(world)
        world.balance()
    counts = world.dispatcher.books().counts
    assert counts.received == done
    assert counts.internal == 0
    assert min(counts.routed, counts.invalid, counts.undecodable, counts.duplicates) > 0
    for leg in (world.local, world.far):
        for messages in leg.arrived.values():
            assert [rules for each in messages if (rules := each.validate())] == []
    world.close()


def _decodes(raw: bytes) -> bool:
    try:
        UMessage.from_bytes(raw)
    except ValueError:
        return False
    return True


def test_fuzz_of_ingest_gives_only_counts_and_letters(tmp_path: Path) -> None:
    _fuzz(tmp_path, 20_000, 1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fuzz_of_ingest_with_a_million_messages(tmp_path: Path) -> None:
    _fuzz(tmp_path, 1_000_000, 2)


def test_anything_that_is_not_a_message_is_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    odd = [b"", b"\x0a", b"\x0a\xff", b"\xff" * 100, os.urandom(50), b"\x0a\x7f\x0a\x12\x09"]
    world.ingest(*odd, bytes(2 << 20))
    counts = world.dispatcher.books().counts
    assert counts.undecodable + counts.invalid == len(odd) + 1
    assert METHOD.is_rpc_method
    world.balance()
    world.close()
