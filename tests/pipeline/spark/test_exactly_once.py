"""Every message goes from a source through a stage into a log once, unharmed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock import NotFound, create, describe, open_reader
from support.exactly_once import check_stream, hashed, write_messages
from support.spark_streams import follow, progress_of, run_now

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds
FULL = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize("count", [pytest.param(1_000_000, id="full", marks=FULL)])
def test_what_is_there_is_delivered_once(spark: SparkSession, tmp_path: Path, count: int) -> None:
    source, target = f"log:{tmp_path}/in", f"log:{tmp_path}/out"
    write_messages(f"{source}?sync=none", range(count))
    rows = hashed(follow(spark, source, maxOffsetsPerTrigger=count // 4, minPartitions=4))
    query = run_now(rows.select("payload"), target, tmp_path / "checkpoint", seconds=800)
    assert len([p for p in progress_of(query) if p["numInputRows"]]) == 4
    check_stream(target, range(count))


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, id="full", marks=FULL)])
def test_what_comes_is_delivered_once_and_the_writer_waits_for_the_query(
    spark: SparkSession, tmp_path: Path, count: int
) -> None:
    """A ring much smaller than the stream: nothing is lost, since what is not done is held."""
    source, target = f"fmq:{tmp_path}/in", f"log:{tmp_path}/out"
    create(f"{source}?slots={count // 3}&size=64M")
    held = f"{source}?hold=spark&keep=true"
    writer = threading.Thread(target=write_messages, args=(held, range(count)))
    rows = hashed(follow(spark, source, hold="spark", maxOffsetsPerTrigger=count // 4))
    query = (
        rows.select("payload")
        .writeStream.format("penstock")
        .options(url=target, checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    writer.start()
    try:
        wait_for_messages(target, count, 250 if count < 100_000 else 800)
        assert query.exception() is None
        assert len(progress_of(query)) > 1
    finally:
        query.stop()
    writer.join(10)
    assert not writer.is_alive()
    assert describe(source).youngest_seq == count - 1
    check_stream(target, range(count))


def wait_for_messages(url: str, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open_reader(url) as reader:
                if reader.bounds().end >= count:
                    return
        except NotFound:
            pass
        time.sleep(0.1)
    pytest.fail(f"{url} has no {count:,} messages after {seconds} seconds")
