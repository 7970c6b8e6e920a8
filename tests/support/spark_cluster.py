"""A real Spark cluster, and a real Spark Connect server, on the loopback of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark

from support.spark_lives import Program, alone, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Cluster", "cluster", "connect_server"]

_BIN: Final = Path(pyspark.__file__).parent / "bin"
_EXECUTOR: Final = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_HOST: Final = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


class Cluster:
    """A master and workers of one core each, in processes of their own.

    Apart: each worker has a temporary directory that nobody else sees, as on a machine of its own.
    """

    def __init__(self, folder: Path, *, apart: bool = False) -> None:
        self._folder = folder
        self._is_apart = apart
        self._all: list[Program] = []
        self._workers: list[Program] = []
        master = self._start("master.Master", "master", *_HOST)
        self.url = master.logged(r"Starting Spark master at (spark://\S+)")

    def add_workers(self, count: int = 1) -> None:
        new = []
        for _ in range(count):
            name = f"worker-{len(self._all)}"
            folder = Path(tempfile.gettempdir()) if self._is_apart else self._folder
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / name))
            before = alone() if self._is_apart else ()
            new.append(self._start("worker.Worker", name, *_HOST, *limits, self.url, before=before))
        for worker in new:
            worker.logged(r"(Successfully registered with master)")
        self._workers += new

    def _start(self, what: str, name: str, *arguments: str, before: Sequence[str] = ()) -> Program:
        command = [*before, str(_BIN / "spark-class"), f"org.apache.spark.deploy.{what}"]
        command += arguments
        program = Program(command, self._folder / f"{name}.log", self._folder)
        self._all.append(program)
        return program

    def executors(self) -> list[int]:
        """Return the processes in which tasks run now."""
        found = []
        for worker in self._workers:
            for pid in session_of(worker.process.pid):
                with contextlib.suppress(OSError):
                    if _EXECUTOR in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append(pid)
        return found

    def wait_for_executors(self, count: int) -> list[int]:
        until = time.monotonic() + 120
        while len(found := self.executors()) < count:
            assert time.monotonic() < until, f"there are only {len(found)} executors"
            time.sleep(0.05)
        return found

    def kill_executor(self) -> None:
        os.kill(self.executors()[0], signal.SIGKILL)

    def kill_worker(self) -> None:
        """Kill a worker, and the executor that it has."""
        self._workers.pop().kill()

    def end(self) -> None:
        for program in reversed(self._all):
            program.end()

    def logs(self) -> str:
        return "\n".join(program.errors() for program in self._all)


@contextlib.contextmanager
def cluster(folder: Path, workers: int = 2, *, apart: bool = False) -> Iterator[Cluster]:
    """Start a cluster, and end it."""
    made = Cluster(folder, apart=apart)
    try:
        made.add_workers(workers)
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Start a Spark Connect server, yield the URL for its clients, and end it."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    command = [str(_BIN / "spark-submit"), "--master", "local[2]"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    server = Program([*command, "spark-internal"], folder / "connect.log", folder)
    try:
        address = server.logged(r"Spark Connect server started at: (\S+)")
        yield f"sc://{address}"
    finally:
        server.end()
