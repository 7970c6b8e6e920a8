"""How fast is the wide ring beside other ways to pass messages, in one run on this machine?

python benches/compare.py [--quick] [--only PATTERN] [--write-docs]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from harness import file_system, machine
from peers.arrow import arrow_copy, fill
from peers.chart import draw
from peers.contract import FILE, MEMORY, Case, Scratch, Way, not_installed
from peers.lineup import RING, Lineup, lineup
from peers.replay import Store, keep, replay
from peers.report import markdown, show, write_docs
from peers.results import CASES, FAN_OUT, LATENCY, REPLAY, SIZES, Results, arrow_case
from peers.runs import Failed, Outcome, Pace, in_own_process, latency_run, throughput_run
from peers.servers import NATS, REDIS, missing_server, nats_server, redis_server
from peers.targets import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peers.targets import Target

_HERE = Path(__file__).parent
_PAGE = _HERE.parent / "docs" / "performance.md"

#: Sizes that are read into Arrow.
_ARROW_SIZES = (1 << 10, 64 << 10)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and how long it may take (seconds)."""

    pace: Pace
    rounds: int
    limit: float
    #: Leave out most of the rings in files; how they compare with /dev/shm is seen at one size.
    thin: bool = False


FULL = Plan(Pace(warm_up=0.12, seconds=0.45, messages=600), rounds=3, limit=480)
QUICK = Plan(Pace(warm_up=0.05, seconds=0.15, messages=150), rounds=1, limit=100, thin=True)


@dataclass(frozen=True, slots=True)
class Task:
    """One way in one case. A round runs it once."""

    case: str
    name: str
    storage: str
    missing: str | None
    #: Adds what it finds to the results.
    run: Callable[[Results], None]

    @property
    def label(self) -> str:
        return f"{self.case}: {self.name}, {self.storage}"

    @property
    def is_dispensable(self) -> bool:
        is_ring_in_file = self.name in RING.values() and self.storage == FILE
        return is_ring_in_file and self.case in CASES and self.case != SIZES[1024]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="below 2 minutes: a look, one round")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="a regular expression for what to run: '64 B: ', 'latency', 'wide ring.*shm'",
    )
    parser.add_argument("--list", action="store_true", help="name what there is to run, and end")
    parser.add_argument("--directory", type=Path, help="for files; default: a temporary one")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    parser.add_argument("--write-docs", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    if arguments.write_docs and (arguments.quick or arguments.only):
        parser.error("--write-docs is for a whole measurement: without --quick and --only")
    plan = QUICK if arguments.quick else FULL
    rounds: int = arguments.rounds or plan.rounds
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would outlive a fork badly
    with ExitStack() as cleanup:
        where = machine()
        stage = Stage(cleanup, arguments.directory, plan.pace)
        wanted = re.compile(arguments.only, re.IGNORECASE)
        tasks = [
            task
            for task in stage.tasks()
            if wanted.search(task.label) and not (plan.thin and task.is_dispensable)
        ]
        if arguments.list:
            print("\n".join(task.label for task in tasks))
            return
        results, done = measure(tasks, rounds, plan.limit)
        where |= {
            "file system": file_system(stage.files),
            "rounds": {0: "less than a round", 1: "1 round"}.get(done, f"{done} rounds"),
            "versions": ", ".join(stage.lineup.versions()),
        }
        if (spread := results.spread()) is not None:
            where["spread between rounds"] = f"{spread:.0%}"
    judged = targets(results)
    if arguments.only:  # what was not asked for is not missing
        judged = [target for target in judged if target.ratio is not None]
    show(results, judged, where)
    save(arguments.json, results, judged, where)
    if arguments.write_docs:
        write_docs(_PAGE, markdown(results, judged, where))
        print(_PAGE)


def measure(tasks: Sequence[Task], rounds: int, limit: float) -> tuple[Results, int]:
    """Let all run in turn, round after round; return the rounds that were completed.

    A slow minute of the machine hits all who are held against each other alike: ways of one case
    run one after the other.
    """
    results = Results()
    deadline = time.monotonic() + limit
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=rounds * len(tasks))
        for done in range(rounds):
            for task in tasks:
                if time.monotonic() > deadline:
                    print(f"time is over: {done} whole rounds of {rounds}")
                    return results, done
                progress.update(bar, description=f"round {done + 1}  {task.label}")
                if task.missing is None:
                    task.run(results)
                else:
                    figure = results.figure(task.case, task.name, task.storage)
                    figure.missing = task.missing
                progress.advance(bar)
    return results, rounds


