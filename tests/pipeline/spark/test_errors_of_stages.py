"""A row for which a stage raises goes to the dead letters, and the others go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from penstock import open_reader, open_writer
from penstock.core.dead_letter import DeadLetter
from penstock.pipeline import parse_pipelines, plan
from penstock.pipeline.graph.check import python_folders
from penstock.pipeline.run import QueryFailed, isolation, run
from penstock.pipeline.run.analysis import analyze
from penstock.pipeline.run.cases import load_cases, run_cases
from penstock.pipeline.run.isolation import isolate

STAGES = """
import pyarrow as pa


def roots(rows):
    def work(batches):
        for batch in batches:
            found = []
            for x in batch.column("x").to_pylist():
                if x is not None and x < 0:
                    raise ValueError(f"{x} has no root: cancelled")
                found.append(None if x is None else x ** 0.5)
            yield pa.record_batch({"root": pa.array(found, pa.float64())})
    return rows.mapInArrow(work, "root DOUBLE")


def never(rows):
    def work(batches):
        raise RuntimeError("it does not work at all")
        yield
    return rows.mapInArrow(work, "root DOUBLE")
"""

PIPELINE = """
pipeline: p
sources:
  numbers: {{url: "log:{folder}/numbers", decode: {{format: json, schema: "x BIGINT, y BIGINT"}}}}
stages:
  roots: {{from: numbers, use: "{module}:roots", errors: dead_letter}}
  shares: {{from: numbers, sql: "select x, x div y as share from numbers", errors: dead_letter}}
  large: {{from: shares, sql: "select * from shares where share > 1"}}
sinks:
  good: {{from: roots, url: "log:{folder}/good"}}
  shares_out: {{from: shares, url: "log:{folder}/shares"}}
  large_out: {{from: large, parquet: "{folder}/large"}}
  no_root: {{from: roots, dead_letter: "log:{folder}/no_root"}}
  no_share: {{from: shares, dead_letter: "log:{folder}/no_share"}}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"stages_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def write(folder: Path, rows: list[tuple[int, int]]) -> None:
    with open_writer(f"log:{folder}/numbers") as writer:
        for x, y in rows:
            writer.write(json.dumps({"x": x, "y": y}).encode(), type=7)


def payloads(url: str) -> list[dict[str, object]]:
    with open_reader(url) as reader:
        return [json.loads(one) for one in reader.read_batch(5000, 0)["payload"].to_pylist()]


def letters(url: str) -> list[DeadLetter]:
    with open_reader(url) as reader:
        found = []
        while (message := reader.read(0)) is not None:
            found.append(DeadLetter.from_message(message))
        return found


def test_rows_that_raise_are_dead_letters_and_the_others_arrive(
    spark: SparkSession, tmp_path: Path, module: str
) -> None:
    rows = [(x, x % 15) for x in range(15)] + [(-4, 2)]
    write(tmp_path, rows)
    made = plan(parse_pipelines(PIPELINE.format(folder=tmp_path, module=module)))
    assert [query.kind for query in made.queries] == ["foreach_batch"]
    assert made.queries[0].trunk == "numbers"
    run(made, spark=spark, checkpoint=str(tmp_path / "checkpoints"), once=True)
    assert sorted(float(str(row["root"])) for row in payloads(f"log:{tmp_path}/good")) == [
        x**0.5 for x in range(15)
    ]
    bad = letters(f"log:{tmp_path}/no_root")
    assert [json.loads(one.original.payload)["x"] for one in bad] == [-4]
    assert bad[0].reason == f"ValueError: -4 has no root: cancelled ({module}.py, line 11)"
    assert (bad[0].receiver, bad[0].original.type) == ("p.roots", 7)
    zero = letters(f"log:{tmp_path}/no_share")
    assert sorted(json.loads(one.original.payload)["x"] for one in zero) == [0]
    assert all("Division by zero" in one.reason for one in zero)
    assert len(payloads(f"log:{tmp_path}/shares")) == 15
    assert spark.read.parquet(f"{tmp_path}/large").count() == sum(x // y > 1 for x, y in rows if y)


def test_a_stage_that_never_works_ends_the_query(
    spark: SparkSession, tmp_path: Path, module: str
) -> None:
    write(tmp_path, [(1, 1), (2, 2)])
    text = f"""
pipeline: p
sources:
  numbers: {{url: "log:{tmp_path}/numbers", decode: {{format: json, schema: "x BIGINT"}}}}
stages: {{roots: {{from: numbers, use: "{module}:never", errors: dead_letter}}}}
sinks:
  good: {{from: roots, url: "log:{tmp_path}/good"}}
  bad: {{from: roots, dead_letter: "log:{tmp_path}/bad"}}
"""
    made = plan(parse_pipelines(text))
    with pytest.raises(QueryFailed, match="it does not work at all"):
        run(made, spark=spark, checkpoint=str(tmp_path / "checkpoints"), once=True)


MISSING = """
def module(x):
    import a_module_that_is_not_installed
    return x


def table(x):
    with open("/nowhere/sites.csv") as file:
        return len(file.read())
"""


@pytest.mark.parametrize("function", ["module", "table"])
def test_a_stage_that_lacks_a_module_or_a_file_ends_the_query_and_no_row_is_a_letter(
    spark: SparkSession, function: str
) -> None:
    work: dict[str, Any] = {"__name__": "__main__"}  # so it is pickled by value
    exec(MISSING, work)
    frame = spark.createDataFrame([(1,), (2,)], "x BIGINT").coalesce(1)
    udf = f.udf(work[function], "BIGINT")
    name = "a_module_that_is_not_installed" if function == "module" else "/nowhere/sites.csv"
    with pytest.raises(PythonException, match=name):
        isolate(frame, lambda rows: rows.select(udf("x").alias("x")), "s", "p.s")
    assert _nothing_is_cached(spark)


def test_nothing_stays_cached_if_the_letters_cannot_be_made(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no letter")

    monkeypatch.setattr(isolation, "letters", fail)
    frame = spark.createDataFrame([(0,), (1,)], "x BIGINT").coalesce(1)
    with pytest.raises(ValueError, match="no letter"):
        isolate(frame, lambda rows: rows.selectExpr("1 div x as y"), "s", "p.s")
    assert _nothing_is_cached(spark)


def _nothing_is_cached(spark: SparkSession) -> bool:
    session: Any = spark
    return bool(session._jsparkSession.sharedState().cacheManager().isEmpty())


@pytest.mark.full
def test_columns_and_cases_know_rows_that_raise(
    spark: SparkSession, tmp_path: Path, module: str
) -> None:
    pipelines = parse_pipelines(PIPELINE.format(folder=tmp_path, module=module))
    made = plan(pipelines)
    python_folders(pipelines)
    found = analyze(made, spark)
    assert not found.faults
    (tmp_path / "p.test.yaml").write_text("""
cases:
  - case: as a table
    given: {numbers: {rows: [{x: 4, y: 1}, {x: -4, y: 0}, {x: 9, y: 3}]}}
    expect:
      roots: {rows: [{root: 2}, {root: 3}]}
      no_root: {count: 1}
      no_share: {count: 1}
      large_out: {rows: [{share: 4}, {share: 3}]}
  - case: as a stream
    given: {numbers: {batches: [[{json: {x: 4, y: 1}}], [{json: {x: -4, y: 1}}]]}}
    expect: {no_root: {count: 1}}
""")
    verdicts = run_cases(made, load_cases(tmp_path / "p.test.yaml", made), spark)
    assert [one.differences for one in verdicts] == [(), ()]
    assert _nothing_is_cached(spark)
    sys.modules.pop(module, None)
