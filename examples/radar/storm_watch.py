"""From a radar's pulses to weather, live: `make demo`.

    python examples/radar/storm_watch.py --volumes 2

A synthetic radar writes IWRF pulses into an LROSE queue, four times as fast as a real one. A Spark
pipeline (storm-watch.yaml) turns them into moments and volumes: CfRadial files, each announced in
latest_data_info. Another waits for those, and makes grids and alerts of them. At the end every
pulse is looked for in the files, and the newest one is painted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from synthetic_radar import RadarSettings

import penstock
from penstock.pipeline import load_pipelines, plan
from penstock.pipeline.run import run
from penstock.radar.iwrf.pulses import PulseDecoder
from penstock.radar.pictures import file_of, plot
from penstock.radar.volume_files import read_volume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.run import Outcome
    from penstock.pipeline.run import Progress as QueryProgress

HERE: Final = Path(__file__).parent
#: Bytes of the queue for each volume: the radar does not wait for anybody, as real ones do not.
VOLUME_SIZE: Final = 125_000_000
FIELDS: Final = ("DBZ", "VEL", "ZDR", "RHOHV")
#: dB. Of fainter echoes the picture would show the noise.
LEAST_SNR: Final = 3.0


class Demo:
    """A radar, two pipelines, and what is seen of them."""

    def __init__(self, folder: Path, volumes: int, speed: float) -> None:
        self.folder = folder
        self.volumes = volumes
        self.pulses = volumes * RadarSettings().beams_per_volume * RadarSettings.pulses
        #: Where the radar writes to: a queue that LROSE's programs could read, too.
        self.queue = f"iwrf+fmq:{folder}/ts"
        self._speed = speed
        self._radar: subprocess.Popen[str] | None = None
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(28),
            TextColumn("{task.completed:>7,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[say]}"),
            TimeElapsedColumn(),
        )
        self._written = self._bars.add_task("radar → LROSE queue", total=self.pulses, say="pulses")
        self._read = self._bars.add_task("queue → Spark", total=1, say="starting Spark …")
        self._files = {
            name: self._bars.add_task(f"Spark → {kind}", total=volumes, say="announced")
            for name, kind in (("volumes", "CfRadial volumes"), ("grids", "CF grids"))
        }

    def prepare(self) -> None:
        """Make the streams that are read before anybody has written to them."""
        size = self.volumes * VOLUME_SIZE
        penstock.create(f"{self.queue}?size={size}&slots={500 * self.volumes}")
        for name in self._files:
            penstock.create(f"latest:{self.folder}/{name}")

    def run(self) -> Outcome:
        """Let it run until the last volume is a grid."""
        self.prepare()
        pipelines = plan(load_pipelines(HERE / "storm-watch.yaml"))
        with self._bars:
            try:
                return run(pipelines, on_progress=self._take, should_stop=self._is_through)
            finally:
                if self._radar is not None:
                    self._radar.terminate()  # if it is still there
                    self._radar.communicate()

    def _take(self, progress: QueryProgress) -> None:
        if self._radar is None:  # Spark is there
            self._radar = self._start_radar()
        if progress.query.startswith("storm-watch") and progress.batches:
            say = f"messages, a batch in {progress.batch_seconds:.1f} s"
            self._bars.update(self._read, completed=progress.rows, say=say)

    def _start_radar(self) -> subprocess.Popen[str]:
        options = ("--volumes", str(self.volumes), "--speed", str(self._speed))
        return subprocess.Popen(
            [sys.executable, HERE / "synthetic_radar.py", self.queue, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _is_through(self) -> bool:
        """Look at what everybody can see: the queue, and the entries of latest_data_info."""
        with penstock.open_reader(self.queue, start="last") as reader:
            newest = reader.read(timeout=0)
        if newest is not None:
            pulses = PulseDecoder().feed(newest.payload).headers["pulse_seq_num"]
            self._bars.update(self._written, completed=int(pulses[-1]) + 1)
            self._bars.update(self._read, total=newest.seq + 1)
        announced = {name: len(entries(self.folder / name)) for name in self._files}
        for name, count in announced.items():
            self._bars.update(self._files[name], completed=count)
        if self._radar is None or self._radar.poll() is None:
            return False
        if self._radar.returncode:
            assert self._radar.stderr is not None
            raise penstock.PenstockError(f"the radar failed: {self._radar.stderr.read()}")
        return all(count >= self.volumes for count in announced.values())


def entries(folder: Path) -> list[str]:
    """Return what latest_data_info tells of a directory, from the oldest on."""
    with penstock.open_reader(f"latest:{folder}", start="start") as reader:
        return [message.payload.decode() for message in reader.available()]


class Books(NamedTuple):
    """What is in the files, counted by the radar's own numbers."""

    rays: int
    pulses: int
    #: Rays that are in the files again.
    twice: int
    #: dBZ.
    strongest: float


