"""Graphs of workers as pipelines: what they become, and what Spark cannot do."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.pipeline import parse_pipelines, plan
from penstock.pipeline.graph.plan_diagram import to_text

GRAPH = """\
graph: five
vertices:
  split-up: {use: "work:by_parity", from: numbers, to: [even, odd]}
  evens: {use: "work:slowly", from: even, to: joined, workers: 3}
  odds: {use: "work:slowly", from: odd, to: joined}
  last: {use: "work:same", from: [joined, kept], to: out}
edges:
  numbers: {url: "log:/tmp/numbers"}
  even:
  odd: {lb: 2}
  joined:
  kept: {url: "log:/tmp/kept"}
  out: {url: "log:/tmp/out"}
"""


def test_vertices_become_stages_and_edges_with_a_url_sources_and_sinks() -> None:
    (pipeline,) = parse_pipelines(GRAPH)
    assert list(pipeline.sources) == ["numbers", "kept"]
    assert {name: stage.from_ for name, stage in pipeline.stages.items()} == {
        "split_up": ("numbers",),
        "split_up_to_even": ("split_up",),
        "split_up_to_odd": ("split_up",),
        "evens": ("split_up_to_even",),
        "odds": ("split_up_to_odd",),
        "joined": ("evens", "odds"),
        "last": ("joined", "kept"),
    }
    assert {name: sink.from_ for name, sink in pipeline.sinks.items()} == {"out": "last"}
    made = plan(pipeline)
    assert [query.name for query in made.queries] == ["five-out"]
    assert "split_up  stage  work:by_parity" in to_text(made)


def test_an_edge_with_a_url_between_vertices_cuts_the_pipeline() -> None:
    text = GRAPH.replace("  joined:\n", '  joined: {url: "log:/tmp/joined"}\n')
    made = plan(parse_pipelines(text))
    assert [query.sinks for query in made.queries] == [("joined_out",), ("out",)]
    assert made.queries[1].after == ("five-joined_out",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('use: "work:same"', "command: [x]", "6: vertices.last.command: Spark runs functions"),
        ("even:\n", "even: {chaos: {drop: 1%}}\n", "9: edges.even.chaos: Spark has no network"),
        ("from: odd,", "from: even,", "9: edges.even: evens and odds share its messages"),
        (", to: out}", "}", "6: vertices.last: it gives nothing"),
        ('numbers: {url: "log:/tmp/numbers"}', "numbers:", "8: edges.numbers: nobody writes it"),
        ('out: {url: "log:/tmp/out"}', "out:", "13: edges.out: nobody reads it"),
        (
            "from: odd, to: joined",
            "from: odd, to: [joined, odd]",
            "5: vertices.odds.from: Spark cannot go round in a circle: odds -> odd -> odds",
        ),
    ],
)  # fmt: skip
def test_what_spark_cannot_do_is_refused_with_its_line(old: str, new: str, said: str) -> None:
    text = GRAPH.replace(old, new)
    assert text != GRAPH
    with pytest.raises(ConfigError) as caught:
        parse_pipelines(text, "g.yaml")
    assert f"g.yaml:{said}" in str(caught.value)
