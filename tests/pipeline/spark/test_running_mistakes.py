"""Pipelines that cannot work: said in one line, before anything starts where that can be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.core.errors import ConfigError
from penstock.pipeline import Pipeline, parse_pipelines, plan
from penstock.pipeline.run import NotStarted, QueryFailed, run
from support.spark_pipelines import base, once, stages

MISTAKES = {
    "use: 'none_such:f'": (
        "stages.s.use",
        "there is no module none_such",
    ),
    "use: '{stages}:halvs'": ("stages.s.use", "has no function halvs"),
    "use: '{stages}:nothing'": (
        "stages.s.use",
        "the function returned NoneType and not a DataFrame",
    ),
    "sql: select sequ from a": ("stages.s.sql", "`sequ` cannot be resolved"),
    "sql: selec seq from a": ("stages.s.sql", "Syntax error"),
    "watermark: {tim: 1s}": ("stages.s.watermark", "tim"),
    "decode: {format: jso}": ("stages.s.decode.format", "there is no such format"),
    "use: '{stages}:raises'": ("stages.s.use", "ValueError: no dbz ({stages}.py, line 22)"),
    "use: '{stages}:table'": ("stages.s.use", "what comes out is a table and not a stream"),
    "sql: show tables like 'a'": ("stages.s.sql", "what comes out is a table and not a stream"),
}


@pytest.mark.parametrize("stage", MISTAKES)
def test_a_stage_that_does_not_work_is_one_message_with_its_line(
    spark: SparkSession, here: Path, stage: str
) -> None:
    field, reason = MISTAKES[stage]
    text = f"""
pipeline: p
sources: {{a: {{url: "fmq:{here}/a"}}}}
stages:
  s: {{from: a, {stage.replace("{stages}", stages(here))}}}
sinks: {{out: {{from: s, url: "log:{here}/out"}}}}
"""
    with pytest.raises(ConfigError) as caught:
        once(parse_pipelines(text, "p.yaml"), spark, here)
    assert (caught.value.line, caught.value.field) == (5, field)
    assert reason.replace("{stages}", stages(here)) in caught.value.reason
    assert "\n" not in caught.value.reason


def test_a_missing_stream_and_a_missing_column_are_said_before_anything_starts(
    spark: SparkSession, here: Path
) -> None:
    missing = Pipeline("p").source("a", url=f"fmq:{here}/none").sink("x", from_="a", parquet="/x")
    with pytest.raises(ConfigError, match="there is no queue") as caught:
        once(missing, spark, here)
    assert caught.value.hint is not None
    assert "penstock create" in caught.value.hint
    files = base(here).sink("x", from_="a", parquet=str(here / "x"), partition_by=["sweep"])
    with pytest.raises(ConfigError, match="there is no column sweep"):
        once(files, spark, here)


def test_a_master_of_no_kind_is_said_before_spark_is_started(here: Path) -> None:
    pipeline = base(here).sink("x", from_="a", console=True)
    with pytest.raises(NotStarted, match="the master sprak://host:7077: there is no such kind"):
        run(plan(pipeline), master="sprak://host:7077", checkpoint=str(here / "checkpoints"))


@pytest.mark.parametrize(
    "target",
    [
        *("fmq:{}/dead?layout=classic", "mcap:{}/dead.mcap", "iwrf:{}/dead", "iwrf+fmq:{}/dead"),
        "jsonl:{}/dead.jsonl?decode=struct:<i",  # which only an open writer tells
    ],
)
def test_dead_letters_into_a_stream_that_keeps_no_reasons_are_refused_before_spark_is_started(
    here: Path, target: str
) -> None:
    pipeline = base(here).sink("x", from_="a", dead_letter=target.format(here))
    with pytest.raises(ConfigError, match="it keeps no attributes") as caught:
        run(plan(pipeline), master="sprak://host:7077", checkpoint=str(here / "checkpoints"))
    assert caught.value.field == "sinks.x.dead_letter"
    assert not list(here.glob("dead*"))  # or it would be in the way of one that is taken


@pytest.mark.parametrize("target", ["fmq:{}/dead", "log:{}/dead", "jsonl:{}/dead.jsonl"])
def test_dead_letters_into_a_stream_that_keeps_reasons_are_taken(here: Path, target: str) -> None:
    pipeline = base(here).sink("x", from_="a", dead_letter=target.format(here))
    with pytest.raises(NotStarted):
        run(plan(pipeline), master="sprak://host:7077", checkpoint=str(here / "checkpoints"))
    assert not (here / "dead.jsonl").exists()  # it would be in the way of the first batch


def test_state_where_batches_are_shared_is_refused(spark: SparkSession, here: Path) -> None:
    pipeline = (
        base(here)
        .stage("t", from_="a", use=f"{stages(here)}:twice")
        .sink("x", from_="a", parquet=str(here / "x"))
        .sink("y", from_="t", console=True)
    )
    with pytest.raises(ConfigError, match="keeps state between batches") as caught:
        once(pipeline, spark, here)
    assert caught.value.hint == "say stateful: true, and it gets a query of its own"


def test_a_stage_that_fails_at_work_ends_the_run_with_one_line(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("s", from_="a", use=f"{stages(here)}:broken")
        .sink("x", from_="s", url=f"log:{here}/x")
    )
    with pytest.raises(QueryFailed) as caught:
        once(pipeline, spark, here)
    assert caught.value.query == "p-x"
    assert re.fullmatch(r"KeyError: 'dbz' \(stages_.*\.py, line \d+\)", caught.value.reason)


def test_a_stage_finds_its_inputs_only_and_no_view_is_left(spark: SparkSession, here: Path) -> None:
    pipeline = (
        base(here)
        .stage("s", from_="a", sql="select * from a where seq < 5")
        .stage("t", from_="s", sql="select s.payload from s cross join a")
        .sink("x", from_="t", url=f"log:{here}/x")
    )
    before = spark.catalog.listTables()  # of other tests
    with pytest.raises(ConfigError, match="`a` cannot be found") as caught:
        once(pipeline, spark, here)
    assert caught.value.field == "stages.t.sql"
    assert spark.catalog.listTables() == before


def test_a_limit_of_a_function_is_not_taken_for_one_of_each_batch(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("few", from_="a", use=lambda frame: frame.limit(2))
        .sink("x", from_="a", url=f"log:{here}/x")
        .sink("y", from_="few", parquet=str(here / "y"))
    )
    with pytest.raises(ConfigError, match=r"keeps state between batches \(GlobalLimit\)"):
        once(pipeline, spark, here)
