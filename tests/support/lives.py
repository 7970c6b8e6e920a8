"""How are processes started in milliseconds, and ended at any moment?

A server imports everything once and forks a process for each that is asked for. What a process
saw and did it appends to a file, which is whole whenever it is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support.peer import hear, say
from support.processes import Peer
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Life", "Lives", "Outcome", "Report", "Reporter", "serve", "until"]

_TESTS = Path(__file__).parents[1]
_RECORD = struct.Struct("<c3xIQQ")


class Outcome(NamedTuple):
    """How a process ended."""

    killed: bool
    #: Its exit code, if it was not killed.
    code: int | None


class Lives(Peer):
    """A server of processes that run the operations of one module."""

    def __init__(self, module: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_TESTS))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"},
        )
        assert self.hear()["ready"]

    def start(self, operation: str, /, **arguments: object) -> Life:
        pid: int = self.ask(start=operation, arguments=arguments)["pid"]
        return Life(self, pid)

    def ask(self, **fields: object) -> dict[str, Any]:
        self.say(json.dumps(fields))
        return self.hear()


class Life:
    """One process of a server."""

    def __init__(self, lives: Lives, pid: int) -> None:
        self._lives = lives
        self.pid = pid
        self._outcome: Outcome | None = None

    def ended(self, timeout: float = 0) -> Outcome | None:
        """Wait for its end; None: it lives."""
        if self._outcome is None:
            answer = self._lives.ask(wait=self.pid, timeout=timeout)
            self._outcome = Outcome(**answer) if answer else None
        return self._outcome

    def end(self, timeout: float = 60) -> Outcome:
        """Wait for its end, which has to come."""
        outcome = self.ended(timeout)
        assert outcome is not None, f"process {self.pid} did not end within {timeout} s"
        return outcome

    def kill(self) -> Outcome:
        """Kill it with SIGKILL, and wait until it is gone."""
        if self._outcome is None:
            os.kill(self.pid, signal.SIGKILL)  # a zombie keeps its pid until it is waited for
        return self.end()


class Reporter:
    """Appends to a report, in one system call each time."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def add(self, kind: bytes, who: int, first: int, last: int) -> None:
        self.add_all([(kind, who, first, last)])

    def add_all(self, records: Iterable[tuple[bytes, int, int, int]]) -> None:
        os.write(self._file, b"".join(_RECORD.pack(*record) for record in records))


class Report:
    """What a process reported, up to now."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def records(self, kind: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield the three numbers of each record of that kind."""
        try:
            data = Path(self.path).read_bytes()
        except FileNotFoundError:
            return
        whole = len(data) // _RECORD.size * _RECORD.size
        for found, *numbers in _RECORD.iter_unpack(data[:whole]):
            if found == kind:
                yield tuple(numbers)

    def wait_for(self, kind: bytes, timeout: float = 30) -> tuple[int, int, int]:
        """Return the first record of that kind, when it is there."""
        return until(lambda: next(self.records(kind), None), timeout)


# --- the server -------------------------------------------------------------------------------


def serve(
    operations: Mapping[str, Callable[..., None]],
    imports: Iterable[str],
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Fork a process for each one that is asked for; `prepare` runs in it before its operation."""
    for name in imports:
        importlib.import_module(name)
    say(ready=True)
    while line := hear():
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                _live(operations, request["start"], request["arguments"], prepare)
            say(pid=pid)
        else:
            say(**_wait(request["wait"], request["timeout"]))


def _live(
    operations: Mapping[str, Callable[..., None]],
    operation: str,
    arguments: dict[str, Any],
    prepare: Callable[[dict[str, Any]], None] | None,
) -> None:
    try:
        os.close(0)
        if prepare is not None:
            prepare(arguments)
        operations[operation](**arguments)
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _wait(pid: int, timeout: float) -> dict[str, object]:
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            killed = os.WIFSIGNALED(status)
            return {"killed": killed, "code": None if killed else os.WEXITSTATUS(status)}
        if time.monotonic() >= deadline:
            return {}
        time.sleep(0.001)
