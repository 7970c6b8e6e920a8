"""A queue server in this process or another, and a bare client that asks it."""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
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
