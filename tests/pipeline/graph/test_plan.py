from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.pipeline import Pipeline, Plan, load_pipelines, plan
from penstock.pipeline.graph.model import streams_between
from penstock.pipeline.graph.plan import keeps_state, trunk
from pipeline.graph.random_pipelines import pipelines

EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[3] / "examples").glob("[pr]*/*.yaml")
    if not path.stem.endswith(".test")
)

BASE = (
    Pipeline("p")
    .source("a", url="fmq:/a")
    .source("b", url="fmq:/b")
    .stage("s", from_="a", use="m:f")
    .stage("t", from_="b", use="m:f")
)


def shape(made: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(query.name, query.kind, query.sinks) for query in made.queries]


def test_one_sink_is_one_query() -> None:
    (query,) = plan(BASE.sink("x", from_="s", url="log:/x")).queries
    assert (query.name, query.kind) == ("p-x", "single")
    assert (query.sources, query.stages, query.sinks) == (("a",), ("s",), ("x",))
    assert query.reason == "x is the only sink"


def test_streams_of_the_same_rows_become_one_multiplexed_query() -> None:
    made = plan(
        BASE.sink("x", from_="s", url="log:/x")
        .sink("y", from_="s", url="fmq:/y")
        .sink("z", from_="s", url="log:/z")
    )
    assert shape(made) == [("p-x", "multiplexed", ("x", "y", "z"))]
    assert made.queries[0].trunk == "s"
    assert made.queries[0].reason == (
        "x, y and z share s and are all streams: one writer, which tells them apart by a column"
    )


def test_dead_letters_are_made_of_the_rows_that_other_streams_get_as_they_are() -> None:
    made = plan(
        BASE.sink("x", from_="s", url="log:/x").sink("dead", from_="s", dead_letter="log:/dead")
    )
    assert shape(made) == [("p-x", "foreach_batch", ("x", "dead"))]


def test_streams_share_a_query_also_where_others_are_written_batch_by_batch() -> None:
    made = plan(
        BASE.stage("both", from_=["a", "b"], use="m:f")
        .sink("x", from_="a", url="log:/x")
        .sink("files", from_="b", parquet="files")
        .sink("y", from_="both", url="log:/y")
    )
    assert shape(made) == [("p-x", "multiplexed", ("x", "y")), ("p-files", "single", ("files",))]


def test_a_hold_is_for_one_query() -> None:
    held = (
        Pipeline("p")
        .source("a", url="fmq:/a", hold="me")
        .stage("tally", from_="a", sql="select count(*) from a group by type")
        .sink("x", from_="a", url="log:/x")
    )
    assert len(plan(held).queries) == 1
    with pytest.raises(ConfigError, match=r"p-x and p-y read a.* a hold is one reader's") as caught:
        plan(held.sink("y", from_="tally", console=True, mode="complete"))
    assert caught.value.field == "sources.a.hold"


@pytest.mark.parametrize("sql", ["select * from a limit 2", "select max(seq) over (x) from a"])
def test_sql_that_looks_at_more_than_a_row_takes_no_batches(sql: str) -> None:
    made = plan(
        BASE.stage("few", from_="a", sql=sql)
        .sink("x", from_="a", parquet="x")
        .sink("y", from_="few", parquet="y")
    )
    assert shape(made) == [("p-x", "single", ("x",)), ("p-y", "single", ("y",))]


def test_streams_that_part_after_a_stage_take_their_rows_from_its_batches() -> None:
    made = plan(
        BASE.stage("u", from_="s", use="m:f")
        .sink("x", from_="s", url="log:/x")
        .sink("y", from_="u", url="log:/y")
    )
    assert shape(made) == [("p-x", "foreach_batch", ("x", "y"))]
    assert made.queries[0].trunk == "s"
    assert made.queries[0].reason == (
        "x and y share s: each batch is kept, and written to each of them"
    )


STATEFUL = BASE.stage(
    "tally", from_="s", sql="select k, count(*) from s group by k", watermark={"time": "1s"}
)


def test_streams_of_which_one_keeps_state_stay_one_query() -> None:
    made = plan(STATEFUL.sink("x", from_="s", url="log:/x").sink("y", from_="tally", url="log:/y"))
    assert shape(made) == [("p-x", "multiplexed", ("x", "y"))]
    assert made.queries[0].trunk is None


def test_what_keeps_state_is_never_worked_out_batch_by_batch() -> None:
    made = plan(STATEFUL.sink("x", from_="s", parquet="/x").sink("y", from_="tally", url="log:/y"))
    assert shape(made) == [("p-x", "single", ("x",)), ("p-y", "single", ("y",))]
    assert made.queries[1].reason == (
        "y has nobody to share a query with; a is read by p-x as well"
    )


