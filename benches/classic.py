"""How fast is the classic queue beside the system calls of LROSE's own?

python benches/classic.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import penstock
from harness import (
    Contestant,
    OwnProcess,
    Requirement,
    Result,
    build,
    file_system,
    machine,
    race,
    report,
    save,
)
from penstock.core.batch import batch_from_messages
from penstock.queue.classic import sysv

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

#: The same queue for everybody. With 1 KiB its slots run out first, with 64 KiB its buffer.
SLOTS = 10_000
BUFFER = 16 << 20

#: Messages handed over at a time by the batch forms.
WRITE_GROUP = 256
READ_GROUP = 1000

#: Sizes that are shown beside the one that is asked for.
OTHER_SIZES = (64, 64 << 10)

#: A process that kept a few bytes of each message would grow by more than this.
MOST_GROWTH = 2 << 20

FILE, MEMORY = "file", "shared memory"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    #: Seconds of one measurement.
    seconds: float
    sizes: tuple[int, ...]
    live_rounds: int
    #: Messages that pass through the process whose memory is watched.
    watched: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="below 15 s: a look, no measurement")
    parser.add_argument("--rounds", type=int, help="default: 5, or 3 with --quick")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a message")
    parser.add_argument("--directory", type=Path, help="for the queues; default: a temporary one")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    arguments = parser.parse_args()
    size: int = arguments.size
    plan = (
        Plan(arguments.rounds or 3, 0.06, (size,), 1, 200_000)
        if arguments.quick
        else Plan(arguments.rounds or 5, 0.3, (size, *OTHER_SIZES), 3, 1_000_000)
    )
    where = machine()
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory))
        where["file system"] = file_system(Path(directory))
        field = Field(Path(directory), build("lrose_syscalls.c"), cleanup)
        results = race(field.contestants(plan.sizes), plan.rounds, plan.seconds)
        field.check()
        results += field.live(size, results, plan)
        before, after = field.memory(size, plan.watched)
    requirements = [*speed_requirements(results, size), memory_requirement(before, after, plan)]
    title = f"Classic queue, {SLOTS:,} slots, {BUFFER >> 20} MiB, always full"
    report(title, where, results, requirements, "C")
    memory = {"messages": plan.watched, "rss_before": before, "rss_after": after}
    print(save(arguments.json, "classic", where, results, requirements, memory=memory))


def speed_requirements(results: list[Result], size: int) -> list[Requirement]:
    yardsticks = {
        "write()": "lock, three writes and unlock in C",
        f"write_many({WRITE_GROUP})": "lock, three writes and unlock in C",
        f"read_many({READ_GROUP})": "three reads in C",
        f"read_batch({READ_GROUP})": "three reads in C",
    }
    return [
        Requirement(
            f"{result.name} in a file, {size:,} B, at least as fast as {yardsticks[result.name]}",
            result.ratio >= 1,
            f"{result.ratio:.2f}x",
        )
        for result in results
        if result.name in yardsticks
        and (result.storage, result.size) == (FILE, size)
        and result.ratio is not None
    ]


def memory_requirement(before: int, after: int, plan: Plan) -> Requirement:
    return Requirement(
        f"memory does not grow with messages passed ({plan.watched:,} written and read)",
        after - before < MOST_GROWTH,
        f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after",
    )


class Field:
    """The queues of the contest, and those who write and read them."""

    def __init__(self, directory: Path, program: Path, cleanup: ExitStack) -> None:
        self._directory = directory
        self._program = program
        self._cleanup = cleanup
        #: Queues, and the payload that each must hold at the end.
        self._queues: list[tuple[str, bytes]] = []

    def contestants(self, sizes: tuple[int, ...]) -> list[Contestant]:
        found: list[Contestant] = []
        for size in sizes:
            directory = self._new_directory()
            self._queues.append((f"fmq:{directory}/queue", b"x" * size))
            lean = self._c("C: lock, 3 writes, unlock", "write", directory, size)
            found += [
                lean,
                self._c("C: LROSE's sequence", "write", directory, size, "--full", against=lean),
                *self._writing(FILE, size, lean),
            ]
            url = self._full_queue(FILE, size)
            directory = Path(url.removeprefix("fmq:")).parent
            reads = self._c("C: 3 reads", "read", directory, size)
            found += [
                reads,
                self._c("C: LROSE's seeks too", "read", directory, size, "--full", against=reads),
                *self._reading(FILE, size, url, reads),
            ]
            if size == sizes[0]:
                found += self._writing(MEMORY, size, lean)
                found += self._reading(MEMORY, size, self._full_queue(MEMORY, size), reads)
        return found

    def _c(
        self,
        name: str,
        mode: str,
        directory: Path,
        size: int,
        *flags: str,
        against: Contestant | None = None,
    ) -> Contestant:
        def run(count: int) -> float:
            numbers = map(str, (count, size, SLOTS, BUFFER))
            command = [str(self._program), mode, str(directory), *numbers, *flags]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            seconds: float = json.loads(done.stdout)["seconds"]
            return seconds

        return Contestant(name, FILE, size, run, against)

    def _writing(self, storage: str, size: int, against: Contestant) -> list[Contestant]:
        """Writers, each in a process and with a queue of its own."""
        return [
            self._penstock(name, storage, size, run, self._full_queue(storage, size), against)
            for name, run in (
                ("write()", write),
                (f"write_many({WRITE_GROUP})", write_many),
                (f"write_batch({WRITE_GROUP})", write_batch),
            )
        ]

    def _reading(self, storage: str, size: int, url: str, against: Contestant) -> list[Contestant]:
        """Readers, each in a process of its own, of one queue."""
        return [
            self._penstock(name, storage, size, run, url, against)
            for name, run in (
                ("read()", read),
                (f"read_many({READ_GROUP})", read_many),
                (f"read_batch({READ_GROUP})", read_batch),
            )
        ]

    def _penstock(
        self,
        name: str,
        storage: str,
        size: int,
        run: Callable[[str, int, int], float],
        url: str,
        against: Contestant,
    ) -> Contestant:
        process = OwnProcess(run, url, size)
        self._cleanup.callback(process.close)
        return Contestant(name, storage, size, process, against)

    def live(self, size: int, results: list[Result], plan: Plan) -> list[Result]:
        """One process writes without a pause while another one reads."""
        found = []
        for name, group in (("write()", 1), (f"write_many({WRITE_GROUP})", WRITE_GROUP)):
            rate = next(r.rate for r in results if (r.name, r.size) == (name, size))
            groups = round(rate * plan.seconds * 2 / group)
            url = self._full_queue(FILE, size)
            runs = [live_run(url, size, groups, group) for _ in range(plan.live_rounds)]
            lost = median(lost for _, lost in runs)
            text = f"live {name}, {lost:.1%} lost"
            found.append(Result(text, FILE, size, tuple(delivered for delivered, _ in runs)))
        return found

    def memory(self, size: int, count: int) -> tuple[int, int]:
        """Return the bytes in memory of a process before and after so many messages."""
        process = OwnProcess(pass_messages, self._full_queue(FILE, size), size)
        self._cleanup.callback(process.close)
        return process(20_000), process(count)

    # --- queues -----------------------------------------------------------------------------

    def _new_directory(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))

    def _full_queue(self, storage: str, size: int) -> str:
        """Make a queue that is full, so that every write frees the oldest message."""
        name = "queue" if storage == FILE else f"shmem_{self._free_key()}"
        url = f"fmq:{self._new_directory()}/{name}"
        payload = b"x" * size
        with penstock.open_writer(url, layout="classic", slots=SLOTS, size=BUFFER) as writer:
            writer.write_many([payload] * (min(SLOTS, BUFFER // size) + 1))
        self._queues.append((url, payload))
        return url

    def _free_key(self) -> int:
        """Find a key for two segments that nobody has; they are removed at the end."""
        key = 0x50454E00
        while sysv.find(key) is not None or sysv.find(key + 1) is not None:
            key += 2
        self._cleanup.callback(remove_segments, key)
        return key

    def check(self) -> None:
        """Make sure that the newest message of every queue, C's too, reads back."""
        for url, payload in self._queues:
            with penstock.open_reader(url, start="last") as reader:
                message = reader.read(timeout=0)
            if message is None or message.payload != payload:
                raise SystemExit(f"{url} does not hold what was written to it")


