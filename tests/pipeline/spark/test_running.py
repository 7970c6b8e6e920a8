"""Pipelines at work, on the session that all tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock import open_reader, open_writer
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import Progress, run
from penstock.pipeline.run.checkpoints import own, used_before
from penstock.pipeline.run.spark import STATE_STORE, spark_session
from penstock.queue.ownership import AlreadyOwned
from support.spark_pipelines import base, once, stages, write
from support.spark_streams import payloads


def test_one_stream_goes_through_a_stage_and_a_restart_goes_on(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("half", from_="a", use=f"{stages(here)}:halves", options={"by": 4})
        .sink("out", from_="half", url=f"log:{here}/out")
    )
    seen: list[Progress] = []
    outcome = once(pipeline, spark, here, on_progress=seen.append)
    expected = [b"message %d" % i for i in range(0, 100, 4)]
    assert payloads(f"log:{here}/out") == expected
    assert (outcome.rows, outcome.lost, outcome.was_stopped) == (100, 0, False)
    assert seen[0].state == "starting"
    assert seen[-1].state == "done"
    write(here, 100, 120)
    assert once(pipeline, spark, here).rows == 20
    assert payloads(f"log:{here}/out") == [
        *expected,
        *(b"message %d" % i for i in range(100, 120, 4)),
    ]


@pytest.mark.full
def test_the_same_rows_go_to_several_streams_in_one_query(spark: SparkSession, here: Path) -> None:
    pipeline = (
        base(here)
        .stage("n", from_="a", use=f"{stages(here)}:numbered")
        .sink("x", from_="n", url=f"log:{here}/x")
        .sink("y", from_="n", url=f"fmq:{here}/y?slots=1000")
    )
    assert plan(pipeline).queries[0].kind == "multiplexed"
    said: list[str] = []
    once(pipeline, spark, here, say=said.append)
    assert payloads(f"log:{here}/x") == payloads(f"fmq:{here}/y") == payloads(f"fmq:{here}/a")
    assert said == [f"{name}: a message is made of payload; it does not carry n" for name in "xy"]


def test_streams_and_files_take_the_same_batches_and_a_replay_adds_nothing(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("n", from_="a", use=f"{stages(here)}:numbered")
        .stage("few", from_="n", sql="select time_ns, n, n % 2 as odd from n where n < 10")
        .sink("x", from_="n", url=f"log:{here}/x")
        .sink("few_out", from_="few", url=f"log:{here}/few")
        .sink("files", from_="few", parquet=str(here / "files"), partition_by=["odd"])
        .sink("lines", from_="few", csv=str(here / "lines"))
    )
    assert plan(pipeline).queries[0].kind == "foreach_batch"
    for expected in (100, 100):  # the second time as if the first had died before it was noted
        assert once(pipeline, spark, here).rows == expected
        assert payloads(f"log:{here}/x") == payloads(f"fmq:{here}/a")
        rows = [json.loads(payload) for payload in payloads(f"log:{here}/few")]
        assert rows == [{"n": n, "odd": n % 2} for n in range(10)]
        files = ds.dataset(here / "files", partitioning="hive").to_table()
        assert sorted(files["n"].to_pylist()) == list(range(10))
        lines = [p.read_text().splitlines() for p in (here / "lines").glob("*.csv")]
        assert sum(map(len, lines)) == 10
        (here / "checkpoints" / "p-x" / "commits" / "0").unlink()


@pytest.mark.full
def test_what_keeps_state_and_what_does_not_share_a_query_of_streams(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage(
            "tally",
            from_="a",
            sql="select window(time, '1 hour') as w, count(*) as n from a group by 1",
            watermark={"time": "1 second"},
        )
        .sink("x", from_="a", url=f"log:{here}/x")
        .sink("tally_out", from_="tally", url=f"log:{here}/tally")
    )
    assert plan(pipeline).queries[0].kind == "multiplexed"
    once(pipeline, spark, here)
    assert payloads(f"log:{here}/x") == payloads(f"fmq:{here}/a")
    with open_writer(f"fmq:{here}/a") as writer:  # two hours on, the window is over
        writer.write(b"late", time_ns=open_reader(f"fmq:{here}/a").read().time_ns + 7200 * 10**9)  # type: ignore[union-attr]
    once(pipeline, spark, here)
    assert [json.loads(p)["n"] for p in payloads(f"log:{here}/tally")] == [100]


def test_a_stage_with_state_of_its_own_goes_on_where_it_was(
    spark: SparkSession, here: Path
) -> None:
    pipeline = (
        base(here)
        .stage("tally", from_="a", use=f"{stages(here)}:counted", stateful=True)
        .sink("out", from_="tally", url=f"log:{here}/out", mode="update")
    )
    settings = dict(spark.conf.getAll)
    once(pipeline, spark, here)
    write(here, 100, 120)
    once(pipeline, spark, here)
    rows = [json.loads(payload) for payload in payloads(f"log:{here}/out")]
    assert rows == [{"kind": 7, "n": 100}, {"kind": 7, "n": 120}]
    assert dict(spark.conf.getAll) == settings


@pytest.mark.usefixtures("settings_restored")
def test_a_session_that_is_there_already_keeps_state_in_rocksdb_when_told_so(
    spark: SparkSession, here: Path
) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    assert spark_session(settings={STATE_STORE: provider}) is spark
    pipeline = (
        base(here)
        .stage("tally", from_="a", sql="SELECT type, count(*) AS n FROM a GROUP BY type")
        .sink("out", from_="tally", url=f"log:{here}/out", mode="update")
    )
    once(pipeline, spark, here)
    assert [json.loads(payload)["n"] for payload in payloads(f"log:{here}/out")] == [100]
    assert list(Path(here).rglob("state/0/*/*.zip"))


def test_pipelines_follow_each_other_through_a_stream_in_one_pass(
    spark: SparkSession, here: Path
) -> None:
    second = (
        Pipeline("second")
        .source("between", url=f"log:{here}/between")
        .sink("end", from_="between", url=f"log:{here}/end")
    )
    first = base(here).sink("between_out", from_="a", url=f"log:{here}/between")
    outcome = once([second, first], spark, here)
    assert payloads(f"log:{here}/end") == payloads(f"fmq:{here}/a")
    assert [one.rows for one in outcome.queries] == [100, 100]


@pytest.mark.full
def test_sources_are_united_and_rows_are_shown(spark: SparkSession, here: Path) -> None:
    with open_writer(f"log:{here}/b") as writer:
        writer.write_many([b"other"] * 3, type=8)
    shown: list[tuple[str, list[int]]] = []

    def show(name: str, frame: DataFrame) -> None:
        shown.append((name, sorted(row["n"] for row in frame.collect())))

    pipeline = (
        base(here)
        .source("b", url=f"log:{here}/b")
        .stage("both", from_=["a", "b"])
        .stage("tally", from_="both", sql="select type, count(*) as n from both group by type")
        .sink("screen", from_="tally", console=True, mode="complete")
    )
    once(pipeline, spark, here, show=show)
    assert shown == [("screen", [3, 100])]


@pytest.mark.full
def test_a_run_that_is_asked_to_stop_ends_and_goes_on_later(
    spark: SparkSession, here: Path
) -> None:
    pipeline = base(here).sink("out", from_="a", url=f"log:{here}/out")
    rows = 0

    def take(progress: Progress) -> None:
        nonlocal rows
        rows = progress.rows

    outcome = run(
        plan(pipeline),
        spark=spark,
        checkpoint=str(here / "checkpoints"),
        on_progress=take,
        should_stop=lambda: rows >= 100,
    )
    assert outcome.was_stopped
    assert not spark.streams.active
    write(here, 100, 130)
    assert once(pipeline, spark, here).rows == 30
    assert payloads(f"log:{here}/out") == [b"message %d" % i for i in range(130)]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_results_that_change_are_appended_to_a_stream(
    spark: SparkSession, here: Path, mode: str
) -> None:
    with open_writer(f"fmq:{here}/a") as writer:
        writer.write(b"other", type=8)
    pipeline = (
        base(here)
        .stage("tally", from_="a", sql="select type as t, count(*) as n from a group by type")
        .sink("out", from_="tally", url=f"log:{here}/out", mode=mode)
    )

    def tallies() -> list[tuple[int, int]]:
        rows = [json.loads(payload) for payload in payloads(f"log:{here}/out")]
        return sorted((row["t"], row["n"]) for row in rows)

    once(pipeline, spark, here)
    assert tallies() == [(7, 100), (8, 1)]
    write(here, 100, 110)
    once(pipeline, spark, here)
    again = [(8, 1)] if mode == "complete" else []
    assert tallies() == sorted([(7, 100), (8, 1), (7, 110), *again])
    (here / "checkpoints" / "p-out" / "commits" / "1").unlink()
    once(pipeline, spark, here)  # as if it had died before it was noted
    assert tallies() == sorted([(7, 100), (8, 1), (7, 110), *again])


@pytest.mark.full
def test_pipelines_that_take_what_is_there_now_wait_for_those_that_write_it(
    spark: SparkSession, here: Path
) -> None:
    first = (
        Pipeline("first")
        .source("a", url=f"fmq:{here}/a", maxOffsetsPerTrigger=25)
        .sink("between_out", from_="a", url=f"log:{here}/between")
        .with_settings(trigger="available now")
    )
    second = (
        Pipeline("second")
        .source("between", url=f"log:{here}/between")
        .sink("end", from_="between", url=f"log:{here}/end")
        .with_settings(trigger="available now")
    )
    run(plan([first, second]), spark=spark, checkpoint=str(here / "checkpoints"))
    assert payloads(f"log:{here}/end") == payloads(f"fmq:{here}/a")


def test_two_runs_of_a_query_at_once_are_refused(spark: SparkSession, here: Path) -> None:
    pipeline = base(here).sink("out", from_="a", parquet=str(here / "out"))
    (owned,) = own(str(here / "checkpoints" / "p-out"))
    with pytest.raises(AlreadyOwned, match="the query p-out belongs to penstock run"):
        once(pipeline, spark, here)
    owned.release(remove=True)
    assert not (here / "out").exists()
    assert once(pipeline, spark, here).rows == 100
    assert [p.name for p in (here / "checkpoints").iterdir()] == ["p-out"]


@pytest.mark.full
def test_a_query_that_begins_anew_where_another_wrote_says_so(
    spark: SparkSession, here: Path
) -> None:
    def pipeline(first: str) -> Pipeline:
        return (
            base(here)
            .sink(first, from_="a", url=f"log:{here}/x")
            .sink("files", from_="a", parquet=str(here / "files"))
            .sink("new", from_="a", url=f"log:{here}/{first}")
        )

    said: list[str] = []
    once(pipeline("one"), spark, here, say=said.append)
    assert said == []
    assert used_before(str(here / "checkpoints" / "p-one"), pipeline("one").sinks.values()) == []
    once(pipeline("two"), spark, here, say=said.append)  # it is called otherwise
    assert said == [
        f"p-two begins anew, and {target} has batches of an earlier query: "
        "the same rows may be there twice"
        for target in (f"log:{here}/x", here / "files")
    ]
