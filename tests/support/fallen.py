"""A checkpoint that loses files, or gets old ones: what becomes of the rows?"""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from penstock import NotFound, open_reader, open_writer
from penstock.core.errors import PenstockError
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import run

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

__all__ = ["SINKS", "History"]

SINKS = ("log", "ring", "flight", "parquet")


class History:
    """Two streams, one query of both, one sink, and a checkpoint that things happen to."""

    def __init__(
        self, spark: SparkSession | None, folder: Path, sink: str, server: str, per_batch: int = 0
    ) -> None:
        self._spark = spark
        self.folder = folder
        self.sink = sink
        self._far = f"{server}{folder.name}-far?kind=log"
        self.checkpoint = folder / "checkpoints" / "p-out"
        self._backups: list[Path] = []
        self.written = 0
        self.per_batch = per_batch
        limit = {"maxOffsetsPerTrigger": per_batch} if per_batch else {}
        urls = [f"log:{folder}/{name}" for name in "ab"]
        source = Pipeline("p").source("a", url=urls, **limit)
        self._pipeline = source.sink("out", from_="a", **self.target())
        self.write(2)

    def target(self) -> dict[str, str]:
        return {
            "log": {"url": f"log:{self.folder}/log"},
            "ring": {"url": f"fmq:{self.folder}/ring?slots=4096&size=1M"},
            "flight": {"url": self._far},
            "parquet": {"parquet": f"{self.folder}/parquet"},
        }[self.sink]

    def write(self, count: int) -> None:
        """Append numbers to both streams."""
        for i, name in enumerate("ab"):
            with open_writer(f"log:{self.folder}/{name}?sync=none") as writer:
                numbers = range(self.written, self.written + count)
                writer.write_many([b"%d" % n for n in numbers if n % 2 == i])
        self.written += count

    def run(self) -> str | None:
        """Deliver all that is there; return why that was refused."""
        try:
            run(
                plan(self._pipeline),
                spark=self._spark,
                once=True,
                checkpoint=str(self.checkpoint.parent),
            )
        except PenstockError as error:
            return str(error)
        return None

    def found(self) -> list[int]:
        """Return the numbers that were delivered."""
        if self.sink == "parquet":
            files = (self.folder / "parquet").glob("*.parquet")
            return sorted(
                int(payload.as_py()) for file in files for payload in pq.read_table(file)["payload"]
            )
        url = self.target()["url"].partition("?")[0]
        try:
            with open_reader(url) as reader:
                return sorted(int(message.payload) for message in reader.available())
        except NotFound:
            return []

    # --- what happens to the checkpoint -----------------------------------------------------------

    def files(self) -> list[Path]:
        found = self.checkpoint.rglob("*")
        return sorted(path for path in found if path.is_file() and path.suffix != ".tmp")

    def keep(self) -> None:
        """Keep a copy, as of yesterday."""
        if self.checkpoint.exists():
            copy = self.folder / "backups" / str(len(self._backups))
            shutil.copytree(self.checkpoint, copy)
            self._backups.append(copy)

    def damage(self, chance: random.Random) -> str:
        """Do something to one file of it, or to all; return what."""
        if not self.files():
            return "nothing"
        file = chance.choice(self.files())
        name = file.relative_to(self.checkpoint)
        copies = [copy for copy in self._backups if (copy / name).exists()]
        kind = chance.choice(["delete", "delete", "truncate", "last", "restore", "all"])
        if kind == "delete":
            file.unlink()
        elif kind == "truncate":
            with file.open("r+b") as opened:
                opened.truncate(chance.randrange(file.stat().st_size + 1))
        elif kind == "last":  # the latest batch, as a power failure takes it
            self.fall_back(chance.randint(1, 3))
        elif kind == "restore" and copies:
            shutil.copy2(chance.choice(copies) / name, file)
        elif kind == "all" and self._backups:
            shutil.rmtree(self.checkpoint)
            shutil.copytree(chance.choice(self._backups), self.checkpoint)
        return f"{kind} {name}"

    def fall_back(self, batches: int) -> None:
        """Remove the latest batches."""
        folder = self.checkpoint / "offsets"
        for number in sorted(int(f.name) for f in folder.iterdir() if f.name.isdigit())[-batches:]:
            for name in ("offsets", "commits"):
                (self.checkpoint / name / str(number)).unlink(missing_ok=True)
