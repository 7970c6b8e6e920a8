"""What does a way to pass messages offer, to be compared with others?"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peers.tally import Taker

__all__ = [
    "BUFFER",
    "FILE",
    "MEMORY",
    "PATIENCE",
    "Case",
    "Receiver",
    "Scratch",
    "Sender",
    "Way",
    "free_port",
    "library",
    "not_installed",
    "send_each",
    "version_of",
]

_T = TypeVar("_T")

FILE, MEMORY = "file", "/dev/shm"

#: Bytes that may be under way: no more than half of a usual L3 cache, for everybody who has a
#: say in it.
BUFFER = 16 << 20

#: A reader that gets nothing for so long (seconds) gives up: something was lost.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is passed in one run."""

    size: int
    readers: int = 1

    @property
    def depth(self) -> int:
        """How many messages may be under way, for those who count them."""
        return max(4, min(BUFFER // self.size, 4096))


class Scratch:
    """Places that a run may use; all of them go with the comparison."""

    def __init__(self, file: Path, memory: Path) -> None:
        self._roots = {FILE: file, MEMORY: memory}
        self._numbers = count()

    def directory(self, storage: str) -> Path:
        """Make a new directory in a file system or in memory."""
        path = self._roots[storage] / f"run-{next(self._numbers)}"
        path.mkdir()
        return path

    def name(self) -> str:
        """Return a name that no other run, here or elsewhere, has."""
        return f"penstock-bench-{self._roots[FILE].name}-{next(self._numbers)}"


class Sender(ABC):
    """The writing end, in a process of its own."""

    def wait_for_readers(self, readers: int) -> None:  # noqa: B027 - most need not
        """Return when so many readers will get what is sent from now on."""

    @abstractmethod
    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        """Send all payloads, again and again, until the time is over; return how many."""

    @abstractmethod
    def send(self, payload: bytes) -> None:
        """Send one at once, and whatever may still be held back."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back but their process
        """Give everything back."""


class Receiver(ABC):
    """The reading end, in a process of its own."""

    @abstractmethod
    def take_all(self, taker: Taker) -> None:
        """Hand over messages up to the last one, or until none came for a while."""

    def close(self) -> None:  # noqa: B027 - as above
        """Give everything back."""


@dataclass(frozen=True)
class Way(ABC):
    """One way to pass messages. It is sent to the processes that use it."""

    name: str
    #: Where messages are while they wait: a file, memory, or a connection.
    storage: str

    @property
    def label(self) -> str:
        return f"{self.name}, {self.storage}"

    def missing(self) -> str | None:
        """Say what this machine lacks for it, or None."""
        return None

    def version(self) -> str:
        """Say what was measured."""
        return ""

    @abstractmethod
    def address(self, scratch: Scratch) -> str:
        """Find a new place where the two ends of one run meet."""

    @abstractmethod
    def open_writer(self, address: str, case: Case) -> Sender:
        """Open the writing end. It is there before any reader is."""

    @abstractmethod
    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        """Open the reading end that has this number."""

    def clean_up(self, address: str) -> None:  # noqa: B027 - most leave nothing
        """Remove what the two ends left at that address."""


def send_each(send: Callable[[_T], object], items: Sequence[_T], seconds: float) -> int:
    """Call `send` with one item after the other until the time is over; return how many."""
    sent = 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for item in items:
            send(item)
        sent += len(items)
    return sent


def library(name: str) -> Any:
    """Import a peer's library, only in the process that uses it."""
    return import_module(name)


def not_installed(module: str, package: str) -> str | None:
    """Say that a library is not there, or None if it is."""
    return None if find_spec(module) else f"not installed: {package}"


def version_of(package: str) -> str:
    """Name a library and its version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def free_port() -> int:
    """Find a port on the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
