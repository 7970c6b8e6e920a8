"""Apps of the router as processes: python -m support.routed_apps ROLE JSON."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.core.errors import Overrun
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import StreamId
from penstock.queue.streams import OutputStream
from penstock.workers.router import Router

#: The type of the last message of a stream.
LAST = 1


def tell(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def consume(apps: list[dict[str, Any]]) -> None:
    """Run apps in a thread each."""
    with ThreadPoolExecutor(len(apps)) as pool:
        for done in [pool.submit(consume_as, **app) for app in apps]:
            done.result()


def consume_as(name: str, requests: list[str], streams: int, pause: float, policy: str) -> None:
    """Receive until so many streams have ended; tell how many came of each, and whether in order.

    The messages of a stream are the numbers from 0 on.
    """
    with Router().register(name, policy=OverflowPolicy(policy)) as app:
        app.add(*map(StreamId.parse, requests))
        tell(ready=name)
        counts: dict[str, int] = {}
        in_order, ended, overruns = True, 0, 0
        while ended < streams:
            try:
                with app.receive_batch(timeout=None) as got:
                    assert got is not None
                    values = np.frombuffer(b"".join(got.batch.column("payload").to_pylist()), "<u8")
                    first = counts.get(got.stream.hex(), 0)
                    in_order &= bool((values == np.arange(first, first + len(values))).all())
                    counts[got.stream.hex()] = int(values[-1]) + 1
                    ended += got.batch.column("type").to_pylist().count(LAST)
            except Overrun:
                overruns += 1
            time.sleep(pause)
        books = app.statistics()
        tell(name=name, counts=counts, in_order=in_order, lost=books.lost, messages=books.messages)


def produce(streams: list[str], count: int, hold: str, pace: float) -> None:
    """Write the numbers from 0 on to each stream, in blocks."""
    outputs = [
        OutputStream.create(
            StreamId.parse(each), owner="producer", hold=hold, slots=2048, size=1 << 18
        )
        for each in streams
    ]
    tell(ready=True)
    sys.stdin.readline()
    block = 1000
    for first in range(0, count, block):
        rows = np.arange(first, min(first + block, count), dtype="<u8")
        is_last = first + block >= count
        for output in outputs:
            payloads = [row.tobytes() for row in rows]
            output.write_many(payloads[:-1] if is_last else payloads)
            if is_last:
                output.write(payloads[-1], LAST)
        time.sleep(pace)
    tell(written=count)
    sys.stdin.readline()
    for output in outputs:
        output.close()


def main(role: str, arguments: dict[str, Any]) -> None:
    if role == "consume":
        consume(**arguments)
    else:
        produce(**arguments)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
