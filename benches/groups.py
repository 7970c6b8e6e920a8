"""How fast do four processes share what has piled up, beside four Redis consumers?

    python benches/groups.py [--quick]

All messages are there first. Then four processes read them as one group, in equal batches, and
acknowledge each batch. Both sides sync once a second: the log and the state of its group, and
Redis's log of writes. A run counts if every message was acknowledged once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

import penstock
from harness import Requirement, Result, machine, report, save
from peers.redis import add, connect
from peers.servers import REDIS, missing_server, redis_server
from penstock.core.capabilities import Grouped

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

SIZE = 1024
MEMBERS = 4
BATCHES = (10, 100, 500)
NUMBER = struct.Struct("<Q")
FIELD = b"p"
#: Nothing takes longer than this (seconds).
PATIENCE = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, no measurement")
    parser.add_argument("--rounds", type=int, help="default: 5, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    count = 40_000 if arguments.quick else 200_000
    if why := missing_server(REDIS):
        sys.exit(f"{why}; run tools/bench-servers")
    where = machine()
    ways: dict[str, Callable[[Path, int, int], float]] = {"Redis": redis, "log": log, "ring": ring}
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in track(range(rounds), "measuring", console=Console(stderr=True), transient=True):
        for batch in BATCHES:
            for name, run in ways.items():
                with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
                    took = run(Path(folder), count, batch)
                    rates.setdefault((name, batch), []).append(count / took)
    results, requirements = [], []
    for batch in BATCHES:
        storage = f"batches of {batch}"
        yardstick = Result("Redis XREADGROUP + XACK", storage, SIZE, tuple(rates["Redis", batch]))
        own = Result("group of a log", storage, SIZE, tuple(rates["log", batch]), yardstick)
        quick = Result("group of a ring", storage, SIZE, tuple(rates["ring", batch]), yardstick)
        results += [yardstick, own, quick]
        assert own.ratio is not None
        requirements.append(
            Requirement(f"{storage}, at least 2x", own.ratio >= 2, f"{own.ratio:.2f}x")
        )
    title = f"{MEMBERS} processes catch up on {count:,} messages, each acknowledged"
    report(title, where, results, requirements, "Redis")
    print(save(arguments.json, "groups", where, results, requirements, messages=count))


def shared(count: int, batch: int, member: Callable[..., None], *arguments: Any) -> float:
    """Let all members share the messages; return the seconds until the last one is done."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        members: list[Connection] = []
        for number in range(MEMBERS):
            here, there = context.Pipe()
            process = context.Process(
                target=member, args=(there, batch, number, *arguments), daemon=True
            )
            process.start()
            stack.callback(process.terminate)
            members.append(here)
        for here in members:  # all is opened
            hear(here)
        began = time.monotonic()
        for here in members:
            here.send("go")
        numbers = [number for here in members for number in hear(here)]
        took = time.monotonic() - began
    if sorted(numbers) != list(range(count)):
        raise SystemExit(f"{len(numbers):,} of {count:,} came, or some twice")
    return took


def hear(connection: Connection) -> list[int]:
    if not connection.poll(PATIENCE):
        raise SystemExit("it takes too long")
    said: list[int] = connection.recv()
    return said


def payloads(count: int) -> list[bytes]:
    return [NUMBER.pack(number).ljust(SIZE, b"x") for number in range(count)]


# --- a log, and a ring ----------------------------------------------------------------------------


def log(folder: Path, count: int, batch: int) -> float:
    return of_stream(f"log:{folder}/stream", count, batch)


def ring(folder: Path, count: int, batch: int) -> float:
    url = f"fmq:{folder}/stream"
    penstock.create(f"{url}?slots={count}&size={count * (SIZE + 64)}")
    return of_stream(url, count, batch)


def of_stream(url: str, count: int, batch: int) -> float:
    with penstock.open_writer(url, sync="1s") as writer:
        writer.write_many(payloads(count))
    took = shared(count, batch, member_of_group, url)
    with penstock.open_reader(url, group="g") as reader:
        assert isinstance(reader, Grouped)
        books = reader.group()
    if (books.acked, books.lag, books.redelivered, books.lost) != (count, 0, 0, 0):
        raise SystemExit(f"the books of the group: {books}")
    return took


def member_of_group(asked: Connection, batch: int, number: int, url: str) -> None:
    del number
    with penstock.open_reader(url, group="g", sync="1s") as reader:
        assert isinstance(reader, Grouped)
        asked.send([])
        asked.recv()
        numbers: list[int] = []
        while messages := reader.read_many(batch):
            numbers += [NUMBER.unpack_from(message.payload)[0] for message in messages]
            reader.ack(messages)
        asked.send(numbers)
        time.sleep(PATIENCE)


# --- Redis ----------------------------------------------------------------------------------------


def redis(folder: Path, count: int, batch: int) -> float:
    with redis_server(folder) as port:
        client = connect(port)
        client.xgroup_create("s", "g", "0", mkstream=True)
        messages = payloads(count)
        for at in range(0, count, 1000):
            add(client, "s", messages[at : at + 1000])
        return shared(count, batch, member_of_redis, port)


def member_of_redis(asked: Connection, batch: int, number: int, port: int) -> None:
    client = connect(port)
    asked.send([])
    asked.recv()
    numbers: list[int] = []
    while answer := client.xreadgroup("g", f"member {number}", {"s": ">"}, count=batch):
        entries = answer[0][1] if isinstance(answer, list) else answer[b"s"][0]
        numbers += [NUMBER.unpack_from(fields[FIELD])[0] for _, fields in entries]
        client.xack("s", "g", *[key for key, _ in entries])
    asked.send(numbers)
    time.sleep(PATIENCE)


if __name__ == "__main__":
    main()
