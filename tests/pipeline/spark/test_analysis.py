"""`plan --analyze`: columns and mistakes, with file, line and column, before anything runs."""

from __future__ import annotations

import struct
from pathlib import Path

from pyspark.sql import SparkSession

from penstock import open_writer
from penstock.pipeline import parse_pipelines, plan
from penstock.pipeline.graph.model import Node
from penstock.pipeline.run.analysis import analyze

WRONG = """\
pipeline: p
sources:
  beams:
    url: "fmq:{folder}/beams"
    decode: {{format: struct, layout: "<if", names: [number, dbz]}}
stages:
  folded:
    from: beams
    sql: >
      select number, dbz
      from beams where dbz > 45
        and dbzz < 3
  literal:
    from: beams
    sql: |
      select number
      from beams whre dbz > 1
  plain: {{from: beams, sql: "select dbz, dbz as dbzz, dbzz, none from beams"}}
  good: {{from: beams, sql: "select number from beams"}}
  behind: {{from: folded, sql: "select * from folded where nothing"}}
sinks:
  first: {{from: behind, console: true}}
  second: {{from: literal, console: true}}
  third: {{from: plain, console: true}}
  fourth: {{from: good, parquet: "{folder}/out", partition_by: [day]}}
"""


def test_every_mistake_is_told_with_its_line_and_column(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = plan(parse_pipelines(WRONG.format(folder=tmp_path), "p.yaml"))
    found = analyze(made, spark)
    places = [(fault.line, fault.column, fault.field) for fault in found.faults]
    assert sorted(places, key=str) == [
        (12, 13, "stages.folded.sql"),
        (17, 23, "stages.literal.sql"),
        (18, 61, "stages.plain.sql"),
        (25, None, "sinks.fourth.partition_by"),
    ]
    assert set(found.schemas) == {Node("p", name) for name in ("beams", "good", "fourth")}
    assert str(found.faults[0]).startswith("p.yaml:12:13: stages.folded.sql: ")


def test_the_columns_of_everything_are_there_and_no_stream_is_opened(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = plan(
        parse_pipelines(f"""
pipeline: p
sources: {{a: {{url: "fmq:{tmp_path}/none"}}}}
stages: {{s: {{from: a, sql: "select seq * 2 as twice, payload from a"}}}}
sinks: {{out: {{from: s, url: "log:{tmp_path}/out"}}}}
""")
    )
    found = analyze(made, spark)
    assert not found.faults
    columns = [(one.name, one.type, one.is_nullable) for one in found.schemas[Node("p", "s")]]
    assert columns == [("twice", "bigint", False), ("payload", "binary", False)]
    assert not list(tmp_path.iterdir())


def test_a_sample_shows_the_first_rows_of_what_is_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    with open_writer(f"log:{tmp_path}/beams") as writer:
        writer.write_many([struct.pack("<if", number, number / 2) for number in range(100)])
    made = plan(
        parse_pipelines(f"""
pipeline: p
sources:
  beams:
    url: "log:{tmp_path}/beams"
    maxOffsetsPerTrigger: 10
    decode: {{format: struct, layout: "<if", names: [number, dbz]}}
stages: {{odd: {{from: beams, sql: "select number, dbz from beams where number % 2 = 1"}}}}
sinks: {{out: {{from: odd, console: true}}}}
""")
    )
    found = analyze(made, spark, sample=4)
    assert [row.number for row in found.samples[Node("p", "beams")]] == [0, 1, 2, 3]
    assert found.as_dict()["samples"]["p.odd"] == [
        {"number": 1, "dbz": 0.5},
        {"number": 3, "dbz": 1.5},
    ]
