"""How fast do lines go through `put` and `cat`, beside two plain programs in Python?

python benches/shell.py [--quick]

The plain ones are a loop over `sys.stdin.buffer` with `writer.write`, and a loop over the reader
with `sys.stdout.buffer.write`. Both kinds write to a queue that holds everything, in memory since
a disk is at work on its own while they are measured. They are new processes each time, with their
bytecode cached as that of an installed package is. What they take is their processor time, which
others on the machine do not change.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

#: What the command has to be worth.
TARGET = 1.5
BYTECODE = Path(tempfile.gettempdir(), f"penstock-bench-bytecode-{os.getuid()}")

PLAIN_PUT = """
import sys
from penstock import open_writer
with open_writer(sys.argv[1]) as writer:
    for line in sys.stdin.buffer:
        writer.write(line[:-1])
"""
PLAIN_CAT = """
import sys
from penstock import open_reader
with open_reader(sys.argv[1]) as reader:
    for message in reader.available():
        sys.stdout.buffer.write(message.payload + b"\\n")
"""


class Taken(NamedTuple):
    """What a program took, in seconds."""

    wall: float
    processor: float


def run(arguments: list[str], stdin: Path | None, stdout: Path | None) -> Taken:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (
        (stdin or Path(os.devnull)).open("rb") as source,
        (stdout or Path(os.devnull)).open("wb") as target,
    ):
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(BYTECODE)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run(arguments, stdin=source, stdout=target, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(time.perf_counter() - began, spent)


def lines(count: int) -> bytes:
    """Return lines as programs log them, of 20 to 150 characters."""
    chooser = random.Random(1)
    words = [f"{chooser.getrandbits(40):x}" for _ in range(1000)]
    texts = (" ".join(chooser.choices(words, k=chooser.randint(2, 14))) for _ in range(count))
    return "".join(f"{number} {text}\n" for number, text in enumerate(texts)).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100,000 lines, one round: a look")
    chosen = parser.parse_args()
    count, rounds = (100_000, 1) if chosen.quick else (1_000_000, 3)
    penstock = str(Path(sys.executable).with_name("penstock"))
    taken: dict[str, list[Taken]] = {}
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=place) as folder:
        source, target = Path(folder, "lines"), Path(folder, "out")
        source.write_bytes(lines(count))
        size = 1 << (source.stat().st_size + 64 * count).bit_length()
        zeros = Path(folder, "zeros")
        zeros.write_bytes(os.urandom(count * 10).replace(b"\0", b"\n\0") + b"\0")
        for number in track(range(-1, rounds), "put and cat", console=Console(stderr=True)):
            queues = [f"fmq:{folder}/{kind}{number}" for kind in ("plain", "command")]
            for queue in queues:
                made = f"{queue}?slots={2 * count}&size={size}"
                run([penstock, "create", made], None, None)
            plain, command = queues
            programs = {
                "put, plain": ([sys.executable, "-c", PLAIN_PUT, plain], source, None),
                "put": ([penstock, "put", command], source, None),
                "cat, plain": ([sys.executable, "-c", PLAIN_CAT, plain], None, target),
                "cat": ([penstock, "cat", command, "--delimiter", r"\n"], None, target),
            }
            for name, program in programs.items():
                spent = run(*program)
                if number >= 0:  # the first round writes the bytecode
                    taken.setdefault(name, []).append(spent)
                if "cat" in name and target.read_bytes() != source.read_bytes():
                    raise SystemExit(f"{name}: lines were lost or changed")
            for queue in queues:
                run([penstock, "rm", queue], None, None)
        binary = f"log:{folder}/binary"
        run([penstock, "put", binary, "--null"], zeros, None)
        run([penstock, "cat", binary, "--null"], None, target)
        if target.read_bytes() != zeros.read_bytes():
            raise SystemExit("--null: bytes were lost or changed")
    return show(count, taken)


def show(count: int, taken: dict[str, list[Taken]]) -> int:
    table = Table(title=f"{count:,} lines, medians of {len(taken['put'])} rounds", box=None)
    for title in ("", "processor, s", "wall, s", "lines/s of processor", "of the plain one"):
        table.add_column(title, justify="right" if title else "left")
    ratios = {}
    for name, runs in taken.items():
        processor = median(each.processor for each in runs)
        wall = median(each.wall for each in runs)
        ratio = ""
        if f"{name}, plain" in taken:
            plain = median(each.processor for each in taken[f"{name}, plain"])
            ratios[name] = plain / processor
            ratio = f"{ratios[name]:.2f}x"
        table.add_row(name, f"{processor:.2f}", f"{wall:.2f}", f"{count / processor:,.0f}", ratio)
    console = Console()
    console.print(table)
    missed = [name for name, ratio in ratios.items() if ratio < TARGET]
    if missed:
        console.print(f"below {TARGET}x: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
