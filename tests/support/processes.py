"""How does a test talk to a process of its own?"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.queue.classic import sysv

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Peer", "peers", "shared_memory_path"]

_TESTS = str(Path(__file__).parents[1])
_PATH = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _TESTS)))


class Peer:
    """A process that runs one command of `support.peer`."""

    def __init__(self, command: str, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.peer", command, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _PATH, "PYTHONWARNINGS": "error"},
        )

    def hear(self) -> dict[str, Any]:
        """Return its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Peers:
    """All processes of one test; none outlives it."""

    def __init__(self) -> None:
        self._running: list[Peer] = []

    def start(self, command: str, **arguments: object) -> Peer:
        peer = Peer(command, **arguments)
        self._running.append(peer)
        return peer

    def end(self) -> None:
        for peer in self._running:
            peer.end()


@contextlib.contextmanager
def peers() -> Iterator[Peers]:
    running = Peers()
    try:
        yield running
    finally:
        running.end()


@contextlib.contextmanager
def shared_memory_path(directory: Path) -> Iterator[str]:
    """Yield the path of a shared-memory queue with a key of its own; remove it afterwards."""
    key = _free_key()
    try:
        yield str(directory / f"shmem_{key}")
    finally:
        for id in (sysv.find(key), sysv.find(key + 1)):
            if id is not None:
                sysv.remove(id)


def _free_key() -> int:
    while True:
        key = random.SystemRandom().randrange(1 << 20, 1 << 30)
        if sysv.find(key) is None and sysv.find(key + 1) is None:
            return key
