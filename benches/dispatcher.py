"""How fast does the dispatcher pass messages at least once, beside Redis with acknowledgement?

    python benches/dispatcher.py [--quick]

One process sends, one receives, and one is in the middle: the dispatcher with its outbox on the
disk and a ring on either side, or Redis with its log of writes. Both sync once a second. `live`
is both at the same time; in `catch-up` all is sent first, while the receiver is away.
"""

from __future__ import annotations

import argparse
import multiprocessing
import struct
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

import penstock
from harness import Requirement, Result, machine, report, save
from peers.contract import MEMORY
from peers.redis import connect
from peers.servers import REDIS, missing_server, redis_server
from penstock.core.retry import Backoff
from penstock.dispatch.bus import devote
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.routes import Routes
from penstock.dispatch.settings import Retry
from penstock.protocols.uprotocol import UUri
from penstock.protocols.uprotocol.message import notification
from penstock.protocols.uprotocol.transports.ring import RingLeg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

SIZE = 1024
#: Messages of one exchange with the middle, on either side of it.
GROUP = 500
RING = "slots=16384&size=32M"
SENDER, RECEIVER = UUri.parse("//device/100/1/8001"), UUri.parse("//cloud/200/1/0")
NUMBER = struct.Struct("<Q")
FIELD = b"p"
#: Nothing takes longer than this (seconds).
PATIENCE = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, no measurement")
    parser.add_argument("--rounds", type=int, help="default: 5, or 2 with --quick")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    count = 60_000 if arguments.quick else 300_000
    if why := missing_server(REDIS):
        sys.exit(f"{why}; run tools/bench-servers")
    where = machine()
    ways: dict[str, Callable[[Path, str, int], float]] = {"Redis": redis, "dispatcher": dispatcher}
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in track(range(rounds), "measuring", console=Console(stderr=True), transient=True):
        for mode in ("live", "catch-up"):
            for name, run in ways.items():
                with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
                    rates.setdefault((name, mode), []).append(
                        count / run(Path(folder), mode, count)
                    )
    results, requirements = [], []
    for mode, least in (("live", 2), ("catch-up", 1)):
        yardstick = Result("Redis XREADGROUP + XACK", mode, SIZE, tuple(rates["Redis", mode]))
        own = Result("dispatcher", mode, SIZE, tuple(rates["dispatcher", mode]), yardstick)
        results += [yardstick, own]
        assert own.ratio is not None
        requirements.append(
            Requirement(f"{mode}, at least {least}x", own.ratio >= least, f"{own.ratio:.2f}x")
        )
    report(f"At least once, {count:,} messages", where, results, requirements, "Redis")
    print(save(arguments.json, "dispatcher", where, results, requirements, messages=count))


def passed(
    mode: str, count: int, send: tuple[Callable[..., None], Any], receive: tuple[Any, Any]
) -> float:
    """Let one process send and another receive; return the seconds that count."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:

        def start(function: Callable[..., None], *arguments: Any) -> Connection:
            here, there = context.Pipe()
            process = context.Process(target=function, args=(there, count, *arguments), daemon=True)
            process.start()
            stack.callback(process.terminate)
            wait_for(here)  # all is made and opened
            return here

        sender = start(*send)
        if mode == "catch-up":
            sender.send("go")
            wait_for(sender)
            receiver = start(*receive)
            began = time.monotonic()
            receiver.send("go")
        else:
            receiver = start(*receive)
            receiver.send("go")
            began = time.monotonic()
            sender.send("go")
        wait_for(receiver)
        return time.monotonic() - began


def wait_for(connection: Connection) -> None:
    if not connection.poll(PATIENCE):
        raise SystemExit("it takes too long")
    said = connection.recv()
    if said != "done":
        raise SystemExit(said)


def check(numbers: Sequence[int], count: int) -> str:
    """Make sure that every message came, in order."""
    seen = list(dict.fromkeys(numbers))
    return "done" if seen == list(range(count)) else f"{len(seen)} of {count} came, or out of order"


# --- the dispatcher -------------------------------------------------------------------------------


def dispatcher(folder: Path, mode: str, count: int) -> float:
    with tempfile.TemporaryDirectory(dir=MEMORY) as rings, running(folder, Path(rings)):
        return passed(mode, count, (send_to_ring, rings), (receive_from_ring, rings))


@contextmanager
def running(state: Path, rings: Path) -> Iterator[None]:
    """Run a dispatcher in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=dispatch, args=(there, state, rings), daemon=True)
    process.start()
    try:
        wait_for(here)
        yield
        here.send("stop")
        wait_for(here)
    finally:
        process.terminate()
        process.join()


