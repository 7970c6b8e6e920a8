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
from pyspark.sql import functions as f

from harness import Requirement, Result, machine, report, save
from nothing import NothingSource
from penstock import open_reader, open_writer
from penstock.core.batch import BATCH_SCHEMA
from penstock.core.provenance import Commit, Origin, Span, Staged
from penstock.core.url import URL
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import run
from penstock.pipeline.run.data_frames import Frames
from penstock.pipeline.run.spark import spark_session
from penstock.pipeline.sink.row_messages import for_output
from penstock.pipeline.source import decode
from penstock.protocols.flight.client import Target
from penstock.protocols.flight.endpoint import FlightEndpoint, note_suffix
from penstock.protocols.flight.staging_client import commit_staged
from ready_batch import ReadyBatchSource
from row_by_row import RowByRowSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from penstock.pipeline.run import Progress

HERE = Path(__file__).parent

SIZE = 100
#: Batches of a query that are not counted, and those that are: Java compiles what runs often, and
#: a batch takes half as long after the first hundred.
WARM_UP, COUNTED = 100, 60
#: Queries that read all rows in one batch: those that are not counted, and how often each counts.
FIRST, EACH = 8, 5
#: Columns of those who do not need all ten.
FEW = "seq,time,payload"
#: Rows of the batches whose commits are compared.
FEW_ROWS, MANY_ROWS = 10_000, 1_000_000
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

    through = "through a pipeline"
    option = result(
        "struct, the source's option", through, lambda r: r["pipelines"]["option"], None
    )
    yaml_ = result("struct, a YAML source", through, lambda r: r["pipelines"]["yaml"], option)
    stage = result("struct, in a stage", through, lambda r: r["pipelines"]["stage"], option)
    each = "three streams of one"
    before = result(
        "a row for each, decoded in a stage", each, lambda r: r["streams"]["before"], None
    )
    after = result(
        "a row for all, decoded in the source", each, lambda r: r["streams"]["after"], before
    )
    plain = result(
        "the same of undecoded rows, a row for each",
        each,
        lambda r: r["streams"]["plain before"],
        None,
    )
    plain_after = result("a row for all", each, lambda r: r["streams"]["plain after"], plain)

    def p50(part: str) -> float:
        return float(median(r[part] for r in rounds))

    small, default = p50("cheap checkpoints"), p50("default checkpoints")
    latency = [r["latency"] for r in rounds]
    middle, late = median(x["p50"] for x in latency), median(x["p99"] for x in latency)
    print(f"trigger p50, {SMALL} rows: {small:.0f} ms; Spark's default settings: {default:.0f} ms")
    start, least = (median(r["starts"][name] for r in rounds) for name in ("penstock", "nothing"))
    print(f"start: {start * 1000:.0f} ms, of a source that does nothing: {least * 1000:.0f}")
    print(f"end to end at {SMALL} messages/s: p50 {middle:.0f} ms, p99 {late:.0f} ms")
    few_rows, many_rows = (
        median(r["commits"][str(rows)] for r in rounds) for rows in (FEW_ROWS, MANY_ROWS)
    )
    print(
        f"a commit beyond the append: {few_rows:.1f} ms, of {MANY_ROWS:,} rows {many_rows:.1f} ms"
    )
    assert arrow.ratio is not None
    assert against_rate.ratio is not None
    assert two.ratio is not None
    assert yaml_.ratio is not None
    assert after.ratio is not None
    pipelines = [option, yaml_, stage, before, after, plain, plain_after]
    return [tuples, rate, arrow, against_rate, few, ready, one, two, *pipelines], [
        Requirement(
            "a YAML source with struct decoding, at least 0.9x the source's option",
            yaml_.ratio >= 0.9,
            f"{yaml_.ratio:.2f}x",
        ),
        Requirement(
            "three streams of the same rows, at least 2x a row for each",
            after.ratio >= 2,
            f"{after.ratio:.2f}x",
        ),
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
        Requirement(
            "start of a query, at most 1.5x of a source that does nothing",
            start <= 1.5 * least,
            f"{start / least:.2f}x",
        ),
        Requirement("two cores, at least 1.3x one core", two.ratio >= 1.3, f"{two.ratio:.2f}x"),
        Requirement(
            f"commit of {MANY_ROWS:,} rows beyond the append, at most 1.5x of {FEW_ROWS:,}",
            many_rows <= 1.5 * few_rows,
            f"{many_rows / few_rows:.2f}x",
        ),
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
        for name, read_all in runs.items():
            rate = read_all()
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


#: A struct of SIZE bytes.
LAYOUT = (
    "double azimuth; uint32_t pulse; uint16_t gates; uint16_t sweep; float dbz[20]; uint32_t end;"
)
DECODE = {"format": "struct", "layout": LAYOUT, "packed": True}
KEEP = ["time_ns"]


def pipelines(folder: Path, is_quick: bool) -> dict[str, float]:
    """Decode all rows in one batch, as YAML says it, by the option, and in a stage."""
    spark = session()
    url = f"log:{folder}/rows"
    option = {"url": url, "decode": json.dumps({**DECODE, "keep": KEEP})}
    plain = spark.readStream.format("penstock").option("url", url).load()
    described = Pipeline("p").source("rows", url=url, decode={**DECODE, "keep": KEEP})
    frames: dict[str, Callable[[], DataFrame]] = {
        "option": lambda: spark.readStream.format("penstock").options(**option).load(),
        "yaml": lambda: Frames(described, spark).rows("rows"),
        "stage": lambda: decode(plain, {**DECODE, "keep": KEEP}),
    }
    first, each = (1, 1) if is_quick else (FIRST, EACH)
    found: dict[str, list[float]] = {name: [] for name in frames}
    for turn in range(first + each):
        for name, make in frames.items():
            rate = rows_per_second(batches(make(), folder)[0])
            if turn >= first:
                found[name].append(rate)
    return {name: median(rates) for name, rates in found.items()}


def three_streams(folder: Path, is_quick: bool) -> dict[str, float]:
    """Write all rows to three logs: as pipelines do it, and as they did it before."""
    spark = session()
    url = f"log:{folder}/rows"
    first, each = (1, 1) if is_quick else (FIRST // 2, EACH)
    rates: dict[str, list[float]] = {}
    for turn in range(first + each):
        for kind, decoding in (("", {**DECODE, "keep": KEEP}), ("plain ", None)):
            for name, write in (("before", before), ("after", after)):
                with tempfile.TemporaryDirectory(dir=folder) as target:
                    rate = write(spark, url, Path(target), decoding)
                if turn >= first:
                    rates.setdefault(kind + name, []).append(rate)
    return {name: median(found) for name, found in rates.items()}


def after(spark: SparkSession, url: str, folder: Path, decoding: dict[str, Any] | None) -> float:
    more = {} if decoding is None else {"decode": decoding}
    pipeline = Pipeline("p").source("rows", url=url, **more)
    for number in range(3):
        pipeline = pipeline.sink(f"s{number}", from_="rows", url=f"log:{folder}/{number}")
    seen: list[Progress] = []
    run(plan(pipeline), spark=spark, checkpoint=f"{folder}/c", once=True, on_progress=seen.append)
    last = max(seen, key=lambda one: one.rows)
    return last.rows / last.batch_seconds


def before(spark: SparkSession, url: str, folder: Path, decoding: dict[str, Any] | None) -> float:
    """Send a row for each stream, with its name, and decode payloads behind the source."""
    rows = spark.readStream.format("penstock").option("url", url).load()
    if decoding is not None:
        rows = decode(rows, decoding)
    names = [f.lit(f"s{number}") for number in range(3)]
    one = for_output(rows, "s0").drop("output")
    many = one.select(f.explode(f.array(*names)).alias("output"), "*")
    outputs = json.dumps({f"s{number}": f"log:{folder}/{number}" for number in range(3)})
    writer = many.writeStream.format("penstock").option("outputs", outputs)
    query = writer.option("checkpointLocation", f"{folder}/c").trigger(availableNow=True).start()
    query.awaitTermination()
    return rows_per_second(json.loads(query.recentProgress[0].json))


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


def starts(folder: Path, is_quick: bool) -> dict[str, float]:
    """Take the time of a query of one batch, from its description to its end, without the batch."""
    spark = session()
    spark.dataSource.register(NothingSource)
    with open_writer(f"log:{folder}/little") as writer:
        writer.write(b"x")

    def start(format_: str, **options: str) -> float:
        began = time.monotonic()
        frame = spark.readStream.format(format_).options(**options).load()
        done = batches(frame, folder)
        seconds = time.monotonic() - began
        return float(seconds - sum(one["durationMs"]["triggerExecution"] for one in done) / 1000)

    found: dict[str, list[float]] = {"penstock": [], "nothing": []}
    for turn in range(3 if is_quick else 12):
        for name, taken in found.items():
            options = {"url": f"log:{folder}/little"} if name == "penstock" else {}
            seconds = start(name, **options)
            if turn:
                taken.append(seconds)
    return {name: median(taken) for name, taken in found.items()}


def commits(folder: Path, is_quick: bool) -> dict[str, float]:
    """Milliseconds that a commit takes beyond the append, by the rows of the batch.

    The sink as Spark's driver has it, and tasks that have staged with a server in another process.
    """
    root = folder / "served"
    root.mkdir(exist_ok=True)
    program = [str(Path(sys.executable).with_name("penstock")), "serve", "flight", "--quiet"]
    with subprocess.Popen(
        [*program, "--root", str(root), "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" at ")[1].strip()
            return time_commits(url, is_quick)
        finally:
            server.terminate()


def time_commits(server: str, is_quick: bool) -> dict[str, float]:
    """Commit small and large batches in turn to one log, so that both meet the same.

    A commit opens the log, which takes longer the more segments it has.
    """
    endpoint, url = FlightEndpoint(), URL.parse(f"{server}rows?kind=log")
    beyond: dict[int, list[float]] = {FEW_ROWS: [], MANY_ROWS: []}
    end = 0
    for turn in range(4 if is_quick else 16):
        for batch, (rows, times) in enumerate(beyond.items(), start=2 * turn):
            files = [stage(endpoint, url, batch, task, rows // 2) for task in range(2)]
            origin = Origin({"0 rows": Span(1, end, end + rows)})
            end += rows
            commit = Commit("bench", batch, files, origin)
            began = time.perf_counter()
            endpoint.noted(url, commit)
            done = commit_staged(Target.of(url), commit, note_suffix(url))
            endpoint.unstage(url, commit, is_done=True)
            times.append(time.perf_counter() - began - done.seconds)
            assert done.new == rows
    return {str(rows): median(times[1:]) * 1000 for rows, times in beyond.items()}


def stage(endpoint: FlightEndpoint, url: URL, batch: int, task: int, rows: int) -> Staged:
    part = endpoint.stage(url, "bench", batch, task)
    at_once = 10_000
    columns = [
        pa.repeat(pa.scalar(bytes(SIZE) if field.name == "payload" else None, field.type), at_once)
        if field.nullable or field.name == "payload"
        else pa.repeat(pa.scalar(0, field.type), at_once)
        for field in BATCH_SCHEMA
    ]
    some = pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)
    for start in range(0, rows, at_once):
        part.add(some.slice(0, min(at_once, rows - start)))
    return part.finish()


PARTS: dict[str, Callable[[Path, bool], Any]] = {
    "sources": sources,
    "cheap checkpoints": lambda folder, _: small_batches(folder, {}),
    "default checkpoints": lambda folder, _: small_batches(folder, DEFAULT_CHECKPOINTS),
    "one core": lambda folder, is_quick: through_a_stage(folder, is_quick, 1),
    "two cores": lambda folder, is_quick: through_a_stage(folder, is_quick, 2),
    "latency": latency,
    "starts": starts,
    "pipelines": pipelines,
    "streams": three_streams,
    "commits": commits,
}


if __name__ == "__main__":
    main()
