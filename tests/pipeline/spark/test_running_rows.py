"""Which bytes rows become: dead letters, JSON, files and what is on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from penstock import open_reader, open_writer
from penstock.cli.run import _display
from penstock.core.dead_letter import DeadLetter
from penstock.pipeline import Pipeline, plan
from support.spark_pipelines import base, once
from support.spark_streams import payloads


def test_rows_can_be_given_up_as_dead_letters(spark: SparkSession, here: Path) -> None:
    pipeline = (
        base(here)
        .stage("few", from_="a", sql="select * from a where seq < 3")
        .sink("dead", from_="few", dead_letter=f"log:{here}/dead")
    )
    once(pipeline, spark, here)
    with open_reader(f"log:{here}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert [letter.original.payload for letter in letters] == [b"message %d" % i for i in range(3)]
    assert letters[0].original.type == 7
    assert letters[0].receiver == "p"


def test_what_does_not_decode_goes_to_the_dead_letters_and_the_rest_goes_on(
    spark: SparkSession, here: Path
) -> None:
    with open_writer(f"fmq:{here}/j?slots=100") as writer:
        writer.write_many([b'{"v": 1}', b"not json", b'{"v": 2}'])
    decode = {"format": "json", "schema": "v INT", "on_error": "dead_letter"}
    pipeline = (
        Pipeline("p")
        .source("j", url=f"fmq:{here}/j", decode=decode)
        .stage("v", from_="j", sql="select v from j")
        .sink("good", from_="v", url=f"log:{here}/good")
        .sink("dead", from_="j", dead_letter=f"log:{here}/dead")
    )
    once(pipeline, spark, here)
    assert [json.loads(p) for p in payloads(f"log:{here}/good")] == [{"v": 1}, {"v": 2}]
    with open_reader(f"log:{here}/dead") as reader:
        (letter,) = [DeadLetter.from_message(message) for message in reader.available()]
    assert letter.original.payload == b"not json"


@pytest.mark.full
def test_what_does_not_decode_and_is_left_out_is_counted(spark: SparkSession, here: Path) -> None:
    with open_writer(f"fmq:{here}/j?slots=100") as writer:
        writer.write_many([b'{"v": 1}', b"not json", b'{"v": 2}'])
    decode = {"format": "json", "schema": "v INT", "on_error": "skip"}
    pipeline = (
        Pipeline("p")
        .source("j", url=f"fmq:{here}/j")
        .stage("v", from_="j", decode=decode)
        .sink("good", from_="v", url=f"log:{here}/good")
        .sink("files", from_="v", parquet=str(here / "files"))
    )
    outcome = once(pipeline, spark, here)
    assert outcome.queries[0].skipped == {"v": 1}
    assert outcome.skipped == 1
    assert len(payloads(f"log:{here}/good")) == 2
    assert ds.dataset(here / "files").count_rows() == 2


def test_dead_letters_beside_a_stream_of_the_same_rows_are_dead_letters(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("few", from_="a", sql="select payload, 7L as type from a where seq < 3")
        .sink("x", from_="few", url=f"log:{here}/x")
        .sink("dead", from_="few", dead_letter=f"log:{here}/dead")
    )
    once(pipeline, spark, here)
    with open_reader(f"log:{here}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert [letter.original.type for letter in letters] == [7] * 3
    assert payloads(f"log:{here}/x") == [b"message %d" % i for i in range(3)]


@pytest.mark.full
def test_json_keeps_microseconds_and_a_column_that_is_not_carried_is_named(
    spark: SparkSession, here: Path
) -> None:
    moment = "timestamp'2026-01-02 03:04:05.678901'"
    pipeline = (
        base(here)
        .stage("few", from_="a", sql="select *, 'seven' as output from a where seq < 1")
        .stage("named", from_="few", sql="select payload, seq, 'seven' as type, output from few")
        .stage(
            "when",
            from_="few",
            sql=f"select {moment} as at, {moment}::timestamp_ntz as ntz from few",
        )
        .sink("x", from_="named", url=f"log:{here}/x")
        .sink("y", from_="when", url=f"log:{here}/y")
        .sink("lines", from_="when", csv=str(here / "lines"))
    )
    said: list[str] = []
    once(pipeline, spark, here, say=said.append)
    assert said == ["x: a message is made of payload; it does not carry type, output"]
    (when,) = [json.loads(payload) for payload in payloads(f"log:{here}/y")]
    assert when == {"at": "2026-01-02T03:04:05.678901Z", "ntz": "2026-01-02T03:04:05.678901"}
    lines = [line for p in (here / "lines").glob("*.csv") for line in p.read_text().splitlines()]
    assert lines == ["2026-01-02T03:04:05.678901Z,2026-01-02T03:04:05.678901"]


def test_rows_on_the_screen_may_have_brackets(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = spark.sql("select '[/b] [red]' as `[x]`, named_struct('a', 1) as s")
    made = plan(Pipeline("p").source("a", url="fmq:/a").sink("s", from_="a", console=True))
    _display("none", made).rows("s", rows)
    shown = capsys.readouterr().out
    assert "[/b] [red]" in shown
    assert "[x]" in shown
    _display("json", made).rows("s", rows)
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "event": "row",
        "sink": "s",
        "row": {"[x]": "[/b] [red]", "s": {"a": 1}},
    }


@pytest.mark.full
def test_names_of_directories_and_partitions_may_have_any_character(
    spark: SparkSession, here: Path
) -> None:
    files = here / "with space %20 #[x]{y}"
    names = ["a/b", "c d", "%41", "x=y:z", "é?*", None]
    listed = ", ".join("null" if name is None else f"'{name}'" for name in names)
    pipeline = (
        base(here)
        .stage("p", from_="a", sql=f"select seq, array({listed})[cast(seq % 6 as int)] as p from a")
        .sink("files", from_="p", parquet=str(files), partition_by=["p"])
        .sink("lines", from_="p", json=str(here / "lines"))
    )
    once(pipeline, spark, here)
    table = ds.dataset(files, partitioning="hive").to_table().to_pylist()
    assert sorted(row["seq"] for row in table) == list(range(100))
    assert {row["p"] for row in table} == set(names)
    lines = [line for p in (here / "lines").glob("*.json") for line in p.read_text().splitlines()]
    assert sorted(json.loads(line)["seq"] for line in lines) == list(range(100))