def dispatch(asked: Connection, state: Path, rings: Path) -> None:
    legs = [
        RingLeg("devices", receive=f"fmq:{rings}/in?{RING}"),
        RingLeg("cloud", send=f"fmq:{rings}/out"),
    ]
    routes = Routes(authorities={"devices": ["device"], "cloud": ["cloud"]})
    # The receiver is looked for often, so that what is measured is not how long that takes.
    retry = Retry(backoff=Backoff(initial=0.01, maximum=0.01), max_attempts=1_000_000)
    one = Dispatcher("bench", state, legs, routes=routes, retry=retry)
    one.start()
    devote()  # as `penstock dispatch run` does
    asked.send("done")
    asked.recv()
    one.stop()
    problems = one.books().problems()
    one.close()
    asked.send("; ".join(problems) or "done")


def send_to_ring(asked: Connection, count: int, rings: str) -> None:
    messages = [
        notification(SENDER, RECEIVER, NUMBER.pack(number).ljust(SIZE, b"x")).to_bytes()
        for number in range(count)
    ]
    with penstock.open_writer(f"fmq:{rings}/in", hold="uprotocol", keep="true") as writer:
        asked.send("done")
        asked.recv()
        for at in range(0, count, GROUP):
            writer.write_many(messages[at : at + GROUP])
        asked.send("done")
        time.sleep(PATIENCE)


def receive_from_ring(asked: Connection, count: int, rings: str) -> None:
    url = f"fmq:{rings}/out"
    penstock.create(f"{url}?{RING}")
    with penstock.open_reader(url, "start", hold="uprotocol") as reader:
        asked.send("done")
        asked.recv()
        numbers: list[int] = []
        while not numbers or numbers[-1] != count - 1:
            messages = reader.read_many(GROUP, PATIENCE)
            numbers += [number_of(message.payload) for message in messages]
            reader.acknowledge()
        asked.send(check(numbers, count))


def number_of(payload: bytes) -> int:
    """Return the number of a message, whose payload stands at its end."""
    return int(NUMBER.unpack_from(payload, len(payload) - SIZE)[0])


# --- Redis ----------------------------------------------------------------------------------------


def redis(folder: Path, mode: str, count: int) -> float:
    with redis_server(folder) as port:
        connect(port).xgroup_create("s", "g", "0", mkstream=True)
        return passed(mode, count, (send_to_redis, port), (receive_from_redis, port))


def send_to_redis(asked: Connection, count: int, port: int) -> None:
    client = connect(port)
    payloads = [NUMBER.pack(number).ljust(SIZE, b"x") for number in range(count)]
    asked.send("done")
    asked.recv()
    for at in range(0, count, GROUP):
        with client.pipeline(transaction=False) as pipeline:
            for payload in payloads[at : at + GROUP]:
                pipeline.xadd("s", {FIELD: payload})
            pipeline.execute()
    asked.send("done")
    time.sleep(PATIENCE)


def receive_from_redis(asked: Connection, count: int, port: int) -> None:
    client = connect(port)
    asked.send("done")
    asked.recv()
    numbers: list[int] = []
    while not numbers or numbers[-1] != count - 1:
        for _, entries in client.xreadgroup("g", "c", {"s": ">"}, count=GROUP, block=1000):
            numbers += [int(NUMBER.unpack_from(fields[FIELD])[0]) for _, fields in entries]
            client.xack("s", "g", *[key for key, _ in entries])
    asked.send(check(numbers, count))


if __name__ == "__main__":
    main()
