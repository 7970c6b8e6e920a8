"""Pipelines at work, on the session that all tests share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock import open_reader, open_writer
from penstock.cli.running import _display
from penstock.core.dead_letter import DeadLetter
from penstock.core.errors import ConfigError
from penstock.pipeline import Pipeline, parse_pipelines, plan
from penstock.pipeline.running import Outcome, Progress, QueryFailed, run
from penstock.pipeline.running.checkpoints import own, used_before
from penstock.queue.ownership import AlreadyOwned

STAGES = """
from pyspark.sql import functions as f


def numbered(frame):
    return frame.withColumn("n", f.col("seq").cast("int"))


def halves(frame, by=2):
    return frame.where(f.col("seq") % by == 0)


def twice(frame):
    return frame.groupBy("type").count()


def nothing(frame):
    return None


def broken(frame):
    def fail(batches):
        for batch in batches:
            raise KeyError("dbz")
            yield batch
    return frame.mapInArrow(fail, frame.schema)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own with stages in it, and a queue of 100 messages."""
    name = f"stages_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, 0, 100)
    yield tmp_path
    sys.modules.pop(name, None)


def stages(folder: Path) -> str:
    return f"stages_{folder.name}"


def write(folder: Path, first: int, end: int) -> None:
    with open_writer(f"fmq:{folder}/a?slots=10000") as writer:
        writer.write_many([b"message %d" % i for i in range(first, end)], type=7)


def payloads(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]


def once(
    pipeline: Pipeline | list[Pipeline], spark: SparkSession, folder: Path, **more: object
) -> Outcome:
    return run(
        plan(pipeline),
        spark=spark,
        once=True,
        checkpoint=str(folder / "checkpoints"),
        **more,  # type: ignore[arg-type]
    )


def base(folder: Path) -> Pipeline:
    return Pipeline("p").source("a", url=f"fmq:{folder}/a")


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
    "decode: {format: jso}": ("stages.s.decode", "jso"),
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
    assert reason in caught.value.reason
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
    assert caught.value.reason == "KeyError: 'dbz'"


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
    assert told == {"event": "row", "sink": "s", "[x]": "[/b] [red]", "s": {"a": 1}}


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
