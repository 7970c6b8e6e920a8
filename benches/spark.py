"""How fast is Spark with our streams, beside its own sources and settings?

    python benches/spark.py [--quick] [--json FILE]

Each part runs in processes of its own, in turn, round after round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness import Requirement, Result, machine, report, save
from penstock import open_reader, open_writer
from penstock.pipeline.session import spark_session
from ready_batch import ReadyBatchSource
from row_by_row import RowByRowSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent

SIZE = 100
#: Batches of a query that are not counted, and those that are: Java compiles what runs often, and
#: a batch takes half as long after the first hundred.
WARM_UP, COUNTED = 100, 60
#: Queries that read all rows in one batch: those that are not counted, and how often each counts.
FIRST, EACH = 8, 5
#: Columns of those who do not need all ten.
FEW = "seq,time,payload"
#: Rows of the small batches, and messages a second of the steady stream.
SMALL = 1000

DEFAULT_CHECKPOINTS = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileContextBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, no measurement")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(PARTS[given.part](given.folder, given.quick)))
        return
    rounds = given.rounds or (1 if given.quick else 3)
    count = 200_000 if given.quick else 1_000_000
    where = machine()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        fill(folder, count)
        found = [measure(folder, given.quick) for _ in range(rounds)]
    results, requirements = judge(found)
    report(f"Spark, {count:,} rows", where, results, requirements, "its yardstick")
    print(save(given.json, "spark", where, results, requirements, messages=count))


def fill(folder: Path, count: int) -> None:
    """Write what all parts read."""
    payload = bytes(range(SIZE))
    with open_writer(f"log:{folder}/rows") as writer:
        for _ in range(count // 1000):
            writer.write_many([payload] * 1000)


def measure(folder: Path, is_quick: bool) -> dict[str, Any]:
    """Run each part once, in its own process."""
    found = {}
    for part in PARTS:
        command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
        done = subprocess.run(
            [*command, *(["--quick"] if is_quick else [])],
            stdout=subprocess.PIPE,
            check=True,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        )
        found[part] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(rounds: list[dict[str, Any]]) -> tuple[list[Result], list[Requirement]]:
    def result(name: str, kind: str, of: Callable[[dict[str, Any]], float], against: Any) -> Result:
        return Result(name, kind, SIZE, tuple(of(one) for one in rounds), against)

    big = "one batch"
    tuples = result("a tuple for each row", big, lambda r: r["sources"]["rows"], None)
    rate = result("rate-micro-batch", big, lambda r: r["sources"]["rate"], None)
    arrow = result("Arrow, against tuples", big, lambda r: r["sources"]["arrow"], tuples)
    against_rate = Result("Arrow, against rate-micro-batch", big, SIZE, arrow.rates, rate)
    few = result(f"Arrow, {FEW}", big, lambda r: r["sources"]["few"], rate)
    ready = result("a batch that is ready", big, lambda r: r["sources"]["ready"], rate)
    one = result("one core", "through a stage", lambda r: r["one core"], None)
    two = result("two cores", "through a stage", lambda r: r["two cores"], one)

    def p50(part: str) -> float:
        return float(median(r[part] for r in rounds))

    small, default = p50("cheap checkpoints"), p50("default checkpoints")
    latency = [r["latency"] for r in rounds]
    middle, late = median(x["p50"] for x in latency), median(x["p99"] for x in latency)
    print(f"trigger p50, {SMALL} rows: {small:.0f} ms; Spark's default settings: {default:.0f} ms")
    print(f"end to end at {SMALL} messages/s: p50 {middle:.0f} ms, p99 {late:.0f} ms")
    assert arrow.ratio is not None
    assert against_rate.ratio is not None
    assert two.ratio is not None
    return [tuples, rate, arrow, against_rate, few, ready, one, two], [
        Requirement("Arrow, at least 3x tuples", arrow.ratio >= 3, f"{arrow.ratio:.2f}x"),
        Requirement(
            "Arrow, at least 0.5x rate-micro-batch",
            against_rate.ratio >= 0.5,
            f"{against_rate.ratio:.2f}x",
        ),
        Requirement(
            f"trigger p50 of {SMALL} rows, at most 0.5x of the default settings",
            small <= 0.5 * default,
            f"{small / default:.2f}x",
        ),
        Requirement("two cores, at least 1.3x one core", two.ratio >= 1.3, f"{two.ratio:.2f}x"),
        Requirement(
            f"end to end at {SMALL} messages/s", True, f"p50 {middle:.0f} ms, p99 {late:.0f} ms"
        ),
    ]


# --- the parts, each in a process of its own ------------------------------------------------------


def session(master: str = "local[2]", **settings: str) -> SparkSession:
    kept = {"spark.sql.streaming.numRecentProgressUpdates": "1000"}  # of its batches: all
    return spark_session("bench", master, settings=kept | settings, python_path=[str(HERE)])


def batches(frame: DataFrame, folder: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Run a query to nowhere, until it ends or so many batches are done; return its progress."""
    with tempfile.TemporaryDirectory(dir=folder) as checkpoint:
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        if count is None:
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        else:
            query = writer.start()
            while len(query.recentProgress) < count:
                time.sleep(0.05)
            query.stop()
        return [json.loads(one.json) for one in query.recentProgress]