def books_of(folder: Path) -> Books:
    """Read all volumes."""
    rays = pulses = 0
    seen: set[tuple[int, int, int]] = set()
    strongest = -np.inf
    for file in sorted(folder.glob("volumes/*/*.nc")):
        beams = read_volume(file)
        rays += beams.num_rows
        pulses += sum(beams.column("samples").to_pylist())
        numbers = (beams.column(name).to_pylist() for name in ("volume_number", "sweep_number"))
        azimuths = np.rint(beams.column("azimuth").to_numpy()).astype(int) % 360
        seen.update(zip(*numbers, azimuths.tolist(), strict=True))
        values = np.concatenate(beams.column("DBZ").to_numpy())
        strongest = max(strongest, float(np.nanmax(values)))
    return Books(rays, pulses, rays - len(seen), strongest)


def summary(demo: Demo, outcome: Outcome) -> tuple[Table, bool]:
    """Count what came out, and tell whether it is all that went in."""
    books = books_of(demo.folder)
    with penstock.open_reader(f"log:{demo.folder}/alerts") as reader:
        alerts = sum(1 for _ in reader.available())
    lost = outcome.lost + demo.pulses - books.pulses
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "in: pulses of the radar": f"{demo.pulses:,}",
        "out: pulses in the rays of the volumes": f"{books.pulses:,}",
        "lost": f"{lost:,}",
        "rays": f"{books.rays:,}",
        "rays that are there twice": f"{books.twice:,}",
        "volumes announced": f"{len(entries(demo.folder / 'volumes')):,}",
        "grids announced": f"{len(entries(demo.folder / 'grids')):,}",
        "alerts: rays above 60 dBZ": f"{alerts:,}",
        "strongest echo": f"{books.strongest:.1f} dBZ",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table, not lost and not books.twice


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, and say how it went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--volumes", type=int, default=2, help="that the radar scans (2)")
    parser.add_argument("--speed", type=float, default=4, help="times that of a real radar (4)")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="for all it makes (demo)")
    given = parser.parse_args(arguments)
    console = Console()
    began = time.monotonic()
    folder = given.folder.absolute() / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["RADAR"] = str(folder)
    demo = Demo(folder, given.volumes, given.speed)
    try:
        outcome = demo.run()
        table, is_whole = summary(demo, outcome)
        newest = file_of(f"latest:{folder}/volumes")
        picture = given.folder / "ppi.png"
        plot(newest, picture, field=FIELDS, sweeps=[0], min_snr=LEAST_SNR)
    except penstock.PenstockError as error:
        console.print(f"storm_watch: {error}", markup=False, soft_wrap=True)
        if error.hint:
            console.print(f"  {error.hint}", markup=False, soft_wrap=True)
        return 1
    console.print(table)
    place = given.folder / "run"
    console.print(
        f"painted {picture} from {newest.name}; took {time.monotonic() - began:.0f} s in all\n\n"
        "look further:\n"
        f"  penstock info iwrf+fmq:{place}/ts\n"
        f"  penstock cat  iwrf+fmq:{place}/ts -n 3\n"
        f"  penstock latest read {place}/volumes\n"
        f"  penstock radar plot latest:{place}/volumes --min-snr 3 -o sweeps.png\n"
        f"  penstock radar plot latest:{place}/grids -o grid.png",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
