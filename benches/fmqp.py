"""How fast is a remote queue beside a plain echo over the same kind of socket?

python benches/fmqp.py [--quick]

Where PENSTOCK_LROSE_BIN names the folder of LROSE's programs, its unmodified client is measured,
too: with our server, and with its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import penstock
from harness import Contestant, Requirement, Result, machine, race, report, save
from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose.ds_client import ping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 1024
#: Messages in one call of the batch forms.
GROUP = 500
#: A queue that has wrapped soon: later ones go where earlier ones were, as in daily use.
OPTIONS = "slots=20000&size=20M"
#: Messages that are there to be read.
FILL = 15_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.5) if arguments.quick else (7, 1.5)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        server = stack.enter_context(serving(root))
        echo = Contestant("echo, blocking sockets", "tcp", SIZE, stack.enter_context(echoing()))
        contestants = [echo, *remote(stack, server, echo)]
        results = race(contestants, rounds, seconds)
        lrose = os.environ.get("PENSTOCK_LROSE_BIN")
        theirs = lrose_client(stack, Path(lrose), root, server, rounds) if lrose else []
    requirements = [
        requirement(results[1].ratio, 0.5, "writes of 1 KiB, one a request, against the echo"),
        requirement(results[2].ratio, 10, "batched writes against the echo"),
        requirement(results[3].ratio, 10, "batched reads against the echo"),
    ]
    where = machine()
    report("A remote queue (fmqp) over loopback", where, results, requirements, "the echo")
    if theirs:
        kept = [
            requirement(theirs[1].ratio, 100, "writes of LROSE's client against LROSE's server"),
            requirement(theirs[3].ratio, 20, "its reads against LROSE's server"),
        ]
        report("LROSE's own client", where, theirs, kept, "LROSE's server")
        results, requirements = [*results, *theirs], [*requirements, *kept]
    print(save(arguments.output, "fmqp", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


def requirement(ratio: float | None, least: float, text: str) -> Requirement:
    assert ratio is not None
    return Requirement(f"{text}: at least {least:g}x", ratio >= least, f"{ratio:.2f}x")


# --- the yardstick: a round trip of SIZE bytes, in Python, without any protocol -----------------


def echo_server(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(SIZE, socket.MSG_WAITALL):
        connection.sendall(data)


@contextmanager
def echoing() -> Iterator[Callable[[int], float]]:
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=echo_server, args=(listener,), daemon=True)
    process.start()
    connection = socket.create_connection(listener.getsockname())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    payload = bytes(SIZE)

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            connection.sendall(payload)
            connection.recv(SIZE, socket.MSG_WAITALL)
        return time.perf_counter() - began

    try:
        yield run
    finally:
        connection.close()
        listener.close()
        process.join(5)


# --- the remote queue ---------------------------------------------------------------------------


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run the server as people do: the command, in a process of its own."""
    command = [str(Path(sys.executable).with_name("penstock")), "serve", "fmqp"]
    process = subprocess.Popen(
        [*command, "--root", str(root), "--port", "0", "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 30)
        if not ready:
            raise SystemExit("the server did not start")
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def remote(stack: ExitStack, server: str, echo: Contestant) -> list[Contestant]:
    payload = b"x" * SIZE
    group = [payload] * GROUP
    single = stack.enter_context(penstock.open_writer(f"{server}/single?{OPTIONS}"))
    many = stack.enter_context(penstock.open_writer(f"{server}/many?{OPTIONS}"))
    fill = stack.enter_context(penstock.open_writer(f"{server}/fill?{OPTIONS}"))
    for _ in range(FILL // GROUP):
        fill.write_many(group)
    reader = stack.enter_context(penstock.open_reader(f"{server}/fill"))

    def write_one(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            single.write(payload)
        return time.perf_counter() - began

    def write_many(count: int) -> float:
        began = time.perf_counter()
        for first in range(0, count, GROUP):
            many.write_many(group[: count - first])
        return time.perf_counter() - began

    def read_many(count: int) -> float:
        took, left = 0.0, count
        while left:
            reader.seek("start")
            began = time.perf_counter()
            here = min(left, FILL - GROUP)
            left -= here
            while here:
                here -= len(reader.read_many(min(here, GROUP), timeout=10))
            took += time.perf_counter() - began
        return took

    return [
        Contestant("write, one a request", "fmqp", SIZE, write_one, echo),
        Contestant(f"write_many, {GROUP} a call", "fmqp", SIZE, write_many, echo),
        Contestant(f"read_many, {GROUP} a call", "fmqp", SIZE, read_many, echo),
    ]


# --- LROSE's own client ---------------------------------------------------------------------------


def lrose_client(
    stack: ExitStack, programs: Path, root: Path, ours: str, rounds: int
) -> list[Result]:
    """Let LROSE's client write to, and read from, LROSE's server and ours, by turns."""
    port = stack.enter_context(lrose_serving(programs, root))
    ports = {"LROSE's server": port, "ours": int(ours.rpartition(":")[2])}
    # LROSE's server takes some 90 ms for a message: it is given fewer of them.
    counts = {"LROSE's server": (20, 1000), "ours": (2000, FILL - GROUP)}
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for whose, number in ports.items():
            writes, reads = counts[whose]
            prefix = f"fmqp:://localhost:{number}"
            slots = "20000 20000000 0 5 start 1"
            took = drive(programs, f"open rw {prefix}:theirs {slots}", f"wn {writes} {SIZE} ramp 1")
            rates.setdefault(("write", whose), []).append(writes / took)
            took = drive(
                programs, f"open ro {prefix}:fill {slots}", "seek start", f"rn -1 -1 {reads}"
            )
            rates.setdefault(("read", whose), []).append(reads / took)
    results: list[Result] = []
    for what in ("write", "read"):
        own = Result(f"{what}, LROSE's server", "fmqp", SIZE, tuple(rates[what, "LROSE's server"]))
        results += [own, Result(f"{what}, ours", "fmqp", SIZE, tuple(rates[what, "ours"]), own)]
    return results


def drive(programs: Path, *commands: str) -> float:
    """Run LROSE's driver, and return the seconds of its last command."""
    said = subprocess.run(
        [programs / "fmq_driver"],
        input="\n".join([*commands, "close\n"]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    answers = [json.loads(line) for line in said.splitlines()]
    assert all(answer.get("rc", 0) == 0 and answer.get("bad", 0) == 0 for answer in answers), said
    return float(answers[-2]["secs"])


@contextmanager
def lrose_serving(programs: Path, root: Path) -> Iterator[int]:
    """Run LROSE's server on the same queues; tell its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [programs / "DsFmqServer", "-port", str(port)],
        env={**os.environ, "DATA_DIR": str(root), "RAP_DATA_DIR": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it forks for each client
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                ping("127.0.0.1", port, 1)
                break
            except ConnectionLost:
                time.sleep(0.05)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
