"""A queue server in this process or another, and a bare client that asks it."""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from penstock.protocols.lhhttt import decode_bytes, encode_bytes
from penstock.protocols.lhhttt.queue import QueueStatistics
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions

HOST = "127.0.0.1"
#: Seconds after which a queue that does not answer is silent.
SILENCE = 0.4
PATIENCE = 20.0


@contextmanager
def served(**options: Any) -> Iterator[LhhtttServer]:
    with LhhtttServer(ServerOptions(port=0, **options)) as server:
        yield server


class Asker:
    """A program that knows the framing and nothing else."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.connect((HOST, port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, command: bytes) -> None:
        self.socket.send(encode_bytes(command))

    def ask(self, command: bytes) -> bytes:
        self.send(command)
        return self.answer()

    def answer(self) -> bytes:
        assert select.select([self.socket], [], [], PATIENCE)[0], "no answer"
        return decode_bytes(self.socket.recv(1 << 16))

    def is_silent(self, seconds: float = SILENCE) -> bool:
        return not select.select([self.socket], [], [], seconds)[0]


class StreamAsker(Asker):
    """The same by TCP, for answers that come in one piece."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port))


def assert_balanced(books: QueueStatistics) -> None:
    """Make sure that every command and every message is in one count."""
    assert books.commands == (
        books.puts + books.gets + books.sizes + books.reliable + books.unknown
    ), books
    gone = books.taken + books.acked + books.dead + books.lost + books.held
    not_stored = sum(books.refused.values()) + sum(books.dropped.values()) + books.repeated
    assert books.recovered + books.offered == gone + not_stored, books


@contextmanager
def served_elsewhere(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve by the command, in a process of its own; yield it and its port."""
    penstock = str(Path(sys.executable).with_name("penstock"))
    command = [penstock, "serve", "lhhttt", "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        assert found is not None
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE)


class Prototype:
    """A queue that knows the prototype's verbs, answers when it is told to, and nothing else."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((HOST, 0))
        self.port: int = self.socket.getsockname()[1]
        self.messages: list[bytes] = []
        #: Answers to the next so many of GET come when the one behind them is asked; those to so
        #: many before them come at once.
        self.late = self.prompt = 0
        #: Every answer comes once more when the next one is asked for.
        self.doubles = False
        self._held: list[tuple[bytes, Any]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"lhhttt://{HOST}:{self.port}"

    def _serve(self) -> None:
        while True:
            datagram, peer = self.socket.recvfrom(1 << 16)
            if not datagram:
                return
            verb, _, rest = decode_bytes(datagram).partition(b":")
            for held in self._held:
                self.socket.sendto(*held)
            self._held = []
            if verb == b"PUT":
                self.messages.append(rest)
                answer = b"PUT %d bytes" % len(rest.decode())
            elif verb == b"GET":
                answer = self.messages.pop(0) if self.messages else b""
                if self.prompt:
                    self.prompt -= 1
                elif self.late:
                    self.late -= 1
                    self._held.append((encode_bytes(answer), peer))
                    continue
            elif verb == b"SIZE":
                answer = b"%d" % len(self.messages)
            else:
                continue
            self.socket.sendto(encode_bytes(answer), peer)
            if self.doubles:
                self._held.append((encode_bytes(answer), peer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", (HOST, self.port))
        self._thread.join(PATIENCE)
        self.socket.close()
