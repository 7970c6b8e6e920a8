"""Other formats of Spark's as sources and sinks, and tables that streams are joined with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock import open_reader, open_writer
from penstock.core.errors import ConfigError
from penstock.pipeline import parse_pipelines, plan
from penstock.pipeline.graph.model import Node
from penstock.pipeline.run import run
from penstock.pipeline.run.analysis import analyze
from penstock.pipeline.run.cases import load_cases, run_cases

JOINED = """
pipeline: p
sources:
  beams:
    url: "log:{folder}/beams"
    decode: {{format: json, schema: "site STRING, dbz DOUBLE"}}
  sites: {{format: csv, path: "{folder}/sites", schema: "site STRING, name STRING", static: true}}
  dropped: {{format: {format}, path: "{folder}/dropped", schema: "site STRING, dbz DOUBLE"}}
stages:
  named: {{from: [beams, sites], sql: "select name, dbz from beams join sites using (site)"}}
  strong: {{from: named, sql: "select * from named where dbz > 45"}}
sinks:
  all: {{from: named, url: "log:{folder}/all"}}
  alerts: {{from: strong, url: "log:{folder}/alerts"}}
  files: {{from: dropped, format: {format}, path: "{folder}/out", partition_by: [site]}}
"""


def payloads(url: str) -> list[dict[str, object]]:
    with open_reader(url) as reader:
        return [json.loads(one) for one in reader.read_batch(1000, 0)["payload"].to_pylist()]


@pytest.mark.parametrize(
    "format_", ["parquet", *(pytest.param(one, marks=pytest.mark.full) for one in ("csv", "json"))]
)
def test_files_are_read_and_written_and_a_table_is_joined(
    spark: SparkSession, tmp_path: Path, format_: str
) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "sites.csv").write_text("a,Alpha\nb,Beta\n")
    with open_writer(f"log:{tmp_path}/beams") as writer:
        for site, dbz in (("a", 40), ("b", 50), ("c", 60)):
            writer.write(json.dumps({"site": site, "dbz": dbz}).encode())
    rows = spark.createDataFrame([("a", 1.5), ("b", 2.5)], "site STRING, dbz DOUBLE")
    rows.write.format(format_).save(f"{tmp_path}/dropped")
    made = plan(parse_pipelines(JOINED.format(folder=tmp_path, format=format_)))
    assert [(query.kind, query.sinks) for query in made.queries] == [
        ("foreach_batch", ("all", "alerts")),
        ("single", ("files",)),
    ]
    run(made, spark=spark, checkpoint=str(tmp_path / "checkpoints"), once=True)
    assert payloads(f"log:{tmp_path}/all") == [
        {"name": "Alpha", "dbz": 40.0},
        {"name": "Beta", "dbz": 50.0},
    ]
    assert payloads(f"log:{tmp_path}/alerts") == [{"name": "Beta", "dbz": 50.0}]
    reader = spark.read.schema("dbz DOUBLE, site STRING").format(format_)
    written = reader.load(f"{tmp_path}/out").orderBy("site")
    assert [(row.site, row.dbz) for row in written.collect()] == [("a", 1.5), ("b", 2.5)]
    # Again: nothing is new.
    again = run(made, spark=spark, checkpoint=str(tmp_path / "checkpoints"), once=True)
    assert again.rows == 0
    assert len(payloads(f"log:{tmp_path}/all")) == 2


def test_rate_makes_rows_for_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    made = plan(
        parse_pipelines(f"""
