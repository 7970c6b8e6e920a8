"""What does a queue of stream-py's protocol cost, beside a plain one on asyncio?

python benches/lhhttt.py [--quick]

Both serve the prototype's verbs in a process of their own. For PUT and GET the processor time of
the server counts, as each answers windows of requests. Then messages pass through: the plain queue
by PUT and GET, ours by batches of its reliable mode, each stored, leased and acknowledged; payloads
are equal, and all clients of a queue are one process, which has several requests under way: 128 at
the plain queue, whose server is never idle so, and one of each writer and reader at ours. Last,
the server's processor time for that, which limits both, and hardly depends on what else the machine
does.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from harness import Contestant, Requirement, machine, race, report, save
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.lhhttt.client import DatagramLink, QueueClient
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

HOST = "127.0.0.1"
SIZE = 100
#: Requests under way at the same time.
WINDOW = 128
#: Messages in a request of the reliable mode: what fits a datagram.
BATCH = 550
#: Writers of the reliable mode, and as many readers.
CLIENTS = 2
#: Seconds without an answer after which the rest of a window is taken for lost.
PATIENCE = 2.0
PUT = b"268PUT:" + b"m" * SIZE  # 0x68 are 104 bytes
GET = b"13GET"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.3) if arguments.quick else (7, 1.0)
    with ExitStack() as stack:
        plain = stack.enter_context(queue(serve_plainly))
        ours = stack.enter_context(queue(serve_ours))
        plain_put = Contestant("asyncio: PUT, processor", "udp", SIZE, plain.put)
        plain_get = Contestant("asyncio: GET, processor", "udp", SIZE, plain.get)
        plain_pass = Contestant("asyncio: PUT and GET", "udp", SIZE, plain.carry)
        plain_time = Contestant(
            "asyncio: PUT and GET, processor",
            "udp",
            SIZE,
            lambda count: plain.processor_of(plain.carry, count),
        )
        results = race(
            [
                plain_put,
                Contestant("penstock: PUT, processor", "udp", SIZE, ours.put, plain_put),
                plain_get,
                Contestant("penstock: GET, processor", "udp", SIZE, ours.get, plain_get),
                plain_pass,
                Contestant("penstock: PUT and GET", "udp", SIZE, ours.carry, plain_pass),
                Contestant(
                    "penstock: reliable batches", "udp", SIZE, ours.carry_safely, plain_pass
                ),
                plain_time,
                Contestant(
                    "penstock: reliable batches, processor",
                    "udp",
                    SIZE,
                    lambda count: ours.processor_of(ours.carry_safely, count),
                    plain_time,
                ),
            ],
            rounds,
            seconds,
        )
    ratios = {result.name: result.ratio or 1.0 for result in results}
    requirements = [
        Requirement(f"{text}: at least {least}x", ratios[name] >= least, f"{ratios[name]:.1f}x")
        for name, text, least in (
            ("penstock: PUT, processor", "PUTs in a second of the server's processor", 3),
            ("penstock: GET, processor", "GETs in a second of the server's processor", 3),
            ("penstock: reliable batches", "messages through the reliable mode", 20),
        )
    ]
    where = machine()
    report("Queues over UDP", where, results, requirements, "asyncio")
    print(save(arguments.output, "lhhttt", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


# --- servers ------------------------------------------------------------------------------------


class PlainQueue(asyncio.DatagramProtocol):
    """The protocol, as one writes it down."""

    def __init__(self) -> None:
        self.messages: deque[str] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        digits = int(data[:1], 16)
        size = int(data[1 : 1 + digits], 16)
        if len(data) != 1 + digits + size:
            return
        verb, _, message = data[1 + digits :].decode().partition(":")
        if verb == "PUT":
            self.messages.append(message)
            answer = f"PUT {len(message)} bytes"
        elif verb == "GET":
            answer = self.messages.popleft() if self.messages else ""
        elif verb == "SIZE":
            answer = str(len(self.messages))
        else:
            return
        text = answer.encode()
        length = f"{len(text):x}"
        self.transport.sendto(f"{len(length):x}{length}".encode() + text, addr)


def serve_plainly(told: Connection) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(PlainQueue, local_addr=(HOST, 0))
        told.send(transport.get_extra_info("sockname")[1])
        await loop.run_in_executor(None, tell_time, told)

    asyncio.run(serve())


def serve_ours(told: Connection) -> None:
    with LhhtttServer(ServerOptions(port=0)) as server:
        told.send(server.port)
        tell_time(told)


def tell_time(told: Connection) -> None:
    """Tell the processor time of this process whenever it is asked for, until the end."""
    while told.recv():
        told.send(time.process_time())


# --- clients ------------------------------------------------------------------------------------


class Client:
    """Asks one queue, and measures."""

    def __init__(self, port: int, told: Connection) -> None:
        self._port = port
        self._told = told
        self._socket = DatagramSocket.connect(HOST, port)

    def put(self, count: int) -> float:
        """Return the server's processor time for so many PUTs."""
        before = self._processor()
        self._ask(PUT, count)
        took = self._processor() - before
        self._ask(GET, count)
        return took

    def get(self, count: int) -> float:
        """Return the server's processor time for so many GETs."""
        self._ask(PUT, count)
        before = self._processor()
        self._ask(GET, count)
        return self._processor() - before

    def carry(self, count: int) -> float:
        """Return the seconds in which so many messages pass."""
        began = time.perf_counter()
        for _ in range(0, count, WINDOW):
            self._ask(PUT, WINDOW)
            self._ask(GET, WINDOW)
        return (time.perf_counter() - began) * count / (-(-count // WINDOW) * WINDOW)

    def carry_safely(self, count: int) -> float:
        """Return the seconds in which so many messages pass by the reliable mode."""
        batches = -(-count // (BATCH * CLIENTS))
        with ExitStack() as stack:
            clients = [stack.enter_context(self._client()) for _ in range(2 * CLIENTS)]
            works = [put_all, get_all] * CLIENTS
            pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
            began = time.perf_counter()
            for _ in pool.map(lambda work, client: work(client, batches), works, clients):
                pass  # which raises what one of them raised
            return (time.perf_counter() - began) * count / (batches * BATCH * CLIENTS)

    def _client(self) -> QueueClient:
        return QueueClient(DatagramLink("queue", HOST, self._port), is_reliable=True)

    def processor_of(self, carry: Callable[[int], float], count: int) -> float:
        """Return the server's processor time for messages that pass."""
        before = self._processor()
        carry(count)
        return self._processor() - before

    def _processor(self) -> float:
        self._told.send(True)
        seconds: float = self._told.recv()
        return seconds

    def _ask(self, request: bytes, count: int) -> None:
        """Ask so often, with a window of requests under way."""
        sent = answered = 0
        while answered < count:
            room = min(WINDOW - (sent - answered), count - sent)
            if room >= WINDOW // 4 or sent + room == count:
                sent += self._socket.send([(request, None)] * room)
            answers = len(self._socket.receive(timeout=PATIENCE).whole)
            if not answers:
                sys.exit(f"{sent - answered} datagrams were lost on loopback")
            answered += answers

    def close(self) -> None:
        self._told.send(False)
        self._socket.close()


def put_all(writer: QueueClient, batches: int) -> None:
    messages = [b"m" * SIZE] * BATCH
    for _ in range(batches):
        writer.put(messages)


def get_all(reader: QueueClient, batches: int) -> None:
    left = batches * BATCH
    while left:
        tags, messages = reader.get(min(left, BATCH), PATIENCE)
        if messages:
            reader.ack(tags)
        left -= len(messages)


@contextmanager
def queue(serve: Callable[[Connection], None]) -> Iterator[Client]:
    """Start a server in a process of its own, and give what asks it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    process.start()
    client = Client(ours.recv(), ours)
    yield client
    client.close()
    process.join(10)
    process.terminate()


if __name__ == "__main__":
    main()
