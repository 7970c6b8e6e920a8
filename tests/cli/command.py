"""Running the command as scripts do, and filling a queue for it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock import NotFound, open_reader, open_writer
from penstock.core.interfaces import Closable

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


def run(
    *arguments: str, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PENSTOCK, *arguments],
        input=stdin,
        capture_output=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **environment},
    )


def count(url: str) -> int:
    """Return how many messages are in a stream; 0 if it is not there."""
    try:
        with open_reader(url) as reader:
            return len(list(reader.available()))
    except NotFound:
        return 0


class OnTerminal(Closable):
    """The command as a person runs it, and what the terminal got of it so far."""

    def __init__(self, *arguments: str) -> None:
        self.seen = b""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [PENSTOCK, *arguments],
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
        )
        os.close(theirs)

    def read(self) -> bool:
        """Wait for more of it; False: that was all."""
        try:
            self.seen += os.read(self._ours, 65536)
        except OSError:  # a terminal ends so
            return False
        return True

    def read_until(self, text: bytes, times: int = 1) -> None:
        while self.seen.count(text) < times:
            assert self.read(), self.seen

    def exit_code(self) -> int:
        """Read all that it says, up to its end."""
        while self.read():
            pass
        return self.process.wait(20)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        os.close(self._ours)


def json_lines(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def fill(url: str, count: int) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"message %d" % i for i in range(count)], type=1)
