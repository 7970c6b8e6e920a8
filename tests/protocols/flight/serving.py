"""A Flight server of a test's own, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock.protocols.flight import ServerOptions
from penstock.protocols.flight.server import FlightServer
from support.mosquitto import free_port

TOKEN = "a-secret-that-is-long"
PENSTOCK = str(Path(sys.executable).with_name("penstock"))


@contextlib.contextmanager
def served(root: Path, **options: object) -> Iterator[FlightServer]:
    """Serve a directory from this process."""
    checked = ServerOptions.model_validate({"root": root, "port": 0, **options})
    with FlightServer(checked) as server:
        yield server


class ServerProcess:
    """`penstock serve flight`, which can be killed and started again at the same port."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self._root = root
        self._arguments = arguments
        self.port = free_port()
        self.url = ""
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                PENSTOCK, "serve", "flight", "--root", str(self._root), "--port", str(self.port),
                *self._arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r"at (flight\S*://\S+:(\d+)/)", line)
        assert found, self.end()
        self.url, self.port = found[1], int(found[2])

    def kill(self) -> None:
        """End it as a power failure would."""
        self.process.kill()
        self.end()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Ask it to stop; return its exit code and what it said."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=20)
        return self.process.returncode, output.decode(), errors.decode()


@contextlib.contextmanager
def server_process(root: Path, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(root, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


class Wire:
    """Carries connections to a port, and can be cut or kept from carrying answers."""

    def __init__(self, port: int, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = port
        self._listener = socket.create_server(at)
        self._host = at[0]
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._is_open = True
        self.answers = threading.Event()
        self.answers.set()
        self.connections = 0
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def url(self, stream: str) -> str:
        return f"flight://{self._host}:{self.port}/{stream}"

    def _carry(self) -> None:
        while self._is_open:
            with self._lock:
                ends = dict(self._pairs) | {b: a for a, b in self._pairs}
                from_server = {b for _, b in self._pairs}
            watched = [s for s in ends if self.answers.is_set() or s not in from_server]
            try:
                ready, _, _ = select.select([self._listener, *watched], [], [], 0.02)
            except (OSError, ValueError):
                continue  # one was cut meanwhile
            for each in ready:
                if each is self._listener:
                    self._connect()
                else:
                    self._pass_on(each, ends[each])

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        self.connections += 1
        with self._lock:
            self._pairs.append((client, server))

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop([pair for pair in self._pairs if source in pair])

    def cut(self) -> None:
        """Cut all connections."""
        self._drop(list(self._pairs))

    def _drop(self, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
        with self._lock:
            for pair in pairs:
                if pair in self._pairs:
                    self._pairs.remove(pair)
        for pair in pairs:
            for end in pair:
                end.close()

    def close(self) -> None:
        self._is_open = False
        self._thread.join(5)
        self.cut()
        self._listener.close()


@contextlib.contextmanager
def wires_to(server: FlightServer) -> Iterator[tuple[Wire, Wire]]:
    """Carry both ports of a server, under the same numbers, to another address."""
    assert server.bulk_port is not None
    host = "127.0.0.2"
    wire = Wire(server.port, (host, server.port))
    bulk = Wire(server.bulk_port, (host, server.bulk_port))
    try:
        yield wire, bulk
    finally:
        wire.close()
        bulk.close()


@contextlib.contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()
