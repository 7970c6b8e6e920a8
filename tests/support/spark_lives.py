"""The driver programs of Spark that tests kill: how they run, and how they are started.

`python -m support.spark_lives NAME JSON` runs one of them. Each prints a JSON object on a line for
what happens: a query has started, a batch is done, all is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.pipeline.run import java
from support.exactly_once import hashed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = [
    "KEPT",
    "Program",
    "Programs",
    "alone",
    "connecting",
    "copying",
    "environment",
    "kill_session",
    "programs",
    "running",
    "session_of",
]

#: Where a program that is alone finds what it is to keep.
KEPT: Final = "/mnt"
_TESTS: Final = str(Path(__file__).parents[1])
#: These JVMs live for seconds: what pays off after minutes only takes cores from the others.
_SHORT_LIVED: Final = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {java.options()}"


def environment() -> dict[str, str]:
    """Return what Spark's processes need: this Python, the loopback, and these tests."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _TESTS)))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # its port is not ours to choose
        "JDK_JAVA_OPTIONS": _SHORT_LIVED,
    }


class Program:
    """A program and all that it starts: a session of processes of its own."""

    def __init__(self, command: Sequence[str], errors: Path, folder: Path | None = None) -> None:
        self._errors = errors
        with errors.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment(),
                cwd=folder,
                start_new_session=True,
                text=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def hear(self, timeout: float = 200) -> dict[str, Any] | None:
        """Return what it says next; None when it has ended well."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"nothing for {timeout} s; {self.errors()}") from None
        if line:
            said: dict[str, Any] = json.loads(line)
            return said
        code = self.process.wait(60)
        assert code == 0, f"it ended with {code}; {self.errors()}"
        return None

    def until(self, **wanted: object) -> dict[str, Any]:
        """Return the next of what it says that has these fields."""
        while (said := self.hear()) is not None:
            if wanted.items() <= said.items():
                return said
        raise AssertionError(f"it ended before it said {wanted}")

    def wait(self) -> list[dict[str, Any]]:
        """Let it come to its end, and return all that it says."""
        said = []
        while (one := self.hear()) is not None:
            said.append(one)
        return said

    def kill(self) -> None:
        """End the driver and its JVM at once; tasks notice that they are alone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        """End all that is left of it."""
        until = time.monotonic() + 20
        while kill_session(self.process.pid) and time.monotonic() < until:
            self.process.poll()
            time.sleep(0.05)
        self.process.wait(10)

    def logged(self, pattern: str, timeout: float = 120) -> str:
        """Wait for something in its log, and return the group of the pattern."""
        until = time.monotonic() + timeout
        while (found := re.search(pattern, self._errors.read_text(errors="replace"))) is None:
            assert self.process.poll() is None, f"it ended; {self.errors()}"
            assert time.monotonic() < until, f"no {pattern} in {timeout} s; {self.errors()}"
            time.sleep(0.05)
        return found[1]

    def errors(self) -> str:
        """Return the end of what it wrote to its standard error."""
        return self._errors.read_text(errors="replace")[-4000:]


