"""What a queue promises, on a network that loses, repeats and reorders, in histories by chance."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.core.overflow import OverflowPolicy
from penstock.protocols.lhhttt.queue import MessageQueue, QueueSettings
from protocols.lhhttt.lossy_world import LEASE, World, standing_time


def in_histories(few: int, many: int) -> pytest.MarkDecorator:
    full = [pytest.mark.full, pytest.mark.timeout(3600)]
    return pytest.mark.parametrize("histories", [few, pytest.param(many, marks=full)])


@in_histories(25, 3000)
def test_every_message_is_done_waits_has_a_lease_that_ends_or_is_counted_as_gone(
    histories: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"capacity": 8},
        {"capacity": 8, "policy": OverflowPolicy.DROP_OLDEST},
        {"capacity": 8, "policy": OverflowPolicy.DROP_NEWEST},
        {"deliveries": 2, "dead": f"log:{tmp_path}/dead"},
    ]
    for seed in range(histories):
        rng = random.Random(seed)
        settings = QueueSettings(lease=LEASE, **kinds[seed % len(kinds)])
        with standing_time(monkeypatch) as clock, MessageQueue(settings) as queue:
            world = World(rng, clock, queue, [queue])
            for _ in range(150):
                world.step()
            world.finish()


@in_histories(5, 1000)
def test_a_server_that_ends_or_is_killed_keeps_every_promise_about_what_is_stored(
    histories: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(histories):
        rng = random.Random(seed)
        folder = tmp_path / f"{seed}.0"
        with standing_time(monkeypatch) as clock:
            queue = MessageQueue(QueueSettings(lease=LEASE, journal=f"log:{folder}"))
            world = World(rng, clock, queue, [queue])
            for life in range(1, 4):
                for _ in range(80):
                    world.step()
                clock.is_disk_full = False
                is_killed = rng.random() < 0.5
                if is_killed:  # as its files are now
                    folder = Path(shutil.copytree(folder, tmp_path / f"{seed}.{life}"))
                queue.close()
                queue = MessageQueue(QueueSettings(lease=LEASE, journal=f"log:{folder}"))
                world.begin_anew(queue, [queue], is_killed=is_killed)
            world.finish()
            queue.close()
        for left in tmp_path.glob(f"{seed}.*"):
            shutil.rmtree(left)
