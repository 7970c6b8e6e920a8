"""A graph of workers on Spark gives what its worker processes give."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock import open_writer
from penstock.core.errors import ConfigError
from penstock.core.worker_graph import parse_graph
from penstock.pipeline import parse_pipelines
from penstock.workers.graph_run import GraphRun
from support.spark_pipelines import once
from workers.graphs import PATIENCE, messages_of

GRAPH = """
graph: both
vertices:
  split: {use: "workers.marked:split", from: lines, to: [one, two]}
  first: {use: "workers.marked:mark", from: one, to: all, options: {sign: +}}
  second: {use: "workers.marked:mark", from: two, to: all, options: {sign: "-"}}
  timed: {use: "workers.marked:timed", from: all, to: out}
edges:
  lines: {url: "log:DIR/lines"}
  one:
  two:
  all:
  out: {url: "log:DIR/OUT"}
"""


@pytest.mark.parametrize(
    "between",
    [
        pytest.param("", id="queues between vertices"),
        pytest.param(
            '{url: "log:DIR/all-OUT"}', id="a log between vertices", marks=pytest.mark.full
        ),
    ],
)
def test_spark_and_workers_give_the_same_results(
    spark: SparkSession, tmp_path: Path, between: str
) -> None:
    with open_writer(f"log:{tmp_path}/lines") as writer:
        for number in range(20):
            writer.write(b"line %d has %d words" % (number, number % 3), time_ns=number)
    graph = GRAPH.replace("all:\n", f"all: {between}\n").replace("DIR", str(tmp_path))
    once(parse_pipelines(graph.replace("OUT", "spark")), spark, tmp_path)
    by_workers = parse_graph(graph.replace("OUT", "workers"))
    with GraphRun(by_workers, state=str(tmp_path / "queues")) as run:
        assert run.wait_until_done(PATIENCE)
    found = {engine: messages_of(f"log:{tmp_path}/{engine}") for engine in ("spark", "workers")}
    # A queue carries no time: behind one, a message is as old as its reading.
    by_text = {engine: sorted(m.split(b" ", 1)[1] for m in each) for engine, each in found.items()}
    assert len(by_text["workers"]) == 20 * 5 * 3
    assert by_text["spark"] == by_text["workers"]
    assert {int(m.split()[0]) for m in found["spark"]} == set(range(20))


def test_a_function_with_a_state_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    open_writer(f"log:{tmp_path}/in").close()
    text = f"""
graph: counting
vertices:
  count: {{use: "workers.marked:counted", from: in, to: out}}
edges: {{in: {{url: "log:{tmp_path}/in"}}, out: {{url: "log:{tmp_path}/out"}}}}
"""
    with pytest.raises(ConfigError, match=r"4: stages.count.use: .* keeps a state") as caught:
        once(parse_pipelines(text), spark, tmp_path)
    assert caught.value.line == 4
