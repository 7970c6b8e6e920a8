"""A data map in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator

from cli.command import PENSTOCK


class MapProcess:
    """`penstock serve datamapper` on any free port."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [PENSTOCK, "serve", "datamapper", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        found = re.search(r":(\d+):", self.greeting)
        self.output = self.errors = ""
        if found is None:
            self.end()
        assert found is not None, self.errors
        self.port = int(found[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it as a person would, and return its exit code."""
        self.process.send_signal(number)
        self.output, self.errors = self.process.communicate(timeout=30)
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if not self.errors:
            self.output, self.errors = self.process.communicate(timeout=30)


@contextlib.contextmanager
def map_process(*arguments: str) -> Iterator[MapProcess]:
    server = MapProcess(*arguments)
    try:
        yield server
    finally:
        with contextlib.suppress(ValueError):  # it was stopped, and its pipes are closed
            server.end()
