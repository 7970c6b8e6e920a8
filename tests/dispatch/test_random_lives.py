"""Whatever happens in whichever order: is every message delivered, or a dead letter?"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.dispatch import Delivery, Limits, Policy
from penstock.protocols.uprotocol import UPriority, UStatus, UUri
from support.dispatching import ALICE, BOB, CAROL, METHOD, TOPIC, World, status

_CODES = ["UNAVAILABLE", "UNKNOWN", "RESOURCE_EXHAUSTED", "NOT_FOUND", "PERMISSION_DENIED"]
_LATEST = UUri("here", 0x10, 1, 0x9001)
_SOURCES = [TOPIC, UUri("here", 0x11, 1, 0x8001), UUri("here", 0x11, 1, 0x8002)]
_SINKS = [ALICE, BOB, CAROL, UUri("there", 0x31, 2, 0), UUri("nowhere", 1, 1, 0)]


class _Life:
    """A dispatcher and what its test knows of it."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self._folder = tmp_path
        self._lives = 0
        self._number = 0
        self.sent: set[bytes] = set()
        self.ended: set[bytes] = set()
        order = self.rng.choice(["arrival", "priority"])
        policies: list[Any] = [
            Policy(topic=_LATEST, delivery=Delivery.LATEST, order=order),  # type: ignore[arg-type]
            Policy(order=order),  # type: ignore[arg-type]
        ]
        limits = Limits(queue_messages=self.rng.choice([20, 1000]), batch=self.rng.choice([3, 256]))
        self._options: dict[str, Any] = {"policies": policies, "limits": limits}
        self.world = World(tmp_path / "0", **self._options)
        self._break()

    def _break(self) -> None:
        def judge(_: object, __: object) -> UStatus | None:
            return status(self.rng.choice(_CODES)) if self.rng.random() < 0.3 else None

        self.world.local.judge = self.world.far.judge = judge

    def send(self) -> None:
        world, rng = self.world, self.rng
        batch = []
        for _ in range(rng.randrange(1, 20)):
            self._number += 1
            payload = b"%d" % self._number
            priority = rng.choice(list(UPriority))
            ttl = rng.choice([None, None, 100, 5000])
            if rng.random() < 0.2:
                batch.append(world.request(payload=payload, ttl=rng.choice([50, 4000])))
            elif rng.random() < 0.1:  # may be superseded, so that it is only counted
                batch.append(world.notify(payload, source=_LATEST, ttl=ttl))
                continue
            else:
                source, sink = rng.choice(_SOURCES), rng.choice(_SINKS)
                batch.append(
                    world.notify(payload, source=source, sink=sink, ttl=ttl, priority=priority)
                )
            self.sent.add(payload)
        world.ingest(*batch)
        if rng.random() < 0.2:
            world.ingest(*batch)  # a sender that did not hear of it

    def stop(self) -> None:
        self.world.dispatcher.stop_topic(self.rng.choice([*_SOURCES, METHOD]))

    def start(self) -> None:
        for stop in list(self.world.dispatcher.switches):
            self.world.dispatcher.start_topic(stop.topic, stop.receiver)

    def wait(self) -> None:
        self.world.run(self.rng.choice([0, 0.01, 0.3, 3]))

    def restart(self) -> None:
        self._note()
        self.world = self.world.reopen()
        self._break()

    def crash(self) -> None:
        """Go on with the files as they are now, as after a kill -9."""
        self._note()
        self._lives += 1
        copy = self._folder / str(self._lives)
        # The segments of the logs are mostly holes, and should stay so.
        subprocess.run(["cp", "-a", "--sparse=always", self.world.state, copy], check=True)
        self.world.dispatcher.close()
        shutil.rmtree(self.world.state)
        options: dict[str, Any] = {
            **self._options,
            "clock": self.world.clock,
            "table": self.world.table,
        }
        self.world = World(copy, **options)
        self._break()

    def _note(self) -> None:
        for leg in (self.world.local, self.world.far):
            for messages in leg.arrived.values():
                self.ended.update(message.payload or b"" for message in messages)

    def end(self) -> None:
        self.start()
        self.world.local.judge = self.world.far.judge = None
        self.world.run(1000)
        self._note()
        for letter in self.world.letters:
            if letter.original is not None:
                self.ended.add(letter.original.payload or b"")
        assert self.world.queued == 0
        self.world.balance()
        assert self.sent <= self.ended
        self.world.close()
        shutil.rmtree(self.world.state)


@pytest.mark.parametrize("seed", range(12))
def test_every_message_ends_somewhere(tmp_path: Path, seed: int) -> None:
    life = _Life(tmp_path, seed)
    acts = [life.send, life.wait, life.stop, life.start, life.restart, life.crash]
    for _ in range(40):
        life.rng.choices(acts, weights=[10, 10, 1, 1, 1, 1])[0]()
        life.world.balance()
    life.end()


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 200))
def test_every_message_ends_somewhere_in_many_lives(tmp_path: Path, seed: int) -> None:
    test_every_message_ends_somewhere(tmp_path, seed)