def session_of(leader: int) -> list[int]:
    """Return the processes that a program has started, itself included, as far as they live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in brackets may have spaces in it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def kill_session(leader: int) -> bool:
    """Kill the processes that a program has started, itself included; tell whether some lived."""
    left = session_of(leader)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)
    return bool(left)


class Programs:
    """All programs of a test; none outlives it."""

    def __init__(self) -> None:
        self._started: list[Program] = []

    def add(self, program: Program) -> Program:
        self._started.append(program)
        return program

    def end(self) -> None:
        for program in self._started:
            program.end()


@contextlib.contextmanager
def programs() -> Iterator[Programs]:
    started = Programs()
    try:
        yield started
    finally:
        started.end()


def alone(keep: Path | None = None) -> list[str]:
    """Return what a command begins with that has a temporary directory which nobody else sees.

    :param keep: a folder that it finds at `KEPT`, and that is left when it ends
    """
    steps = [f"mount -t tmpfs none {tempfile.gettempdir()}", "cd /", 'exec "$@"']
    if keep is not None:
        steps.insert(0, f"mount --bind {keep} {KEPT}")
    own = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    return [*own, "--propagation", "private", "sh", "-c", " && ".join(steps), "sh"]


def copying(errors: Path, before: Sequence[str] = (), **arguments: object) -> Program:
    """Start a program of `readStream.format("penstock")` and `writeStream.format("penstock")`."""
    return _start("copy", errors, arguments, before)


def _start(
    name: str, errors: Path, arguments: Mapping[str, object], before: Sequence[str] = ()
) -> Program:
    command = [sys.executable, "-m", "support.spark_lives", name, json.dumps(arguments)]
    return Program([*before, *command], errors, errors.parent)


def connecting(errors: Path, **arguments: object) -> Program:
    """Start a client of a Spark Connect server that reads and writes streams."""
    return _start("over_connect", errors, arguments)


def running(errors: Path, file: Path, *options: str) -> Program:
    """Start `penstock run FILE`."""
    penstock = str(Path(sys.executable).with_name("penstock"))
    command = [penstock, "run", str(file), "--progress", "json", *options]
    return Program(command, errors, errors.parent)


# --- in the process ---------------------------------------------------------------------------


def copy(
    source: str,
    target: str,
    checkpoint: str,
    total: int,
    per_batch: int,
    master: str = "local[2]",
    settings: Mapping[str, str] | None = None,
) -> None:
    """Copy messages batch after batch, until so many have been read."""
    from penstock.pipeline.run.spark import spark_session

    spark = spark_session("copy", master, checkpoint, settings)
    limits = {"maxOffsetsPerTrigger": per_batch, "minPartitions": 2}
    rows = spark.readStream.format("penstock").options(url=source, **limits).load()
    writing = hashed(rows).select("payload").writeStream.format("penstock")
    writing = writing.options(url=target, checkpointLocation=checkpoint)
    _say(event="progress", state="starting")
    _follow(writing, source, total)
    spark.stop()


def over_connect(remote: str, source: str, target: str, copied: str, checkpoint: str) -> None:
    """Read a stream and write two: as it is followed, and as it is."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(remote).getOrCreate()
    # Nothing is registered: the server finds the format by itself.
    table = spark.read.format("penstock").option("url", source).load()
    _say(event="read", rows=table.count(), columns=table.columns)
    query = (
        hashed(spark.readStream.format("penstock").option("url", source).load())
        .select("payload")
        .writeStream.format("penstock")
        .options(url=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    _say(event="followed", batches=len(query.recentProgress))
    table.select("payload").write.format("penstock").mode("append").option("url", copied).save()
    _say(event="end")
    spark.stop()


def _follow(writing: DataStreamWriter, source: str, total: int) -> None:
    """Tell of each batch, and stop the query when all is done."""
    query = writing.start()
    last, end = -1, 0
    while end < total:
        if not query.isActive:
            failure = str(query.exception())
            if "failed to connect back" not in failure:  # in 10 s: the machine is busy
                raise AssertionError(failure)
            query = writing.start()
        time.sleep(0.05)
        for progress in query.recentProgress:
            if progress.batchId > last and "addBatch" in progress.durationMs:
                last = progress.batchId
                end = json.loads(progress.sources[0].endOffset)[source]["end"]
                seconds = progress.durationMs["triggerExecution"] / 1000
                _say(event="progress", state="running", batch=last, end=end, batch_seconds=seconds)
    query.stop()
    _say(event="end")


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, arguments = sys.argv[1:]
    known: dict[str, Callable[..., None]] = {"copy": copy, "over_connect": over_connect}
    known[name](**json.loads(arguments))


if __name__ == "__main__":
    main()