pipeline: ticks
sources: {{ticks: {{format: rate-micro-batch, options: {{rowsPerBatch: 20}}}}}}
stages: {{even: {{from: ticks, sql: "select value from ticks where value % 2 = 0"}}}}
sinks: {{out: {{from: even, url: "log:{tmp_path}/out"}}}}
""")
    )
    progress: list[int] = []
    run(
        made,
        spark=spark,
        checkpoint=str(tmp_path / "checkpoints"),
        on_progress=lambda one: progress.append(one.rows),
        should_stop=lambda: bool(progress) and progress[-1] >= 40,
    )
    values = [row["value"] for row in payloads(f"log:{tmp_path}/out")]
    assert values[:20] == list(range(0, 40, 2))
    assert len(values) == len(set(values))


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "reason", "hint"),
    [
        ("format: rate", "format: kafka", 3, "sources.ticks.format",
         "Spark has no format kafka: its package is not there", "spark-sql-kafka-0-10"),
        ("format: rate", "format: rte", 3, "sources.ticks.format", "Spark has no format rte",
         "did you mean rate?"),
        ("format: noop", "format: delta", 4, "sinks.out.format",
         "Spark has no format delta: its package is not there", "io.delta:delta-spark"),
        ("format: noop", "format: iceberg", 4, "sinks.out.format",
         "Spark has no format iceberg: its package is not there", "iceberg-spark-runtime"),
        ("format: rate", 'format: json, path: /nowhere, schema: "a INTT"', 3,
         "sources.ticks.format", "INTT", ""),
    ],
)  # fmt: skip
def test_a_format_that_is_not_there_is_told_with_its_line(
    spark: SparkSession, old: str, new: str, line: int, field: str, reason: str, hint: str
) -> None:
    text = (
        """
pipeline: p
sources: {ticks: {format: rate}}
sinks: {out: {from: ticks, format: noop}}
""".lstrip()
        .replace("\nsources", "\n\nsources")
        .replace("\n\n", "\n# it\n", 1)
    )
    (fault,) = analyze(plan(parse_pipelines(text.replace(old, new), "p.yaml")), spark).faults
    assert (fault.file, fault.line, fault.field) == ("p.yaml", line, field)
    assert reason in fault.reason
    assert hint in (fault.hint or "")
    assert "\n" not in str(fault)


def test_columns_samples_and_cases_know_other_formats(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "sites.csv").write_text("a,Alpha\n")
    (tmp_path / "dropped").mkdir()
    (tmp_path / "dropped" / "one.json").write_text('{"site": "x", "dbz": 3}\n')
    open_writer(f"log:{tmp_path}/beams").close()
    made = plan(parse_pipelines(JOINED.format(folder=tmp_path, format="json")))
    found = analyze(made, spark, sample=3)
    assert not found.faults
    assert [one.name for one in found.schemas[Node("p", "named")]] == ["name", "dbz"]
    assert [tuple(row) for row in found.samples[Node("p", "sites")]] == [("a", "Alpha")]
    assert [tuple(row) for row in found.samples[Node("p", "dropped")]] == [("x", 3.0)]
    (tmp_path / "p.test.yaml").write_text("""
cases:
  - case: by rows
    given:
      sites: {rows: [{site: a, name: Anton}]}
      beams: {messages: [{json: {site: a, dbz: 50}}]}
      dropped: {rows: [{site: z, dbz: 1}]}
    expect:
      alerts: {rows: [{name: Anton, dbz: 50}]}
      files: {rows: [{site: z, dbz: 1}]}
  - case: in batches
    given:
      sites: {rows: [{site: a, name: Anton}]}
      beams: {batches: [[{json: {site: a, dbz: 50}}], [{json: {site: b, dbz: 50}}]]}
    expect: {alerts: {rows: [{name: Anton, dbz: 50}]}, files: {count: 0}}
""")
    cases = load_cases(tmp_path / "p.test.yaml", made)
    assert [one.differences for one in run_cases(made, cases, spark)] == [(), ()]


def test_messages_of_another_format_are_refused(tmp_path: Path) -> None:
    made = plan(parse_pipelines(JOINED.format(folder=tmp_path, format="json")))
    (tmp_path / "p.test.yaml").write_text(
        "cases: [{case: a, given: {dropped: {messages: [{text: a}]}}, expect: {all: {count: 0}}}]"
    )
    with pytest.raises(ConfigError, match="dropped reads json, and has rows, and no messages"):
        load_cases(tmp_path / "p.test.yaml", made)