class Stage:
    """Directories and servers that the contestants use, and all that is to be run."""

    def __init__(self, cleanup: ExitStack, directory: Path | None, pace: Pace) -> None:
        self._pace = pace
        self._moments: dict[str, tuple[str, int]] = {}
        self._full_queues: dict[int, str] = {}

        def temporary(inside: Path | str | None) -> Path:
            return Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=inside)))

        self.files = temporary(directory)
        self._scratch = Scratch(self.files, temporary(MEMORY))
        ports = [
            0 if missing_server(program) else cleanup.enter_context(start(temporary(directory)))
            for program, start in ((REDIS, redis_server), (NATS, nats_server))
        ]
        self.lineup: Lineup = lineup(*ports)

    def tasks(self) -> list[Task]:
        """Name all that can be measured, in the order of a round."""
        tasks = [
            self._passing(way, name, Case(size))
            for size, name in SIZES.items()
            for way in self.lineup.throughput
        ]
        tasks += [self._passing(way, FAN_OUT, Case(1024, 4)) for way in self.lineup.fan_out]
        tasks += [self._delay(way) for way in self.lineup.latency]
        tasks += [self._replay(store) for store in self.lineup.replay]
        ring = self.lineup.throughput[0]
        tasks += [self._arrow(size, ring) for size in _ARROW_SIZES]
        return tasks

    def _passing(self, way: Way, case: str, passed: Case) -> Task:
        def run(results: Results) -> None:
            figure = results.figure(case, way.name, way.storage)
            outcome = throughput_run(way, passed, self._pace, self._scratch)
            if outcome.rate is None:
                figure.problems.append(outcome.problem or "nothing was measured")
            else:
                figure.values.append(outcome.rate)

        return Task(case, way.name, way.storage, way.missing(), run)

    def _delay(self, way: Way) -> Task:
        def run(results: Results) -> None:
            figure = results.figure(LATENCY, way.name, way.storage)
            outcome: Outcome = latency_run(way, Case(64), self._pace, self._scratch)
            if outcome.problem is not None:
                figure.problems.append(outcome.problem)
            else:
                middle, high = np.percentile(outcome.delays, [50, 99]) / 1000
                figure.values.append(float(middle))
                figure.high_values.append(float(high))

        return Task(LATENCY, way.name, way.storage, way.missing(), run)

    def _replay(self, store: Store) -> Task:
        def run(results: Results) -> None:
            figure = results.figure(REPLAY, store.name, store.way.storage)
            try:
                if store.name not in self._moments:
                    address = store.address(self._scratch)
                    moment = in_own_process(keep, store, address, 1024)
                    self._moments[store.name] = (address, moment)
                address, moment = self._moments[store.name]
                found = in_own_process(replay, store, address, 1024, moment, self._pace.seconds)
                figure.values.append(found)
            except Failed as error:
                figure.problems.append(str(error))

        return Task(REPLAY, store.name, store.way.storage, store.missing(), run)

    def _arrow(self, size: int, ring: Way) -> Task:
        case = arrow_case(size)

        def run(results: Results) -> None:
            figures = [results.figure(case, name, MEMORY) for name in ("read_batch", "memcpy")]
            try:
                if size not in self._full_queues:
                    path = f"{self._scratch.directory(MEMORY)}/queue"
                    in_own_process(fill, path, size)
                    self._full_queues[size] = path
                found = in_own_process(
                    arrow_copy, self._full_queues[size], size, self._pace.seconds
                )
            except Failed as error:
                figures[0].problems.append(str(error))
            else:
                figures[0].values.append(found.read_batch)
                figures[1].values.append(found.memcpy)

        return Task(case, "read_batch", MEMORY, ring.missing(), run)


def save(
    path: Path | None, results: Results, judged: Sequence[Target], where: dict[str, str]
) -> None:
    """Write a JSON file and, beside it, the picture."""
    if path is None:
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = _HERE / "results" / f"compare-{moment}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "bench": "compare",
        "machine": where,
        "figures": results.plain(),
        "targets": [
            {
                "what": target.what,
                "against": target.against,
                "wanted": target.limit,
                "ratio": target.ratio,
                "verdict": target.verdict,
            }
            for target in judged
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(path)
    if missing := not_installed("matplotlib", "matplotlib"):
        print(f"no picture: {missing}")
    else:
        picture = path.with_suffix(".png")
        draw(results, where, picture)
        print(picture)


if __name__ == "__main__":
    main()