def test_a_function_keeps_state_if_it_is_said() -> None:
    base = BASE.stage("u", from_="s", use="m:f", stateful=True).sink("x", from_="s", parquet="/x")
    made = plan(base.sink("y", from_="u", url="log:/y"))
    assert shape(made) == [("p-x", "single", ("x",)), ("p-y", "single", ("y",))]


def test_what_was_not_decoded_goes_to_the_dead_letters_of_its_source() -> None:
    decode = {"format": "json", "schema": "a INT", "on_error": "dead_letter"}
    made = plan(
        Pipeline("p")
        .source("a", url="fmq:/a", decode=decode)
        .sink("x", from_="a", url="log:/x")
        .sink("dead", from_="a", dead_letter="log:/dead")
    )
    assert shape(made) == [("p-x", "foreach_batch", ("x", "dead"))]
    assert made.queries[0].trunk == "a"
    assert made.pipelines[0].takes_failures("dead")
    assert not made.pipelines[0].takes_failures("x")


def test_what_a_stage_did_not_decode_is_taken_from_what_it_got() -> None:
    decode = {"format": "json", "schema": "a INT", "on_error": "dead_letter"}
    made = plan(
        Pipeline("p")
        .source("a", url="fmq:/a")
        .stage("s", from_="a", decode=decode)
        .sink("x", from_="s", url="log:/x")
        .sink("dead", from_="s", dead_letter="log:/dead")
    )
    assert (made.queries[0].kind, made.queries[0].trunk) == ("foreach_batch", "a")


def test_files_beside_streams_are_written_batch_by_batch() -> None:
    made = plan(BASE.sink("x", from_="s", url="log:/x").sink("y", from_="s", parquet="/y"))
    assert shape(made) == [("p-x", "foreach_batch", ("x", "y"))]
    assert "share s, and y is no stream but parquet: each batch is kept" in made.queries[0].reason


def test_sinks_that_share_nothing_become_queries_of_their_own() -> None:
    made = plan(BASE.sink("x", from_="s", url="log:/x").sink("y", from_="t", url="log:/y"))
    assert shape(made) == [("p-x", "single", ("x",)), ("p-y", "single", ("y",))]
    assert made.queries[0].reason == "x shares no source with the other sinks"


def test_a_join_brings_its_sides_into_one_query() -> None:
    made = plan(
        BASE.stage("joined", from_=["s", "t"], sql="select * from s join t using (k)")
        .sink("x", from_="s", url="log:/x")
        .sink("y", from_="t", url="log:/y")
        .sink("z", from_="joined", url="log:/z")
    )
    assert shape(made) == [("p-x", "multiplexed", ("x", "y", "z"))]
    assert made.queries[0].stages == ("s", "t", "joined")
    assert "share a and b" in made.queries[0].reason


def test_a_stage_that_nothing_uses_joins_nothing() -> None:
    made = plan(
        BASE.stage("joined", from_=["s", "t"], use="m:f")
        .sink("x", from_="s", url="log:/x")
        .sink("y", from_="t", url="log:/y")
    )
    assert len(made.queries) == 2
    assert made.warnings == ("pipeline p: stages.joined: nothing uses it, so it does not run",)


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_a_mode_other_than_append_takes_a_query_of_its_own(mode: str) -> None:
    made = plan(
        BASE.sink("x", from_="s", url="log:/x")
        .sink("tally", from_="s", console=True, mode=mode)
        .sink("y", from_="s", url="log:/y")
    )
    assert shape(made) == [("p-x", "multiplexed", ("x", "y")), ("p-tally", "single", ("tally",))]
    assert made.queries[1].reason == (
        f"tally is in mode {mode}, which takes a query of its own; a is read by p-x as well"
    )
    assert made.queries[0].reason.endswith("; a is read by p-tally as well")


def test_sinks_joined_only_by_one_that_goes_alone_are_not_joined() -> None:
    made = plan(
        BASE.stage("joined", from_=["s", "t"], use="m:f")
        .sink("tally", from_="joined", console=True, mode="complete")
        .sink("x", from_="s", url="log:/x")
        .sink("y", from_="t", url="log:/y")
    )
    assert [query.sinks for query in made.queries] == [("tally",), ("x",), ("y",)]
    assert made.queries[1].reason == (
        "x has nobody to share a query with; a is read by p-tally as well"
    )


