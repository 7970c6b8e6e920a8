"""What does the router cost, beside readers that know their queue?

python benches/router.py [--quick]

Messages of 200 bytes go to four apps, each in a process of its own, in batches by reference. Beside
them, four bare readers of a queue get the same. The writer waits for all: each gets each message.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from harness import Contestant, Requirement, machine, race, report, save
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import StreamId
from penstock.queue.streams import OutputStream
from penstock.queue.subscription import requests_for
from penstock.workers.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SIZE = 200
#: Messages in a batch, at most, and in a call of the writer.
BATCH = 4096
BLOCK = [bytes(SIZE)] * 1000
#: Fewer would only show how long processes take to wake up.
FEWEST = 200_000
APPS = [f"app-{number}" for number in range(4)]
STREAM = StreamId.generate(1, 1, "bench://router", "telemetry")
#: At least so much of what bare readers get.
LEAST = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.5) if arguments.quick else (7, 2.0)
    with ExitStack() as stack:
        bare = stack.enter_context(readers(read_bare))
        routed = stack.enter_context(readers(read_routed))
        yardstick = Contestant("four bare readers", "shm", SIZE, bare)
        results = race(
            [yardstick, Contestant("four apps of the router", "shm", SIZE, routed, yardstick)],
            rounds,
            seconds,
        )
    ratio = results[1].ratio or 0.0
    requirements = [
        Requirement(
            f"messages to each of four apps: at least {LEAST}x of bare readers",
            ratio >= LEAST,
            f"{ratio:.2f}x",
        )
    ]
    where = machine()
    report("Router", where, results, requirements, "four bare readers")
    print(save(arguments.output, "router", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


@contextmanager
def readers(read: Callable[[str, str, Connection], None]) -> Iterator[Callable[[int], float]]:
    """Start four readers; give what writes so many messages and waits until all have them."""
    spawn = multiprocessing.get_context("spawn")
    with (
        TemporaryDirectory(prefix="penstock-bench-", dir="/dev/shm") as directory,
        OutputStream.create(
            STREAM, owner="bench", directory=directory, hold=",".join(APPS), slots=16384, size="16M"
        ) as output,
    ):
        pipes, processes = [], []
        for name in APPS:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=read, args=(directory, name, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def run(count: int) -> float:
            blocks = max(FEWEST, count) // len(BLOCK)
            for pipe in pipes:
                pipe.send(blocks * len(BLOCK))
            began = time.perf_counter()
            for _ in range(blocks):
                output.write_many(BLOCK)
            for pipe in pipes:
                if pipe.recv() != 0:
                    sys.exit("messages were lost")
            return (time.perf_counter() - began) * count / (blocks * len(BLOCK))

        try:
            yield run
        finally:
            for pipe in pipes:
                pipe.send(0)
            for process in processes:
                process.join()


def read_bare(directory: str, name: str, told: Connection) -> None:
    with OutputStream.open(STREAM, directory=directory, hold=name) as reader:
        told.send(True)
        while count := told.recv():
            while count:
                with reader.view_batch(BATCH, None) as batch:
                    count -= len(batch)
            told.send(reader.statistics().lost)


def read_routed(directory: str, name: str, told: Connection) -> None:
    with Router(directory).register(name, policy=OverflowPolicy.BLOCK) as app:
        app.add(*requests_for(path="bench://router"))
        told.send(True)
        while count := told.recv():
            while count:
                with app.receive_batch(BATCH, None) as lent:
                    assert lent is not None
                    count -= len(lent.batch)
            told.send(app.statistics().lost)


if __name__ == "__main__":
    main()