def remove_segments(key: int) -> None:
    for segment in (sysv.find(key), sysv.find(key + 1)):
        if segment is not None:
            sysv.remove(segment)


# --- what the processes do: pass `count` messages, return the seconds ---------------------------


@cache
def writer_of(url: str) -> penstock.Writer:
    return penstock.open_writer(url)


@cache
def reader_of(url: str) -> penstock.Reader:
    return penstock.open_reader(url)


def write(url: str, size: int, count: int) -> float:
    writer = writer_of(url)
    payload = b"x" * size
    began = time.perf_counter()
    for _ in range(count):
        writer.write(payload)
    return time.perf_counter() - began


def write_many(url: str, size: int, count: int) -> float:
    writer = writer_of(url)
    group = [b"x" * size] * WRITE_GROUP
    began = time.perf_counter()
    for left in range(count, 0, -WRITE_GROUP):
        writer.write_many(group if left >= WRITE_GROUP else group[:left])
    return time.perf_counter() - began


def write_batch(url: str, size: int, count: int) -> float:
    writer = writer_of(url)
    message = penstock.Message(0, time.time_ns(), 0, 0, 0, None, None, b"x" * size)
    batch = batch_from_messages([message] * WRITE_GROUP)
    began = time.perf_counter()
    for left in range(count, 0, -WRITE_GROUP):
        writer.write_batch(batch if left >= WRITE_GROUP else batch.slice(0, left))
    return time.perf_counter() - began


