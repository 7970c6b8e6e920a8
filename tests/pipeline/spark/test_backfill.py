"""A backfill beside the live run: where the ranges meet, each row is there once."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from penstock import open_reader, open_writer
from penstock.core.errors import ConfigError, InvalidOption
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import Backfill, NothingToDo, Outcome, Progress, run
from support.spark_pipelines import once
from support.spark_streams import payloads

SECOND = 1_000_000_000


def write(folder: Path, first: int, end: int) -> None:
    """Append messages by and by, so that their times of appending differ."""
    with open_writer(f"log:{folder}/in") as writer:
        for i in range(first, end):
            writer.write(b"%d" % i)
            time.sleep(0.0002)


def appended(folder: Path) -> list[int]:
    with open_reader(f"log:{folder}/in") as reader:
        return [message.created_ns for message in reader.available()]


def pipeline_of(folder: Path, **source: Any) -> Pipeline:
    return (
        Pipeline("p")
        .source("a", url=f"log:{folder}/in", **source)
        .stage("n", from_="a", sql="select payload, cast(seq as int) as n from a")
        .sink("out", from_="n", url=f"log:{folder}/out")
        .sink("files", from_="n", parquet=str(folder / "files"))
    )


def backfill(
    folder: Path, spark: SparkSession, start: int, end: int, by: Any = "append", **more: Any
) -> Outcome:
    return run(
        plan(pipeline_of(folder, **more.pop("source", {}))),
        spark=spark,
        checkpoint=str(folder / "checkpoints"),
        backfill=Backfill(start, end, by),
        **more,
    )


def check(folder: Path, expected: set[int]) -> None:
    found = [int(payload) for payload in payloads(f"log:{folder}/out")]
    assert sorted(found) == sorted(expected)
    files = ds.dataset(folder / "files", exclude_invalid_files=False).to_table()
    assert sorted(files["n"].to_pylist()) == sorted(expected)


def try_seam(folder: Path, spark: SparkSession, random_: random.Random) -> None:
    """Begin live somewhere, and fill in ranges before, across and after that, some twice."""
    before, after = random_.randint(1, 60), random_.randint(0, 60)
    write(folder, 0, before)
    live = pipeline_of(folder, startingOffsets="latest", maxOffsetsPerTrigger=25)
    once(live, spark, folder)
    if random_.random() < 0.5:  # it has planned nothing yet, and begins there all the same
        after = max(1, after)
    write(folder, before, before + after)
    total, times = before + after, appended(folder)
    expected = set(range(before, total))
    for _ in range(random_.randint(1, 3)):
        first, last = sorted(random_.sample(range(total + 1), 2)) if total else (0, 0)
        start = times[first]
        end = times[last] if last < total else times[-1] + SECOND
        try:
            backfill(folder, spark, start, end, source={"maxOffsetsPerTrigger": 20})
        except NothingToDo:
            assert first >= before or set(range(first, min(last, before))) <= expected
        expected |= set(range(first, min(last, before)))
        if random_.random() < 0.5:
            once(live, spark, folder)
    once(live, spark, folder)
    check(folder, expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_rows_are_there_once_where_backfills_and_the_live_run_meet(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    try_seam(tmp_path, spark, random.Random(seed))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_twenty_random_seams(spark: SparkSession, tmp_path: Path) -> None:
    for seed in range(100, 120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try_seam(folder, spark, random.Random(seed))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_backfill_works_while_the_live_run_does(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, 0, 500)
    times = appended(tmp_path)
    live = pipeline_of(tmp_path, startingOffsets="latest")
    done: list[Outcome] = []
    seen = 500

    def beside(progress: Progress) -> None:
        """Fill in all that was before, when the live run has had its first batch."""
        if progress.batches and not done:
            now = time.time_ns()
            source = {"maxOffsetsPerTrigger": 100}
            done.append(backfill(tmp_path, spark, times[0], now, source=source))

    def stop() -> bool:
        nonlocal seen
        if seen < 700:
            write(tmp_path, seen, seen + 20)
            seen += 20
        rows = [int(payload) for payload in payloads(f"log:{tmp_path}/out")] if done else []
        return len(rows) >= 700

    run(
        plan(live),
        spark=spark,
        checkpoint=str(tmp_path / "checkpoints"),
        on_progress=beside,
        should_stop=stop,
    )
    assert done[0].rows == 500
    check(tmp_path, set(range(700)))


@pytest.mark.full
def test_by_source_takes_what_happened_then_in_whatever_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    order = list(range(60))
    random.Random(5).shuffle(order)
    base = 1_700_000_000 * SECOND
    with open_writer(f"log:{tmp_path}/in") as writer:
        for happened in order:
            writer.write(b"%d" % happened, time_ns=base + happened * SECOND)
    live = pipeline_of(tmp_path, startingOffsets=40)
    once(live, spark, tmp_path)
    first = backfill(tmp_path, spark, base + 10 * SECOND, base + 30 * SECOND, "source")
    second = backfill(tmp_path, spark, base + 20 * SECOND, base + 50 * SECOND, "source")
    found = sorted(int(payload) for payload in payloads(f"log:{tmp_path}/out"))
    assert found == sorted([*order[40:], *(n for n in order[:40] if 10 <= n < 50)])
    assert (first.rows, second.rows) == (
        sum(10 <= n < 30 for n in order[:40]),
        sum(30 <= n < 50 for n in order[:40]),
    )


def test_a_range_that_is_empty_or_gone_is_said(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, 0, 20)
    times = appended(tmp_path)
    with pytest.raises(NothingToDo, match=r"p-out: there is no message from 2001-.* to 2002-"):
        backfill(tmp_path, spark, 978307200 * SECOND, 1009843200 * SECOND)
    once(pipeline_of(tmp_path, startingOffsets=5), spark, tmp_path)
    with pytest.raises(NothingToDo, match="are the live run's, which began before them"):
        backfill(tmp_path, spark, times[5], times[19])
    assert backfill(tmp_path, spark, times[0], times[10]).rows == 5
    assert backfill(tmp_path, spark, times[0], times[10]).rows == 0  # the same: it is done
    with pytest.raises(NothingToDo, match="earlier backfills have all messages from"):
        backfill(tmp_path, spark, times[2], times[10])
    check(tmp_path, set(range(20)))
    # A ring that has overwritten what is asked for.
    with open_writer(f"fmq:{tmp_path}/ring?slots=16") as writer:
        writer.write_many([b"old"] * 8)
        time.sleep(0.01)
        middle = time.time_ns()
        time.sleep(0.01)
        writer.write_many([b"%d" % i for i in range(40)])
    ring = Pipeline("r").source("a", url=f"fmq:{tmp_path}/ring")
    made = plan(ring.sink("out", from_="a", url=f"log:{tmp_path}/ring_out"))
    where = str(tmp_path / "checkpoints")
    gone = r"sources\.a\.url: .* has nothing any more from .*are gone \(overwritten\)"
    with pytest.raises(ConfigError, match=gone):
        run(made, spark=spark, checkpoint=where, backfill=Backfill(middle - SECOND, middle))
    with pytest.raises(ConfigError, match=r"what was appended before .* is gone") as caught:
        run(made, spark=spark, checkpoint=where, backfill=Backfill(middle, time.time_ns()))
    assert "failOnDataLoss: false takes what is there" in str(caught.value.hint)


def test_times_are_read_as_people_say_them() -> None:
    now = 1_700_000_000 * SECOND
    made = Backfill.parse("-10m", "now", "append", now)
    assert (made.start, made.end) == (now - 600 * SECOND, now)
    assert made.name == "from-20231114T220320Z-to-20231114T221320Z"
    assert Backfill.parse("yesterday 12:00", "today", "source", now).name == (
        "from-20231113T120000Z-to-20231114T000000Z-by-source"
    )
    with pytest.raises(InvalidOption, match="the range is empty"):
        Backfill.parse("now", "-10m", "append", now)
    with pytest.raises(InvalidOption, match="--from"):
        Backfill.parse("lately", "now", "append", now)
