"""How fast do datagrams pass by batches, beside Python's own recvfrom and sendto?

python benches/datagrams.py [--quick]

A server in a process of its own answers each datagram with one as large; a client sends windows of
them and takes the answers. Both ends are of one kind. Only the server's end is held up: it is what
a UDP queue does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Contestant, Requirement, machine, race, report, save
from penstock.protocols.datagrams import DatagramSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SIZE = 64
#: Datagrams under way at the same time.
WINDOW = 128
#: Seconds without an answer after which a window is given up: the rest of it was lost.
PATIENCE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.5) if arguments.quick else (7, 1.5)
    with ExitStack() as stack:
        plain = Contestant(
            "recvfrom, sendto", "udp", SIZE, stack.enter_context(asking(answer_one_by_one))
        )
        batches = Contestant(
            "recvmmsg, sendmmsg", "udp", SIZE, stack.enter_context(asking(answer_batches)), plain
        )
        results = race([plain, batches], rounds, seconds)
    ratio = results[1].ratio
    assert ratio is not None
    requirements = [
        Requirement("requests answered by batches: at least 1.5x", ratio >= 1.5, f"{ratio:.2f}x"),
        Requirement(
            "requests answered by batches: at least 100,000 a second",
            results[1].rate >= 100_000,
            f"{results[1].rate:,.0f}",
        ),
    ]
    where = machine()
    report("Datagrams over loopback", where, results, requirements, "recvfrom, sendto")
    print(save(arguments.output, "datagrams", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


def answer_one_by_one(told: Connection) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        server.bind(("127.0.0.1", 0))
        told.send(server.getsockname()[1])
        while True:
            payload, address = server.recvfrom(65536)
            server.sendto(payload, address)


def answer_batches(told: Connection) -> None:
    with DatagramSocket.bind("127.0.0.1", 0) as server:
        told.send(server.port)
        while True:
            server.send(server.receive().whole)


@contextmanager
def asking(answer: Callable[[Connection], None]) -> Iterator[Callable[[int], float]]:
    """Start a server, and give what asks it so many times and returns the seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=answer, args=(theirs,), daemon=True
    )
    process.start()
    with DatagramSocket.connect("127.0.0.1", ours.recv()) as client:

        def run(count: int) -> float:
            window = [(bytes(SIZE), None)] * WINDOW
            began, asked = time.perf_counter(), 0
            while asked < count:
                taken = client.send(window)
                asked += taken
                while taken > 0:
                    answers = len(client.receive(timeout=PATIENCE).whole)
                    if not answers:
                        sys.exit(f"{taken} datagrams were lost on loopback")
                    taken -= answers
            return (time.perf_counter() - began) * count / asked

        yield run
    process.terminate()
    process.join()


if __name__ == "__main__":
    main()
