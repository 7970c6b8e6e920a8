"""What a balancer promises, on a network that loses, repeats and reorders."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from penstock.protocols.lhhttt.queue import MessageQueue, QueueSettings
from penstock.workers.balancer import Balancer
from protocols.lhhttt.lossy_world import LEASE, World, standing_time


@pytest.mark.parametrize(
    "histories", [10, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_every_message_behind_it_is_done_waits_or_has_a_lease_that_ends(
    histories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(histories):
        rng = random.Random(seed)
        with standing_time(monkeypatch) as clock, ExitStack() as stack:
            settings = QueueSettings(lease=LEASE)
            queues = [stack.enter_context(MessageQueue(settings)) for _ in range(3)]
            key = rng.choice((None, r"^\d+"))
            balancer = stack.enter_context(Balancer(queues, key))
            world = World(rng, clock, balancer, queues)
            for _ in range(150):
                world.step()
            world.finish()
