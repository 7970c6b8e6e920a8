"""Spark writes to streams: exactly once, to one or to many, or with one clear message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from penstock import open_writer
from support.spark_streams import fill, follow, numbers

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds


def test_a_commit_that_fails_is_replayed_and_appended_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = f"fmq:{tmp_path}/q"
    targets = {name: f"log:{tmp_path}/{name}?lock_timeout=200ms" for name in ("a", "b")}
    fill(source, range(100))
    rows = follow(spark, source, minPartitions=2).selectExpr(
        "payload", "if(seq % 2 = 0, 'a', 'b') AS output"
    )

    def run() -> None:
        query = (
            rows.writeStream.format("penstock")
            .options(outputs=json.dumps(targets), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(250)

    with open_writer(f"log:{tmp_path}/b"), pytest.raises(StreamingQueryException) as caught:
        run()
    assert "LockTimeout" in str(caught.value)
    assert numbers(f"log:{tmp_path}/a") == list(range(0, 100, 2))  # was done before b failed
    run()
    assert sorted(numbers(f"log:{tmp_path}/a")) == list(range(0, 100, 2))
    assert sorted(numbers(f"log:{tmp_path}/b")) == list(range(1, 100, 2))
    left = [path for path in (tmp_path / ".penstock-staging").rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.full
def test_a_column_names_the_url(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(10).selectExpr(
        "CAST(id AS STRING) AS payload",
        f"concat('log:{tmp_path}/', id % 3) AS url",
        "timestamp_seconds(id) AS time",
    )
    staging = tmp_path / "staging"
    rows.write.format("penstock").mode("append").option("staging", str(staging)).save()
    assert [sorted(numbers(f"log:{tmp_path}/{i}")) for i in range(3)] == [
        [0, 3, 6, 9],
        [1, 4, 7],
        [2, 5, 8],
    ]
    assert not list(staging.rglob("*.arrow"))


def test_a_part_that_is_written_twice_is_appended_once(spark: SparkSession, tmp_path: Path) -> None:
    target = f"log:{tmp_path}/out"
    rows = spark.range(10).selectExpr("CAST(id AS STRING) AS payload")

    def write(**options: Any) -> None:
        writer = rows.write.format("penstock").mode("append").options(url=target, **options)
        writer.save()

    write(query="storm/watch", batch=0)
    write(query="storm/watch", batch=0)
    write()
    assert sorted(numbers(target)) == sorted(list(range(10)) * 2)
    with pytest.raises(PySparkException, match="query and batch go together"):
        write(query="storm/watch")


def test_rows_that_fit_no_message_are_told_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    def write(*columns: str) -> str:
        writer = spark.range(1).selectExpr(*columns).write.format("penstock").mode("append")
        with pytest.raises(PySparkException) as caught:
            writer.save(f"log:{tmp_path}/out")
        return str(caught.value)

    said = write("'x' AS payload", "id")
    assert "option columns='id': have no place in a message" in said
    assert "hint: select the columns that are to be kept" in said
    assert "column payload should be a value in every row, found null" in write("NULL AS payload")
    assert not (tmp_path / "out").exists()


def test_what_a_table_that_is_not_appended_had_staged_is_removed(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(1).selectExpr("repeat('x', 10000) AS payload")
    writer = rows.write.format("penstock").mode("append")
    with pytest.raises(PySparkException, match="10,000 bytes does not fit"):
        writer.save(f"fmq:{tmp_path}/small?slots=4&size=4k")
    assert list((tmp_path / ".penstock-staging").iterdir()) == []
