"""Payloads become columns in a real Spark."""

from __future__ import annotations

import datetime as dt
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.sql import Observation
from pyspark.sql.types import ArrayType, FloatType

import penstock
from penstock.core.dead_letter import DeadLetter
from penstock.core.errors import InvalidOption
from penstock.pipeline.source.decoded_rows import decode, split_failures
from penstock.pipeline.source.ranges import SPARK_SCHEMA
from penstock.pipeline.source.stream import PenstockSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

PAYLOADS = [struct.pack("<d", 0.5), b"short", struct.pack("<d", 1.5), b""]


def frame(spark: SparkSession, payloads: Sequence[bytes]) -> DataFrame:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 600_000, dt.UTC)
    rows: list[Any] = [
        ("fmq:/radar/iq", seq, 10 + seq, 20 + seq, 7, 8, b"s" * 16, None, payload, moment)
        for seq, payload in enumerate(payloads)
    ]
    return spark.createDataFrame(rows, SPARK_SCHEMA)


def test_every_type_of_a_struct_arrives_in_spark(spark: SparkSession) -> None:
    layout = [
        {"name": "a", "type": "u1"},
        {"name": "b", "type": ">u8"},
        {"name": "c", "type": "c8", "shape": [2]},
        {"name": "d", "type": "f2"},
        {"name": "e", "type": "S4"},
        {"name": "f", "type": "?"},
        {"name": "g", "type": "i2", "shape": [2, 2]},
        {"name": "h", "type": "V2"},
        {"name": "i", "type": "f4", "shape": [-1]},
    ]
    payload = (
        b"\xff" + struct.pack(">Q", 2**64 - 1) + np.array([1 + 2j, 3 - 4j], "<c8").tobytes()
        + np.array([0.5], "<f2").tobytes() + b"ab\0\0\x01"
        + struct.pack("<4h", 1, 2, 3, 4) + b"\x00\x01" + struct.pack("<2f", 0.5, 1.5)
    )  # fmt: skip
    df = decode(frame(spark, [payload]), format="struct", layout=layout, keep=["seq", "time"])
    (row,) = df.collect()
    assert row.asDict(recursive=True) == {
        "seq": 0,
        "time": dt.datetime(2026, 1, 2, 3, 4, 5, 600_000),  # noqa: DTZ001 - as Spark gives it
        "a": 255,
        "b": Decimal(2**64 - 1),
        "c": [{"re": 1.0, "im": 2.0}, {"re": 3.0, "im": -4.0}],
        "d": 0.5,
        "e": "ab",
        "f": True,
        "g": [[1, 2], [3, 4]],
        "h": bytearray(b"\x00\x01"),
        "i": [0.5, 1.5],
    }


@pytest.mark.parametrize("on_error", ["fail", "dead_letter"])
def test_spark_knows_that_no_value_of_an_array_is_null(spark: SparkSession, on_error: str) -> None:
    payloads = [struct.pack("<2f", 0.5, 1.5), *([b""] if on_error == "dead_letter" else [])]
    layout = [{"name": "dbz", "type": "f4", "shape": [2]}]
    df = decode(frame(spark, payloads), format="struct", layout=layout, on_error=on_error)
    assert df.schema["dbz"].dataType == ArrayType(FloatType(), containsNull=False)
    assert df.schema["dbz"].nullable
    found = [row.dbz for row in df.orderBy("seq").collect()]
    assert found == [[0.5, 1.5], None][: len(payloads)]


def test_json_arrives_with_the_messages_columns(spark: SparkSession) -> None:
    schema = "t TIMESTAMP, n TIMESTAMP_NTZ, d DATE, m DECIMAL(6,2), at STRUCT<lat: DOUBLE>, b INT"
    payload = (
        b'{"t":"2026-02-03T04:05:06Z","n":"2026-02-03 04:05:06","d":"2026-02-03","m":1.25,'
        b'"at":{"lat":2.5}}'
    )
    df = decode(frame(spark, [payload]), format="json", schema=schema)
    assert df.columns[:2] == ["url", "seq"]
    assert "payload" not in df.columns
    row = df.selectExpr(
        "url", "unix_millis(t)", "n", "d", "m", "at.lat", "b", "unix_millis(time)"
    ).collect()[0]  # fmt: skip
    assert tuple(row) == (
        "fmq:/radar/iq", 1_770_091_506_000, dt.datetime(2026, 2, 3, 4, 5, 6),  # noqa: DTZ001
        dt.date(2026, 2, 3), Decimal("1.25"), 2.5, None, 1_767_323_045_600,
    )  # fmt: skip


