"""Spark reads streams: what, from where, how much, and as which rows."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from penstock import StreamId, open_reader, open_writer
from support.spark_streams import fill, follow, numbers, payloads, progress_of, run_now, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds


def test_the_fields_of_a_message_are_columns_of_the_same_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"fmq:{tmp_path}/q"
    stream = StreamId.generate(None, None, "radar", "beams")
    with open_writer(url) as writer:
        writer.write(b"one", 3, 4, time_ns=1_000_000_001, stream=stream, attributes=b"head")
        writer.write(b"", time_ns=-1)
    fill(f"log:{tmp_path}/other", [7])
    with open_reader(url) as reader:
        messages = list(reader.available())
    pattern = f"fmq:{tmp_path}/*, log:{tmp_path}/oth[e]r"
    found = table(spark, pattern).selectExpr("*", "unix_micros(time) AS us").collect()
    rows = sorted((row for row in found if row.url == url), key=lambda row: row.seq)
    for row, message in zip(rows, messages, strict=True):
        assert (row.seq, row.time_ns, row.created_ns) == message[:3]
        assert (row.type, row.subtype) == (message.type, message.subtype)
        assert row.stream == (message.stream and bytes(message.stream))
        assert row.attributes == message.attributes
        assert row.payload == message.payload
    assert [row.us for row in rows] == [1_000_000, -1]  # towards the past, before 1970 too
    assert [row.payload for row in found if row.url == f"log:{tmp_path}/other"] == [b"7"]


def test_only_the_columns_that_are_named_come(spark: SparkSession, tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    with open_writer(url) as writer:
        writer.write(b"one", 3, time_ns=1_500)
    rows = table(spark, url, columns="type, Payload, url")
    assert rows.columns == ["type", "payload", "url"]
    assert [tuple(row) for row in rows.collect()] == [(3, b"one", url)]
    with pytest.raises(PySparkException, match="'speed' is no column; there are url, seq"):
        table(spark, url, columns="seq, speed")
    with pytest.raises(PySparkException, match="decode says it"):
        table(spark, url, columns="seq", decode="json", schema="dbz DOUBLE")


def test_a_mistake_is_told_in_one_line_with_a_hint(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException) as caught:
        table(spark, f"fmq:{tmp_path}/q", startingOfsets="1")
    assert "option startingofsets='1': there is no such option" in str(caught.value)
    assert "hint: did you mean startingOffsets?" in str(caught.value)


def test_a_table_of_nothing_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    empty, full = f"fmq:{tmp_path}/empty", f"fmq:{tmp_path}/full"
    fill(empty, [])
    fill(full, range(3))
    assert table(spark, empty).collect() == []
    assert table(spark, full, startingOffsets="latest").count() == 0
    assert table(spark, full, endingTime="2001-01-01").count() == 0


def test_a_stream_is_read_once_whatever_it_is_called(spark: SparkSession, tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/q", range(3))
    fill(f"log:{tmp_path}/q", range(4))
    names = ("fmq:{}/q", "fmq:{}/../{}/q.fmq", "log:{}/q", "fmq:{}/*")
    urls = [name.format(tmp_path, tmp_path.name) for name in names]
    rows = spark.read.format("penstock").load(urls)
    assert sorted(rows.groupBy("url").count().collect()) == [(urls[0], 3), (urls[2], 4)]


def test_a_schema_that_a_stream_does_not_have_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(url, range(3))
    same = spark.read.format("penstock").schema(table(spark, url).schema).load(url)
    assert same.count() == 3
    other = spark.read.format("penstock").schema("dbz DOUBLE")
    with pytest.raises(PySparkException, match=r"a stream has its own[\s\S]*hint: leave .schema"):
        other.load(url).count()


def test_a_query_goes_on_where_it_was_with_batches_of_the_size_allowed(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, target = f"fmq:{tmp_path}/q", f"log:{tmp_path}/out"
    fill(source, range(250))
    rows = follow(spark, source, maxOffsetsPerTrigger=100).select("payload")
    query = run_now(rows, target, tmp_path / "checkpoint")
    batches = progress_of(query)
    assert [batch["numInputRows"] for batch in batches if batch["numInputRows"]] == [100, 100, 50]
    offset = batches[-1]["sources"][0]["endOffset"][source]
    assert (offset["end"], offset["lost"], offset["lost_unknown"]) == (250, 0, 0)
    assert batches[-1]["sources"][0]["latestOffset"][source]["end"] == 250
    fill(source, range(250, 260))
    run_now(rows, target, tmp_path / "checkpoint")
    assert sorted(numbers(target)) == list(range(260))


def fill_large(url: str, numbers: Iterable[int]) -> None:
    """Append messages too large for all of them to be in the pipes between Spark's processes."""
    with open_writer(url) as writer:
        writer.write_many([b"%20000d" % number for number in numbers])


