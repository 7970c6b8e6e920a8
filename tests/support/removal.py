"""A writer in a process of its own, whose stream is removed while it writes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["BEFORE", "COUNT", "RemovedWriter", "removed_writer"]

#: Messages before the stream is removed, and in all.
BEFORE = 500
COUNT = 1500

_WRITER = """
import sys, time
from penstock import open_writer
url, before, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open_writer(url) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(count):
        writer.write(b"message %d" % i)
        if i + 1 == before:
            print("half", flush=True)
            sys.stdin.readline()
        elif i >= before and i % 10 == 0:
            time.sleep(0.022)
    print("done", flush=True)
    sys.stdin.readline()
"""


class RemovedWriter:
    """Writes some messages, and the rest when its stream was removed: into that, and a new one."""

    def __init__(self, kind: str, path: Path) -> None:
        self.url = f"{kind}:{path}"
        self._path = path if kind == "log" else path.with_suffix(".fmq")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, self.url, str(BEFORE), str(COUNT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def _say(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def write_half(self) -> None:
        self._say()
        self._expect("half")

    def remove_and_write_the_rest(self) -> None:
        if self._path.is_dir():
            shutil.rmtree(self._path)
        else:
            self._path.unlink()
        self._say()
        self._expect("done")

    def close(self) -> None:
        if self._process.poll() is None:
            self._say()
        self._process.communicate(timeout=20)


@contextlib.contextmanager
def removed_writer(kind: str, path: Path) -> Iterator[RemovedWriter]:
    with contextlib.closing(RemovedWriter(kind, path)) as writer:
        yield writer