def test_one_payload_may_become_many_rows(spark: SparkSession) -> None:
    df = decode(frame(spark, [b"1,a\n2,b\n", b"3,c"]), format="csv", schema="id INT, name STRING")
    assert [tuple(r) for r in df.select("seq", "id", "name").orderBy("id").collect()] == [
        (0, 1, "a"), (0, 2, "b"), (1, 3, "c")
    ]  # fmt: skip


def test_failing_says_which_message_and_why(spark: SparkSession) -> None:
    df = decode(frame(spark, PAYLOADS), format="struct", layout="<d")
    with pytest.raises(PythonException) as caught:
        df.collect()
    said = str(caught.value)
    assert "does not decode as struct: its payload should be 8 bytes, found" in said
    assert "of fmq:/radar/iq" in said


def test_what_is_skipped_in_a_batch_is_observed(spark: SparkSession) -> None:
    seen = Observation()
    df = decode(frame(spark, PAYLOADS), format="struct", layout="<d", on_error="skip", metric=seen)
    assert sorted(row.f0 for row in df.collect()) == [0.5, 1.5]
    assert "decode_error" not in df.columns
    assert seen.get == {"decoded": 2, "skipped": 2}


def test_dead_letters_are_parted_from_the_others(spark: SparkSession, tmp_path: Path) -> None:
    df = decode(
        frame(spark, PAYLOADS), format="struct", layout="<d", on_error="dead_letter", keep=["seq"]
    )
    good, bad = split_failures(df)
    assert sorted(tuple(row) for row in good.collect()) == [(0, 0.5), (2, 1.5)]
    spark.dataSource.register(PenstockSource)
    url = f"log:{tmp_path}/dead"
    bad.write.format("penstock").option("url", url).mode("append").save()
    with penstock.open_reader(url, start="start") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert sorted((each.original.seq, each.original.payload, each.reason) for each in letters) == [
        (1, b"short", "expected 8 bytes, found 5 bytes"),
        (3, b"", "expected 8 bytes, found 0 bytes"),
    ]
    assert {each.original.time_ns - each.original.seq for each in letters} == {10}
    with pytest.raises(InvalidOption, match="no dead letters"):
        split_failures(good)


def test_a_stream_counts_in_its_progress_what_it_skips(spark: SparkSession, tmp_path: Path) -> None:
    url = f"log:{tmp_path}/in"
    with penstock.open_writer(url) as writer:
        writer.write_many([b'{"a":1}', b"nonsense", b'{"a":3}', b'{"a":"x"}', b'{"a":5}'])
    spark.dataSource.register(PenstockSource)
    stream = spark.readStream.format("penstock").option("url", url).load()
    df = decode(stream, {"format": "json", "schema": "a INT", "on_error": "skip"}, metric="beams")
    query = (
        df.select("seq", "a").writeStream.format("memory").queryName("decoded_beams")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(90)
    assert sorted(tuple(row) for row in spark.table("decoded_beams").collect()) == [
        (0, 1), (2, 3), (4, 5)
    ]  # fmt: skip
    counts = [
        progress.observedMetrics["beams"].asDict()
        for progress in query.recentProgress
        if "beams" in progress.observedMetrics
    ]
    assert sum(each["decoded"] for each in counts) == 3
    assert sum(each["skipped"] for each in counts) == 2


def test_names_that_collide_are_refused_before_anything_runs(spark: SparkSession) -> None:
    with pytest.raises(InvalidOption) as caught:
        decode(frame(spark, []), format="struct", layout="<d", names=["time"])
    assert "prefix" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"format": "json", "schema": "a DECIMAL(10,2)"}, b'{"a":1.5}', b'{"a":100000000}'),
        ({"format": "csv", "schema": "a DECIMAL(10,2)"}, b"1.5", b"100000000"),
        ({"format": "csv", "schema": "a DATE"}, b"2026-01-02", b"0000-01-01"),
    ],
)
def test_a_value_that_spark_would_throw_for_is_one_payload_that_does_not_decode(
    spark: SparkSession, options: dict[str, Any], good: bytes, bad: bytes
) -> None:
    messages = frame(spark, [good, bad, good])
    rows = decode(messages, **options, on_error="skip", keep=["seq"])
    assert [row.seq for row in rows.where("a IS NOT NULL").collect()] == [0, 2]
    _, letters = split_failures(decode(messages, **options, on_error="dead_letter"))
    (letter,) = letters.collect()
    assert letter.payload == bad