def read(url: str, size: int, count: int) -> float:
    del size
    reader = reader_of(url)
    began = time.perf_counter()
    while count:
        if reader.read(timeout=0) is None:
            reader.seek("start")
        else:
            count -= 1
    return time.perf_counter() - began


def read_many(url: str, size: int, count: int) -> float:
    del size
    reader = reader_of(url)
    began = time.perf_counter()
    while count:
        messages = reader.read_many(min(count, READ_GROUP))
        if not messages:
            reader.seek("start")
        count -= len(messages)
    return time.perf_counter() - began


def read_batch(url: str, size: int, count: int) -> float:
    del size
    reader = reader_of(url)
    reader.read_batch(1)  # loads Arrow
    began = time.perf_counter()
    while count:
        batch = reader.read_batch(min(count, READ_GROUP))
        if not batch.num_rows:
            reader.seek("start")
        count -= batch.num_rows
    return time.perf_counter() - began


def pass_messages(url: str, size: int, count: int) -> int:
    """Write and read `count` messages; return the bytes in memory after that."""
    writer, reader = writer_of(url), reader_of(url)
    group = [b"x" * size] * WRITE_GROUP
    reader.seek("end")
    for _ in range(0, count, WRITE_GROUP):
        writer.write_many(group)
        while reader.read_many(READ_GROUP):
            pass
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


# --- one process writes, another one reads ------------------------------------------------------


def live_run(url: str, size: int, groups: int, group: int) -> tuple[float, float]:
    """Return messages delivered a second, and the part that was lost."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(2)
    answer, tell = spawn.Pipe(duplex=False)
    processes = [
        spawn.Process(target=live_writer, args=(url, size, groups, group, together), daemon=True),
        spawn.Process(target=live_reader, args=(url, groups * group, together, tell), daemon=True),
    ]
    for process in processes:
        process.start()
    tell.close()  # only the reader's copy is left: should it die, recv raises
    seconds, delivered, lost = answer.recv()
    for process in processes:
        process.join()
    return delivered / seconds, lost / (delivered + lost)


def live_writer(url: str, size: int, groups: int, group: int, together: Barrier) -> None:
    payloads = [b"x" * size] * group
    with penstock.open_writer(url) as writer:
        together.wait()
        for _ in range(groups):
            if group == 1:
                writer.write(payloads[0])
            else:
                writer.write_many(payloads)


def live_reader(url: str, count: int, together: Barrier, tell: Connection) -> None:
    logging.getLogger("penstock").setLevel(logging.ERROR)  # it warns of each loss
    with penstock.open_reader(url, start="end") as reader:
        together.wait()
        began = time.perf_counter()
        delivered = lost = 0
        while delivered + lost < count:
            messages = reader.read_many(READ_GROUP, timeout=10)
            if not messages:
                raise SystemExit(f"{url}: {count - delivered - lost} messages never came")
            delivered += len(messages)
            lost = reader.statistics().lost
        tell.send((time.perf_counter() - began, delivered, lost))


if __name__ == "__main__":
    main()