def overwriting(url: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a stage that overwrites most of the ring when it sees the first message."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 0 in batch.column("seq").to_pylist():
                fill_large(url, range(2000, 4000))
            yield batch.select(["payload"])

    return stage


def test_a_ring_overwritten_between_planning_and_reading_is_never_passed_over_in_silence(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Once that gave 96 of 2,000 rows, and the query succeeded."""
    urls = [f"fmq:{tmp_path}/{name}" for name in ("strict", "lenient")]
    target, losses = f"log:{tmp_path}/out", f"log:{tmp_path}/losses"
    for url in urls:
        fill_large(f"{url}?slots=2048&size=64M", range(2000))
    with few_rows_at_once(spark):  # so that the stage sees the first while the last are not read
        stage = follow(spark, urls[0]).mapInArrow(overwriting(urls[0]), "payload BINARY")
        with pytest.raises(StreamingQueryException) as caught:
            run_now(stage, target, tmp_path / "c1")
        said = re.search(
            r"([\d,]+) messages? lost \(seq (\d+)(?: to (\d+))?\): overwritten", str(caught.value)
        )
        assert said, str(caught.value)
        assert "hint: make the queue larger, let the writer wait (hold=NAME)" in str(caught.value)
        rows = follow(spark, urls[1], failOnDataLoss="false", lossUrl=losses)
        stage = rows.mapInArrow(overwriting(urls[1]), "payload BINARY")
        query = run_now(stage, target, tmp_path / "c2")
    found = numbers(target)
    ranges = [json.loads(payload) for payload in payloads(losses)]
    lost = [n for r in ranges for n in range(r["first"], r["last"] + 1)]
    assert sorted(found + lost) == list(range(2000))
    assert lost
    assert progress_of(query)[-1]["sources"][0]["endOffset"][urls[1]]["lost"] == len(lost)


@contextlib.contextmanager
def few_rows_at_once(spark: SparkSession) -> Iterator[None]:
    """Let Spark hand over 50 rows at a time from one Python process to the next."""
    key = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(key)
    spark.conf.set(key, "50")
    try:
        yield
    finally:
        spark.conf.set(key, str(before))


def test_payloads_are_decoded_where_they_are_read(spark: SparkSession, tmp_path: Path) -> None:
    source = f"fmq:{tmp_path}/q"
    with open_writer(source) as writer:
        writer.write(b'{"dbz": 45.5, "gate": 3}')
    rows = table(spark, source, decode="json", schema="dbz DOUBLE, gate INT")
    assert rows.columns[:2] == ["url", "seq"]
    assert rows.columns[-2:] == ["dbz", "gate"]
    assert [(row.seq, row.dbz, row.gate) for row in rows.collect()] == [(0, 45.5, 3)]


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_filters_say_what_of_a_table_is_read(
    spark: SparkSession, tmp_path: Path, pushdown: str
) -> None:
    url = f"log:{tmp_path}/log"
    fill(url, range(100))
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, pushdown)
    try:
        rows = spark.read.format("penstock").option("minPartitions", 4).load(url)
        some = rows.where("seq >= 40 and seq < 42 and payload != '40'")
        assert [row.seq for row in some.collect()] == [41]
        # Two messages make two tasks at most.
        assert some.rdd.getNumPartitions() == (2 if pushdown == "true" else 4)
    finally:
        spark.conf.set(setting, "true")


def test_a_stream_is_a_view_of_sql_and_no_table(spark: SparkSession, tmp_path: Path) -> None:
    fill(f"log:{tmp_path}/log", range(10))
    options = f"USING penstock OPTIONS (url 'log:{tmp_path}/log')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW beams {options}")
    found = spark.sql("SELECT seq FROM beams WHERE seq > 6 ORDER BY seq").collect()
    assert [row.seq for row in found] == [7, 8, 9]
    spark.catalog.dropTempView("beams")
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE beams {options}")
