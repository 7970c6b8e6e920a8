"""Moments in Spark: the beams of a stream, whole across tasks and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import open_reader, open_writer
from penstock.radar import moments
from support.pulses import scan
from support.spark_streams import follow, table

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

COLUMNS = ["time_ns", "samples", "azimuth", "sweep_number", "DBZ", "VEL", "ZDR", "radar"]


def test_beams_are_those_of_the_plain_function_however_spark_cuts(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"log:{tmp_path}/iq"
    with open_writer(url) as writer:
        writer.write_many(scan(600, every=25, sweep=300))
    with open_reader(url) as reader:
        plain = moments(reader.read_batch(10_000)).select(COLUMNS).to_pylist()
    rows = moments(table(spark, url, minPartitions=4)).select(COLUMNS).toArrow()
    assert rows.sort_by("time_ns").to_pylist() == plain
    query = (
        moments(follow(spark, url, maxOffsetsPerTrigger=250, minPartitions=2))
        .writeStream.format("memory")
        .queryName("beams_of_moments")
        .option("checkpointLocation", f"{tmp_path}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(250)
    rows = spark.table("beams_of_moments").select(COLUMNS).toArrow()
    assert rows.sort_by("time_ns").to_pylist() == plain  # the last pulse ends its sweep
