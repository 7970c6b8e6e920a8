"""A process that has no descriptor left, and what it costs meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_seconds", "many_descriptors", "open_descriptors", "starved"]


def open_descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Have this process open so many that new ones are above 1,023, where `select` ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def cpu_seconds(pid: int) -> float:
    """Return what a process has used of a core so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _settled_descriptors(pid: int) -> set[int]:
    """Return those that it has once it opens and closes none for a while."""
    found, since = open_descriptors(pid), time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.02)
        now = open_descriptors(pid)
        if now != found:
            found, since = now, time.monotonic()
    return found


@contextlib.contextmanager
def starved(pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open no descriptor but a few, from what it has now on; then as before."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = _settled_descriptors(pid)
    free = (number for number in itertools.count() if number not in taken)
    lowest = next(itertools.islice(free, spare, None))  # numbers below it are given out
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
