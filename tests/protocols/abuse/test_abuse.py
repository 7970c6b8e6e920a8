"""Whatever clients do to a server, a good one is answered within a second.

The same for every server: nothing is special about one of them. `make test-full` has it at full
size.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocols.abuse.servers import SUBJECTS, Running, running
from support.descriptors import cpu_seconds, starved
from support.until import until

#: Megabytes that abuse may cost, and threads beside those of the clients that have spoken.
MEMORY = 48.0
THREADS = 12
#: A server that is told to stop has ended by then (seconds), whatever it is doing.
DEADLINE = 12.0

COUNTS = [
    pytest.param(60, id="few"),
    pytest.param(1000, id="many", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=sorted(SUBJECTS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp(request.param)
    with running(SUBJECTS[request.param], folder) as server:
        yield server
        said = server.said()
        assert "Traceback" not in said
        assert len(said) < 10_000, "clients fill its log"


@pytest.fixture(params=sorted(SUBJECTS))
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """One that is not used for anything else."""
    with running(SUBJECTS[request.param], tmp_path) as server:
        yield server


def is_answered(server: Running) -> None:
    """Have a good client answered within a second, in the best of three: others use the machine."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        server.ask()
        took.append(time.monotonic() - began)
        if took[-1] < 1:
            return
    pytest.fail(f"answers took {took} seconds")


@contextlib.contextmanager
def connected(server: Running, count: int) -> Iterator[list[socket.socket]]:
    """Have some connections; a server may refuse those that are too many."""
    clients: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                clients.append(server.connect())
        yield clients
    finally:
        for client in clients:
            client.close()


@contextlib.contextmanager
def little_memory(server: Running) -> Iterator[None]:
    before = server.megabytes()
    yield
    assert server.megabytes() - before < MEMORY


def say(client: socket.socket, data: bytes) -> None:
    client.settimeout(0.2)
    with contextlib.suppress(OSError):  # it was cut off
        client.sendall(data)


@pytest.mark.parametrize("count", COUNTS)
def test_idle_connections_cost_no_thread_and_little_memory(server: Running, count: int) -> None:
    threads = server.threads()
    with little_memory(server), connected(server, count):
        is_answered(server)
        is_answered(server)
        assert server.threads() - threads < THREADS


@pytest.mark.parametrize("count", COUNTS)
def test_bytes_that_come_one_by_one_hold_up_nobody(server: Running, count: int) -> None:
    with little_memory(server), connected(server, min(count, 200)) as clients:
        began = time.monotonic()
        request = server.subject.request
        for at in range(8):
            for client in clients:
                say(client, request[at : at + 1])
            is_answered(server)
            if time.monotonic() - began > 5:
                break


@pytest.mark.parametrize("count", COUNTS)
def test_garbage_is_refused(server: Running, count: int) -> None:
    rng = random.Random(count)
    with little_memory(server):
        for _ in range(count // 20):
            with connected(server, 20) as clients:
                for client in clients:
                    say(client, rng.randbytes(rng.choice([1, 7, 100, 5000])))
            is_answered(server)


@pytest.mark.parametrize("count", COUNTS)
def test_a_length_that_is_too_large_reserves_nothing(server: Running, count: int) -> None:
    with little_memory(server), connected(server, min(count, 200)) as clients:
        for client in clients:
            say(client, server.subject.huge)
        is_answered(server)


@pytest.mark.parametrize("count", COUNTS)
def test_half_open_connections_are_given_back(server: Running, count: int) -> None:
    """Half a request and the end of it, and clients whose machine is reset."""
    before = server.descriptors()
    reset = struct.pack("ii", 1, 0)
    for _ in range(count // 20):
        with connected(server, 20) as clients:
            for number, client in enumerate(clients):
                say(client, server.subject.request[: -1 if number % 2 else None])
                with contextlib.suppress(OSError):
                    if number % 3:
                        client.shutdown(socket.SHUT_WR)
                    elif client.family == socket.AF_INET:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        is_answered(server)
    deadline = time.monotonic() + 20
    while server.descriptors() > before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("count", COUNTS)
def test_without_descriptors_who_says_nothing_makes_room_for_who_does(
    server: Running, count: int
) -> None:
    pid = server.process.pid
    with starved(pid, spare=24), connected(server, min(count, 60)):
        if server.subject.has_others:
            time.sleep(0.5)  # by then there is room
        is_answered(server)
        began = cpu_seconds(pid)
        time.sleep(0.5)
        assert cpu_seconds(pid) - began < 0.4
        is_answered(server)
    is_answered(server)


@pytest.mark.parametrize("count", COUNTS)
def test_a_busy_server_that_is_told_to_stop_ends_in_time(fresh: Running, count: int) -> None:
    is_over = threading.Event()
    answers: list[float] = []

    def work() -> None:
        while not is_over.is_set():
            with contextlib.suppress(Exception):  # it is told to stop meanwhile
                fresh.ask()
                answers.append(time.monotonic())

    with connected(fresh, min(count, 200)) as clients, ThreadPoolExecutor(8) as pool:
        for client in clients[::2]:
            say(client, fresh.subject.request[:-1])
        for _ in range(8):
            pool.submit(work)
        until(lambda: len(answers) > 8)
        began = time.monotonic()
        try:
            fresh.terminate(DEADLINE)
        finally:
            is_over.set()
        assert time.monotonic() - began < DEADLINE
    assert "Traceback" not in fresh.said()
