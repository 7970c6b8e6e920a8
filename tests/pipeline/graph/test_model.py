from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.pipeline import Pipeline, Source, parse_pipelines, plan
from penstock.pipeline.graph.fields import Trigger
from penstock.pipeline.source.options import SourceOptions, parse_spark_options


def moments(beams: Any) -> Any:
    return beams


def storm_watch() -> Pipeline:
    return (
        Pipeline("storm-watch")
        .source("beams", url="fmq:/radar/iq", maxBytesPerTrigger="1M")
        .stage("moments", from_="beams", use="stages:moments", options={"gates": 10})
        .stage("late", from_="moments", watermark={"time": "10 seconds"})
        .sink("out", from_="moments", url="fmq:/radar/moments")
        .sink("files", from_="late", parquet="archive", partition_by=["sweep"])
        .with_settings(trigger="1s")
    )


def test_a_pipeline_in_python_is_the_same_as_in_yaml() -> None:
    text = """
        pipeline: storm-watch
        sources: {beams: {url: fmq:/radar/iq, maxBytesPerTrigger: 1M}}
        stages:
          moments: {from: beams, use: stages:moments, options: {gates: 10}}
          late: {from: moments, watermark: {time: 10s}}
        sinks:
          out: {from: moments, url: fmq:/radar/moments}
          files: {from: late, parquet: archive, partition_by: sweep}
        settings: {trigger: 1 second}
    """
    (parsed,) = parse_pipelines(text)
    assert parsed == storm_watch()


def test_adding_to_a_pipeline_leaves_the_first_as_it_was() -> None:
    before = Pipeline("p").source("a", url="fmq:/a")
    before.sink("b", from_="a", console=True)
    assert before.sinks == {}


def test_a_stage_may_be_given_a_function() -> None:
    pipeline = Pipeline("p").source("a", url="fmq:/a").stage("b", from_="a", use=moments)
    pipeline = pipeline.sink("c", from_="b", console=True)
    assert pipeline.stages["b"].use is moments
    described = plan(pipeline).as_dict()["pipelines"][0]["stages"]["b"]["use"]
    assert described == f"{__name__}:moments"


def test_settings_are_added_to_those_that_are_there() -> None:
    pipeline = Pipeline("p").with_settings(trigger="1s").with_settings(checkpoint="/c")
    assert pipeline.settings.trigger == Trigger(1.0)
    assert pipeline.settings.checkpoint == "/c"


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (lambda p: p.source("x", url="fmg:/x"),
         "pipeline p: sources.x.url: no endpoint answers to fmg:", "did you mean fmq:?"),
        (lambda p: p.source("x", url="fmq:/x", startingOffset=1),
         "pipeline p: sources.x.startingOffset: unknown key", "did you mean startingOffsets?"),
        (lambda p: p.source("x", url="fmq:/x", endingOffsets="latest"),  # a stream has no end
         "pipeline p: sources.x.endingOffsets: unknown key", "did you mean startingOffsets?"),
        (lambda p: p.source("x", url="fmq:/x", minPartitions=0),
         "pipeline p: sources.x.minPartitions: should be greater than or equal to 1", None),
        (lambda p: p.source("x", url=[]),
         "pipeline p: sources.x.url: should have at least one", None),
        (lambda p: p.stage("x", from_="a", use="nothing"),
         "pipeline p: stages.x.use: should be module:function",
         "the function takes a DataFrame and returns one"),
        (lambda p: p.stage("a", from_="a", sql="select * from a"),
         "pipeline p: stages.a: the name is taken: it is in sources already", None),
        (lambda p: p.with_settings(triger="1s"),
         "pipeline p: settings.triger: unknown key", "did you mean trigger?"),
        (lambda p: plan(p.sink("x", from_="b", console=True)),
         "pipeline p: sinks.x.from: there is no source or stage b", "there are: a"),
        (plan, "pipeline p: sinks: a pipeline needs at least one", None),
    ],
)  # fmt: skip
def test_a_mistake_in_python_gives_the_same_message_without_a_line(
    build: Any, message: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Pipeline("p").source("a", url="fmq:/a"))
    assert str(caught.value) == message
    assert caught.value.hint == hint
    assert caught.value.line is None


def test_what_is_written_down_is_read_back_as_the_same() -> None:
    import json

    pipeline = storm_watch()
    written = plan(pipeline).as_dict()["pipelines"]
    assert parse_pipelines(json.dumps(written)) == [pipeline]


@pytest.mark.parametrize("name", ["failOnDataLoss", "failondataloss"])
def test_losses_are_counted_wherever_the_source_is_told_to_go_on(name: str) -> None:
    options = {name: "no", "LossUrl": "log:/lost"}
    source = Pipeline("p").source("a", url="log:/a", options=options).sources["a"]
    parsed = parse_spark_options(source.spark_options(), SourceOptions)
    assert (source.goes_on_after_loss, source.losses_to) == (True, "log:/lost")
    assert (parsed.failOnDataLoss, parsed.lossUrl) == (False, "log:/lost")
    plain = Pipeline("p").source("a", url="log:/a").sources["a"]
    assert (plain.goes_on_after_loss, plain.losses_to) == (False, None)


def test_the_options_of_a_source_are_those_of_the_spark_source() -> None:
    source = Source.model_validate(
        {
            "url": ["fmq:/a", "fmq:/b"],
            "startingOffsets": {"fmq:/a": 3, "fmq:/b": "latest"},
            "maxOffsetsPerTrigger": 10,
            "maxBytesPerTrigger": "1k",
            "failOnDataLoss": False,
            "hold": "me",
            "decode": {"format": "json"},
        }
    )
    assert source.spark_options() == {
        "url": '["fmq:/a", "fmq:/b"]',
        "startingOffsets": '{"fmq:/a": 3, "fmq:/b": -1}',
        "maxOffsetsPerTrigger": "10",
        "maxBytesPerTrigger": "1024",
        "failOnDataLoss": "false",
        "hold": "me",
    }
    assert Source.model_validate({"url": "fmq:/a"}).spark_options() == {"url": "fmq:/a"}
    keys = {field.alias or name for name, field in Source.model_fields.items()}
    of_formats = {"format", "path", "schema", "static"}
    assert keys - {"decode", "options"} - of_formats <= set(SourceOptions.model_fields)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"from": ["a", "b"]}, "union of 2"),
        ({"from": "a", "decode": {"format": "json"}, "watermark": {"t": 1}},
         "decode json, watermark on t"),
        ({"from": "a", "sql": "select *\n  from a"}, "select * from a"),
    ],
)  # fmt: skip
def test_a_stage_says_what_it_does(keys: dict[str, Any], said: str) -> None:
    from penstock.pipeline import Stage

    assert Stage.model_validate(keys).describe() == said
