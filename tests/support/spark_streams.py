"""What tests of the Spark source and sink do again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import open_reader, open_writer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["fill", "follow", "numbers", "payloads", "progress_of", "run_now", "table"]


def fill(url: str, numbers: Iterable[int], type: int = 0) -> None:
    """Append messages whose payloads are these numbers."""
    with open_writer(url) as writer:
        writer.write_many([b"%d" % number for number in numbers], type)


def payloads(url: str) -> list[bytes]:
    """Return all payloads of a stream, in order."""
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]


def numbers(url: str) -> list[int]:
    """Return the numbers that `fill` wrote, in order."""
    return [int(payload) for payload in payloads(url)]


def table(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    """Return what is in a stream now."""
    return spark.read.format("penstock").options(url=url, **options).load()


def follow(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    """Return a stream as Spark follows it."""
    return spark.readStream.format("penstock").options(url=url, **options).load()


def run_now(
    rows: DataFrame, target: str, checkpoint: Path, seconds: int = 250, **options: Any
) -> StreamingQuery:
    """Write what there is now to a stream, and return the query when it is done."""
    query = (
        rows.writeStream.format("penstock")
        .options(url=target, checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(seconds), "it takes too long"
    finally:
        query.stop()
    return query


def progress_of(query: StreamingQuery) -> list[dict[str, Any]]:
    """Return the batches that a query told of, each as a dictionary."""
    import json

    return [json.loads(progress.json) for progress in query.recentProgress]
