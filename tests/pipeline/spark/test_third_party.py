"""An endpoint of somebody else, of which we know only what it says that it can do, and Spark."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from penstock.core.provenance import AnotherBatch, Origin, Span
from penstock.queue.append_once import append_once
from support.commit_lives import stage
from support.spark_streams import fill, follow, numbers, payloads, run_now, table

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.mark.timeout(300)
def test_spark_reads_it_and_writes_it_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    source, target = f"sqlite:{tmp_path}/in.db", f"sqlite:{tmp_path}/out.db"
    checkpoint = tmp_path / "checkpoint"
    fill(source, range(300))
    rows = follow(spark, source, maxOffsetsPerTrigger=100, minPartitions=2).select("payload")
    run_now(rows, target, checkpoint)
    assert sorted(numbers(target)) == list(range(300))
    # What Spark does that died after the last batch was appended: it is planned and run again.
    (last,) = [path for path in (checkpoint / "commits").iterdir() if path.name == "2"]
    last.unlink()
    fill(source, range(300, 400))
    run_now(rows, target, checkpoint)
    assert sorted(numbers(target)) == list(range(400))
    assert table(spark, target).count() == 400
    assert not (tmp_path / "out.db.commits.json").exists()  # the stream itself has the notes
    assert not list(tmp_path.glob(".penstock-staging/*"))


def test_a_batch_is_skipped_completed_or_refused(tmp_path: Path) -> None:
    url, folder = f"sqlite:{tmp_path}/out.db", tmp_path / "staging"
    parts = stage(url, folder, 30, random.Random(0))
    made_of = Origin({"0 log:/a": Span(7, 0, 30)})
    assert append_once(url, parts, "q", 0, folder, made_of) == 30
    again = stage(url, folder, 30, random.Random(1))  # in another order, as after a shuffle
    assert append_once(url, again, "q", 0, folder, made_of) == 0
    with pytest.raises(AnotherBatch, match="batch 0 is made of"):
        append_once(url, again, "q", 0, folder, Origin({"0 log:/a": Span(7, 0, 40)}))
    assert append_once(url, again, "another", 0, folder, made_of) == 30
    assert len(payloads(url)) == 60
