"""How is something measured fairly on a machine that others use too?"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Contestant",
    "OwnProcess",
    "Requirement",
    "Result",
    "build",
    "file_system",
    "machine",
    "race",
    "report",
    "save",
]

_T = TypeVar("_T")

_HERE = Path(__file__).parent

#: A trial this short (seconds) says too little to choose a count by.
_SHORTEST_TRIAL = 0.02


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to pass messages."""

    name: str
    #: Where its messages live, and how large they are.
    storage: str
    size: int
    #: Passes so many messages; returns the seconds that it took.
    run: Callable[[int], float]
    #: The yardstick that it is held against; it must run in the same race.
    against: Contestant | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of one contestant, messages a second, one for each round."""

    name: str
    storage: str
    size: int
    rates: tuple[float, ...]
    against: Result | None = None

    @property
    def rate(self) -> float:
        """The median."""
        return median(self.rates)

    @property
    def spread(self) -> float:
        """From the slowest round to the fastest, as a part of the median."""
        return (max(self.rates) - min(self.rates)) / self.rate

    @property
    def ratio(self) -> float | None:
        """Median against the yardstick's median."""
        return None if self.against is None else self.rate / self.against.rate


@dataclass(frozen=True, slots=True)
class Requirement:
    """What must hold, and whether it does."""

    text: str
    reached: bool
    #: The figures that decide it.
    found: str

    def __str__(self) -> str:
        return f"{'reached' if self.reached else 'not reached'}: {self.text} ({self.found})"


def race(contestants: Sequence[Contestant], rounds: int, seconds: float) -> list[Result]:
    """Let all run in turn, round after round, so that a slow minute of the machine hits all.

    Each run takes about `seconds`. A yardstick comes before those that are held against it.
    """
    counts = [_count_for(contestant, seconds) for contestant in contestants]
    rates: list[list[float]] = [[] for _ in contestants]
    for _ in track(range(rounds), "measuring", console=Console(stderr=True), transient=True):
        for contestant, count, own in zip(contestants, counts, rates, strict=True):
            own.append(count / contestant.run(count))
    results: dict[Contestant, Result] = {}
    for one, own in zip(contestants, rates, strict=True):
        against = None if one.against is None else results[one.against]
        results[one] = Result(one.name, one.storage, one.size, tuple(own), against)
    return list(results.values())


def _count_for(contestant: Contestant, seconds: float) -> int:
    """Find how many messages fill the time; this also warms everything up."""
    count = 256
    while (took := contestant.run(count)) < min(_SHORTEST_TRIAL, seconds):
        count *= 4
    return max(1, round(count * seconds / took))


class OwnProcess(Generic[_T]):
    """A function, called with a count in one process of its own that lives until `close`.

    What one contestant leaves behind, above all the state of its heap, is not felt by another.
    """

    def __init__(self, function: Callable[..., _T], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._process.submit(os.getpid)  # starts it now, beside those of the others

    def __call__(self, count: int) -> _T:
        return self._process.submit(self._function, *self._arguments, count).result()

    def close(self) -> None:
        self._process.shutdown()


def build(source: str) -> Path:
    """Compile a C program of this folder and return its path."""
    program = _HERE / "bin" / Path(source).stem
    program.parent.mkdir(exist_ok=True)
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
    subprocess.run(["cc", *flags, "-o", program, _HERE / source], check=True)
    return program


def machine() -> dict[str, str]:
    """Describe where this runs, without a name that could be private."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def file_system(directory: Path) -> str:
    """Return the kind of file system that holds a directory."""
    best = (0, "unknown")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split(" ")
        if directory.resolve().is_relative_to(mount):
            best = max(best, (len(mount), kind))
    return best[1]


def report(
    title: str,
    where: Mapping[str, str],
    results: Sequence[Result],
    requirements: Sequence[Requirement],
    yardstick: str,
) -> None:
    """Print one table, the machine, and each requirement."""
    table = Table(title=title)
    for heading in ("", "storage", "size", "messages/s", "MB/s", "spread", f"against {yardstick}"):
        table.add_column(heading, justify="left" if heading in {"", "storage"} else "right")
    section = None
    for result in results:
        if section not in {None, (result.storage, result.size)}:
            table.add_section()
        section = (result.storage, result.size)
        table.add_row(
            result.name,
            result.storage,
            f"{result.size:,}",
            f"{result.rate:,.0f}",
            f"{result.rate * result.size / 1e6:,.0f}",
            f"{result.spread:.0%}",
            "" if result.ratio is None else f"{result.ratio:.2f}x",
        )
    Console(width=110).print(table)
    print("; ".join(f"{what}: {value}" for what, value in where.items()))
    for requirement in requirements:
        print(requirement)


def save(
    path: Path | None,
    bench: str,
    where: Mapping[str, str],
    results: Sequence[Result],
    requirements: Sequence[Requirement],
    **more: object,
) -> Path:
    """Write everything to a JSON file, by default one in `results/` named for the moment."""
    if path is None:
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = _HERE / "results" / f"{bench}-{moment}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "bench": bench,
        "machine": dict(where),
        "results": [
            {
                "name": result.name,
                "storage": result.storage,
                "size": result.size,
                "median": round(result.rate),
                "rates": [round(rate) for rate in result.rates],
            }
            for result in results
        ],
        "requirements": [
            {"text": each.text, "reached": each.reached, "found": each.found}
            for each in requirements
        ],
        **more,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
