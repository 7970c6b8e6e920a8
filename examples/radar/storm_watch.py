"""From a radar's pulses to weather, live: `make demo`.

    python examples/radar/storm_watch.py --seconds 25

A synthetic radar writes 1,000 beams/s into a ring. A Spark pipeline (storm-watch.yaml) turns them
into moments, and writes a stream of them, a parquet archive and alerts. At the end all are counted,
and the newest sweep is drawn from the archive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.dataset as ds
from ppi import draw_ppi, newest_sweep
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import penstock
from penstock.pipeline import load_pipelines, plan
from penstock.pipeline.running import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.running import Outcome
    from penstock.pipeline.running import Progress as QueryProgress

HERE: Final = Path(__file__).parent
#: Beams that wait for Spark at most: the radar waits beyond that, and nothing is lost.
RING: Final = "size=512M&slots=20000"
#: One sweep goes first: Spark is slow until it has seen a batch.
WARM_UP: Final = 360


class Demo:
    """A radar, a pipeline, and what is seen of them."""

    def __init__(self, folder: Path, rate: int, seconds: float) -> None:
        self.folder = folder
        self.beams = max(round(rate * seconds), WARM_UP + 1)
        self._rate = rate
        self._radar: subprocess.Popen[str] | None = None
        self._is_warm = False
        self._rows = 0
        self._bars = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(30),
            TextColumn("{task.completed:>7,.0f} of {task.total:,.0f} beams"),
            TextColumn("{task.fields[say]}"),
            TimeElapsedColumn(),
        )
        self._written = self._bars.add_task("radar → ring", total=self.beams, say="")
        self._done = self._bars.add_task("ring → Spark", total=self.beams, say="starting Spark …")

    def run(self) -> Outcome:
        """Let it run until each beam is through."""
        penstock.create(f"fmq:{self.folder}/iq?{RING}")
        pipelines = plan(load_pipelines(HERE / "storm-watch.yaml"))
        watching = threading.Thread(target=self._watch_ring, daemon=True)
        watching.start()
        with self._bars:
            try:
                return run(pipelines, on_progress=self._take, should_stop=self._is_through)
            finally:
                if self._radar is not None:
                    self._radar.terminate()  # if it is still there
                    self._radar.communicate()

    def _take(self, progress: QueryProgress) -> None:
        self._rows = progress.rows
        say = f"{progress.rows_per_second:,.0f}/s, a batch in {progress.batch_seconds:.1f} s"
        self._bars.update(self._done, completed=progress.rows, say=say)
        if self._radar is None:  # Spark is there
            self._bars.update(self._done, say="the first sweep …")
            self._radar = self._start_radar("--beams", WARM_UP, "--rate", 0)
        elif not self._is_warm and progress.rows == WARM_UP:
            self._is_warm = True
            rest = self.beams - WARM_UP
            self._radar.communicate()
            self._radar = self._start_radar(
                *("--first", WARM_UP, "--beams", rest, "--rate", self._rate, "--seed", 1)
            )

    def _start_radar(self, *options: object) -> subprocess.Popen[str]:
        url = f"fmq:{self.folder}/iq?hold=storm-watch&policy=wait&timeout=60s"
        return subprocess.Popen(
            [sys.executable, HERE / "synthetic_radar.py", url, *map(str, options)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _watch_ring(self) -> None:
        with penstock.open_reader(f"fmq:{self.folder}/iq", start="end") as reader:
            while True:
                end = reader.bounds().end
                self._bars.update(self._written, completed=end, say=f"{end - self._rows:,} waiting")
                time.sleep(0.2)

    def _is_through(self) -> bool:
        if self._radar is None or self._radar.poll() is None:
            return False
        if self._radar.returncode:
            assert self._radar.stderr is not None
            raise penstock.PenstockError(f"the radar failed: {self._radar.stderr.read()}")
        return self._is_warm and self._rows >= self.beams


def summary(demo: Demo, outcome: Outcome) -> tuple[Table, bool]:
    """Count what came out, and tell whether it is all that went in."""
    with penstock.open_reader(f"fmq:{demo.folder}/moments") as reader:
        batches = []
        while (batch := reader.read_batch(10_000, timeout=0)).num_rows:
            batches.append(batch)
    seqs = sum(batch.num_rows for batch in batches)
    delays = np.concatenate([b["created_ns"].to_numpy() - b["time_ns"].to_numpy() for b in batches])
    numbers = np.concatenate([_beam_numbers(batch) for batch in batches])
    delays = delays[numbers >= WARM_UP]
    archived = ds.dataset(demo.folder / "archive", partitioning="hive")
    with penstock.open_reader(f"log:{demo.folder}/alerts") as reader:
        alerts = sum(1 for _ in reader.available())
    is_whole = seqs == demo.beams == archived.count_rows() and len(np.unique(numbers)) == demo.beams
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "in: beams of the radar": f"{demo.beams:,}",
        "out: moments stream": f"{seqs:,}",
        "out: parquet rows": f"{archived.count_rows():,}",
        "out: alerts (above 55 dBZ)": f"{alerts:,}",
        "lost": f"{outcome.lost + demo.beams - len(np.unique(numbers)):,}",
        "twice": f"{seqs - len(np.unique(numbers)):,}",
        "latency p50, beam due → moments in the stream*": f"{np.quantile(delays, 0.5) / 1e9:.2f} s",
        "latency p99": f"{np.quantile(delays, 0.99) / 1e9:.2f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table, is_whole


def _beam_numbers(batch: penstock.Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers that the radar gave its beams, from the packed moments."""
    return np.array([int.from_bytes(p.as_py()[:8], "little") for p in batch["payload"]], np.int64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, and say how it went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=25, help="that the radar turns (25)")
    parser.add_argument("--rate", type=int, default=1000, help="beams/s (1000)")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="for all it makes (demo)")
    given = parser.parse_args(arguments)
    console = Console()
    began = time.monotonic()
    folder = given.folder.absolute() / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["RADAR"] = str(folder)
    demo = Demo(folder, given.rate, given.seconds)
    try:
        outcome = demo.run()
        table, is_whole = summary(demo, outcome)
    except penstock.PenstockError as error:
        console.print(f"storm_watch: {error}", markup=False, soft_wrap=True)
        if error.hint:
            console.print(f"  {error.hint}", markup=False, soft_wrap=True)
        return 1
    console.print(table)
    archive = ds.dataset(folder / "archive", partitioning="hive")
    picture = given.folder / "ppi.png"
    draw_ppi(newest_sweep(archive.to_table()), picture)
    console.print(f"* of the beams after the first {WARM_UP}, with which Spark warms up")
    console.print(f"drew {picture}; took {time.monotonic() - began:.0f} s in all")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
