"""psi's own programs, where PENSTOCK_PSI names the folder that holds `run`."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.mosquitto import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Driver", "driver", "free_port", "needs_psi"]

_FOLDER = os.environ.get("PENSTOCK_PSI")

needs_psi = pytest.mark.skipif(_FOLDER is None, reason="PENSTOCK_PSI names no folder with psi")


class Driver:
    """A program of psi that runs: its lines come as they are printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        #: All that it has printed so far.
        self.lines: list[str] = []
        self._coming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, start: str, timeout: float = 30.0, count: int = 1) -> list[str]:
        """Return so many lines that begin with a word, as soon as they are there."""
        deadline = time.monotonic() + timeout
        while len(found := [line for line in self.lines if line.startswith(start)]) < count:
            try:
                line = self._coming.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                tail = "\n".join(self.lines[-30:])
                raise AssertionError(f"{len(found)} of {count} lines with {start!r} in:\n{tail}")
            self.lines.append(line)
        return found

    def finish(self, timeout: float = 60.0) -> list[str]:
        """Wait for its end, and return all lines."""
        self.process.wait(timeout)
        while (line := self._coming.get(timeout=10)) is not None:
            self.lines.append(line)
        return self.lines


@contextlib.contextmanager
def driver(*arguments: object) -> Iterator[Driver]:
    """Run one of psi's programs, and end it."""
    assert _FOLDER is not None
    # There it marks its stores in memory by their names: two of them are of two programs.
    own = tempfile.mkdtemp(prefix="psi-")
    process = subprocess.Popen(
        [str(Path(_FOLDER) / "run"), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": own},
    )
    try:
        yield Driver(process)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(own, ignore_errors=True)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