def test_pipelines_are_cut_at_the_stream_between_them_and_started_in_its_direction() -> None:
    second = Pipeline("q").source("y_in", url="log:/y").sink("z", from_="y_in", parquet="/z")
    first = BASE.sink("y", from_="s", url="log:/y?sync=batch")
    made = plan([second, first])
    assert [query.name for query in made.queries] == ["p-y", "q-z"]
    assert made.queries[1].after == ("p-y",)
    assert made.as_dict()["streams"] == [{"sink": "p.y", "source": "q.y_in"}]


def test_a_query_never_reads_a_stream_that_it_writes() -> None:
    made = plan(
        Pipeline("p")
        .source("a", url="fmq:/a")
        .source("back", url="log:/x")
        .stage("both", from_=["a", "back"], use="m:f")
        .sink("x", from_="a", url="log:/x")
        .sink("z", from_="both", url="log:/z")
        .sink("w", from_="a", url="log:/w")
    )
    assert shape(made) == [("p-x", "multiplexed", ("x", "w")), ("p-z", "single", ("z",))]
    assert made.queries[1].after == ("p-x",)
    assert "; a stream lies between it and others; a is read by p-x" in made.queries[1].reason


def test_a_plan_goes_into_json() -> None:
    made = plan(BASE.sink("x", from_="s", url="log:/x"))
    found = json.loads(json.dumps(made.as_dict()))
    assert found["queries"][0]["sinks"] == ["x"]
    assert found["pipelines"][0]["sources"]["a"] == {"url": ["fmq:/a"]}
    assert (
        found["warnings"]
        == [
            "pipeline p: sources.b: nothing uses it, so it is not read",
            "pipeline p: stages.t: nothing uses it, so it does not run",
        ][1:]
    )


@settings(max_examples=150)
@given(pipelines(), st.booleans())
def test_any_plan_covers_each_sink_once_in_an_order_that_works(
    pipeline: Pipeline, twice: bool
) -> None:
    second = Pipeline("q").source("in0", url="log:/out/p0").sink("end", from_="in0", parquet="/q")
    made = plan([second, pipeline] if twice else pipeline)
    queries = [query for query in made.queries if query.pipeline == "p"]
    graph = pipeline.graph()
    assert sorted(s for query in queries for s in query.sinks) == sorted(pipeline.sinks)
    assert len({query.name for query in made.queries}) == len(made.queries)
    for query in queries:
        needed = graph.ancestors(*query.sinks)
        assert set(query.sources) | set(query.stages) | set(query.sinks) == needed
        seen = set(query.sources)
        for stage in query.stages:
            assert set(graph.parents(stage)) <= seen
            seen.add(stage)
        modes = {pipeline.sinks[sink].mode for sink in query.sinks}
        assert modes == {"append"} or len(query.sinks) == 1
        streams = [pipeline.sinks[sink].stream is not None for sink in query.sinks]
        assert (query.kind == "single") == (len(streams) == 1)
        assert query.kind != "multiplexed" or all(streams)
        if query.kind == "foreach_batch":  # whatever follows the trunk works on single rows
            assert query.trunk is not None
            for node in graph.descendants(query.trunk) & set(query.stages) - {query.trunk}:
                assert not keeps_state(pipeline.stages[node])
        assert query.reason
    started: set[str] = set()
    for query in made.queries:
        assert set(query.after) <= started
        started.add(query.name)
    writers = {(query.pipeline, sink): query for query in made.queries for sink in query.sinks}
    for sink, source in streams_between(made.pipelines):
        for query in made.queries_of(source):
            assert writers[sink].name in query.after


@settings(max_examples=100)
@given(pipelines(read_back=False))
def test_without_streams_between_there_is_one_query_for_what_shares_a_source(
    pipeline: Pipeline,
) -> None:
    made = plan(pipeline)
    appending = [q for q in made.queries if pipeline.sinks[q.sinks[0]].mode == "append"]
    for one in appending:
        for other in appending:
            if one is not other and set(one.sources) & set(other.sources):
                # Files part them: what they are written from is not in the same batches.
                assert any(not pipeline.sinks[s].stream for s in (*one.sinks, *other.sinks))
                assert trunk(pipeline, (*one.sinks, *other.sinks)) is None


def test_streams_that_are_written_together_are_staged_in_one_place() -> None:
    made = BASE.sink("x", from_="s", url="log:/x", options={"staging": "/here"})
    plan(made.sink("y", from_="s", url="log:/y", options={"staging": "/here"}))
    with pytest.raises(ConfigError, match="x has /here, and one query writes both"):
        plan(made.sink("y", from_="s", url="log:/y", options={"staging": "/there"}))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_examples_can_be_planned(file: Path) -> None:
    assert plan(load_pipelines(file)).warnings == ()