def rows_per_second(progress: dict[str, Any]) -> float:
    return float(progress["numInputRows"] / progress["durationMs"]["triggerExecution"] * 1000)


def sources(folder: Path, is_quick: bool) -> dict[str, float]:
    """Read all rows in one batch, by each source in turn."""
    spark = session()
    spark.dataSource.register(RowByRowSource)
    spark.dataSource.register(ReadyBatchSource)
    url = f"log:{folder}/rows"
    count = sum(1 for _ in numbers(url))

    def read(format_: str, **options: str) -> float:
        frame = spark.readStream.format(format_).option("url", url).options(**options).load()
        return rows_per_second(batches(frame, folder)[0])

    def generate() -> float:
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", count)
        return rows_per_second(batches(source.load(), folder, 1)[0])

    runs: dict[str, Callable[[], float]] = {
        "arrow": lambda: read("penstock"),
        "few": lambda: read("penstock", columns=FEW),
        "ready": lambda: read("ready-batch", rows=str(count), size=str(SIZE)),
        "rate": generate,
    }
    first, each = (1, 1) if is_quick else (FIRST, EACH)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(first + each):
        for name, run in runs.items():
            rate = run()
            if turn >= first:
                found[name].append(rate)
    # Last, and fewer: they take ten times as long, nearly all of it in Python.
    found["rows"] = [read("penstock-rows") for _ in range(each // 2 + 2)][1:]
    return {name: median(rates) for name, rates in found.items()}


def numbers(url: str) -> Iterator[int]:
    with open_reader(url) as reader:
        while (batch := reader.read_batch(10_000, timeout=0)).num_rows:
            yield from range(batch.num_rows)


def small_batches(folder: Path, settings: dict[str, str]) -> float:
    spark = session(**settings)
    source = spark.readStream.format("penstock").option("url", f"log:{folder}/rows")
    frame = source.option("maxOffsetsPerTrigger", SMALL).load()
    done = batches(frame, folder, WARM_UP + COUNTED)[WARM_UP:]
    return float(median(one["durationMs"]["triggerExecution"] for one in done))


def through_a_stage(folder: Path, is_quick: bool, cores: int) -> float:
    """Count the bytes of each payload in Arrow; with one core, all of Spark has only that one."""
    if cores == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spark = session(f"local[{cores}]")
    frame = spark.readStream.format("penstock").option("url", f"log:{folder}/rows").load()

    def stage(parts: Iterator[Any]) -> Iterator[Any]:
        for part in parts:
            yield pa.RecordBatch.from_pydict(
                {"seq": part["seq"], "size": pc.binary_length(part["payload"]).cast(pa.int64())}
            )

    staged = frame.mapInArrow(stage, "seq BIGINT, size BIGINT")
    first, each = (1, 1) if is_quick else (FIRST, EACH)
    rates = [rows_per_second(batches(staged, folder)[0]) for _ in range(first + each)]
    return float(median(rates[first:]))


def latency(folder: Path, is_quick: bool) -> dict[str, float]:
    """From a message being written to a ring to Spark having appended it to a log."""
    spark = session()
    seconds = 10 if is_quick else 20
    ring, log = f"fmq:{folder}/steady", f"log:{folder}/arrived"
    stop = threading.Event()
    with open_writer(f"{ring}?slots=100000&size=32M") as writer:

        def write() -> None:
            began, sent = time.monotonic(), 0
            while not stop.is_set():
                writer.write(b"x" * SIZE)
                sent += 1
                time.sleep(max(0.0, began + sent / SMALL - time.monotonic()))

        writing = threading.Thread(target=write)
        writing.start()
        frame = spark.readStream.format("penstock").option("url", ring).load()
        sink = frame.writeStream.format("penstock").option("url", log)
        query = sink.option("checkpointLocation", f"{folder}/latency").start()
        time.sleep(10)  # to warm up
        warm_ns = time.time_ns()
        time.sleep(seconds)
        stop.set()
        writing.join()
        query.processAllAvailable()
        query.stop()
    delays = []
    with open_reader(log) as reader:
        while (batch := reader.read_batch(10_000, timeout=0)).num_rows:
            sent = batch["time_ns"].to_numpy()
            delays.append((batch["created_ns"].to_numpy() - sent)[sent > warm_ns])
    whole = np.concatenate(delays) / 1e6
    hundredths = quantiles(whole.tolist(), n=100)
    return {"p50": hundredths[49], "p99": hundredths[98]}


PARTS: dict[str, Callable[[Path, bool], Any]] = {
    "sources": sources,
    "cheap checkpoints": lambda folder, _: small_batches(folder, {}),
    "default checkpoints": lambda folder, _: small_batches(folder, DEFAULT_CHECKPOINTS),
    "one core": lambda folder, is_quick: through_a_stage(folder, is_quick, 1),
    "two cores": lambda folder, is_quick: through_a_stage(folder, is_quick, 2),
    "latency": latency,
}


if __name__ == "__main__":
    main()
