"""What does a message cost in an outbox, live and in catch-up?

python benches/outbox.py [--quick]

Each message is stored, taken and settled in one thread. Beside the time on the wall there is the
processor time of that thread, since other programs may use the machine as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from harness import Contestant, Requirement, file_system, machine, race, report, save
from penstock.dispatch.outbox import Entry, Outbox, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.dispatch.outbox import Order

SIZE = 1024
BATCH = 256
#: Microseconds that a message may cost.
LIVE, CATCH_UP = 3.0, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, no measurement")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    parser.add_argument("--directory", type=Path, help="where the outboxes are")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.3) if arguments.quick else (7, 1.5)
    where = machine()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        folder = Path(directory)
        where["file system"] = file_system(folder)
        ways = [
            Way(folder, "live, by arrival", live()),
            Way(folder, "live, by priority, 3 classes", live(order="priority", classes=(1, 4, 6))),
            Way(folder, "live, with a time to live", live(ttl_ms=60_000)),
            Way(folder, "live, one at a time", live(batch=1)),
            Way(folder, "store only", store),
            Way(folder, "catch-up from the disk", catch_up),
        ]
        contestants = [Contestant(way.name, where["file system"], SIZE, way.run) for way in ways]
        results = race(contestants, rounds, seconds)
    costs = {way.name: way.cost() for way in ways}
    wall = {result.name: 1e6 / result.rate for result in results}
    requirements = [
        Requirement(
            f"{way.name}: at most {most:g} µs of a processor a message",
            costs[way.name] <= most,
            f"{costs[way.name]:.2f} µs; {wall[way.name]:.2f} µs on the wall",
        )
        for way, most in ((ways[0], LIVE), (ways[-1], CATCH_UP))
    ]
    report(f"An outbox, {BATCH} messages at a time", where, results, requirements, "none")
    for name, cost in costs.items():
        print(f"{name}: {cost:.2f} µs of a processor, {wall[name]:.2f} µs on the wall")
    print(save(arguments.json, "outbox", where, results, requirements, processor_us=costs))


@dataclass
class Way:
    """One way to use an outbox, and what it cost."""

    folder: Path
    name: str
    #: Passes so many messages through an outbox; returns seconds: on the wall, of the processor.
    work: Callable[[Outbox, int], tuple[float, float]]
    costs: list[float] = field(default_factory=list)

    def run(self, count: int) -> float:
        folder = self.folder / "outbox"
        with Outbox(folder, max_messages=1 << 30, max_bytes=1 << 40) as outbox:
            wall, processor = self.work(outbox, count)
        shutil.rmtree(folder)
        self.costs.append(processor / count * 1e6)
        return wall

    def cost(self) -> float:
        """Return microseconds of the processor for one message."""
        return median(self.costs[1:])


def live(
    *,
    batch: int = BATCH,
    order: Order = "arrival",
    classes: tuple[int, ...] = (1,),
    ttl_ms: int = 0,
) -> Callable[[Outbox, int], tuple[float, float]]:
    """Store some, take them, settle them."""
    raw = os.urandom(SIZE)

    def work(outbox: Outbox, count: int) -> tuple[float, float]:
        stopwatch = Stopwatch()
        for at in range(0, count, batch):
            expires = int(time.time() * 1000) + ttl_ms if ttl_ms else 0
            outbox.append(
                [
                    Entry(classes[i % len(classes)], 0, expires, i & 7, 1, raw)
                    for i in range(min(batch, count - at))
                ]
            )
            while items := outbox.take(batch, 1 << 20, order):
                outbox.settle(items, Reason.ACKED)
        return stopwatch.stop()

    return work


def store(outbox: Outbox, count: int) -> tuple[float, float]:
    """Store all; the receiver is down."""
    raw = os.urandom(SIZE)
    stopwatch = Stopwatch()
    for at in range(0, count, BATCH):
        outbox.append([Entry(1, 0, 0, 1, 1, raw) for _ in range(min(BATCH, count - at))])
    return stopwatch.stop()


def catch_up(outbox: Outbox, count: int) -> tuple[float, float]:
    """Take and settle all, which were stored before."""
    store(outbox, count)
    stopwatch = Stopwatch()
    while items := outbox.take(BATCH, 1 << 20):
        outbox.settle(items, Reason.ACKED)
    return stopwatch.stop()


class Stopwatch:
    """Seconds on the wall, and seconds of the processor that this thread had."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.thread_time()

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.thread_time() - self._processor


if __name__ == "__main__":
    main()
