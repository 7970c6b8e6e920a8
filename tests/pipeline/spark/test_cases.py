"""`penstock test`: cases say what goes in and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.core.errors import ConfigError
from penstock.pipeline import load_pipelines, parse_pipelines, plan
from penstock.pipeline.graph.check import python_folders
from penstock.pipeline.run.cases import Verdict, cases_beside, load_cases, run_cases

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.test.yaml"))

PIPELINE = """
pipeline: p
sources:
  beams:
    url: "fmq:/nowhere/beams"
    maxOffsetsPerTrigger: 5
    decode: {format: json, schema: "dbz DOUBLE, site STRING", on_error: dead_letter}
stages:
  strong: {from: beams, sql: "select site, dbz, time from beams where dbz > 45"}
  counted:
    from: strong
    watermark: {time: 10 seconds}
    sql: "select window(time, '1 minute') as w, count(*) as n from strong group by 1"
sinks:
  alerts: {from: strong, url: "log:/nowhere/alerts"}
  counts: {from: counted, console: true}
  bad: {from: beams, dead_letter: "log:/nowhere/bad"}
"""


def verdicts(spark: SparkSession, folder: Path, cases: str, text: str = PIPELINE) -> list[Verdict]:
    made = plan(parse_pipelines(text, "p.yaml"))
    (folder / "p.test.yaml").write_text(cases)
    return list(run_cases(made, load_cases(folder / "p.test.yaml", made), spark))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_the_cases_of_the_examples_hold(spark: SparkSession, file: Path) -> None:
    pipelines = load_pipelines(file.with_name(file.name.replace(".test.", ".")))
    python_folders(pipelines)
    made = plan(pipelines)
    found = list(run_cases(made, load_cases(file, made), spark))
    assert [one.differences for one in found] == [()] * len(found)
    assert found


def test_rows_and_messages_go_in_and_what_comes_out_is_compared(
    spark: SparkSession, tmp_path: Path
) -> None:
    good, by_rows, dead, wrong = verdicts(
        spark,
        tmp_path,
        """
cases:
  - case: messages
    given:
      beams:
        messages: [{json: {dbz: 50, site: a}}, {json: {dbz: 40, site: b}}, {text: "{"}]
    expect:
      strong: {rows: [{site: a, dbz: 50}]}
      alerts: {count: 1}
  - case: rows
    given: {beams: {rows: [{dbz: 46.5, site: c}, {dbz: null}, {dbz: 47, site: d, seq: 9}]}}
    expect: {alerts: {rows: [{dbz: 47, site: d}, {dbz: 46.5, site: c}]}}
  - case: dead letters
    given: {beams: {messages: [{hex: "ff00"}, {json: {dbz: 1}}]}}
    expect: {bad: {rows: [{payload: "0xff00"}]}, beams: {count: 1}}
  - case: wrong
    given: {beams: {rows: [{dbz: 46, site: c}, {dbz: 50, site: d}]}}
    expect: {strong: {rows: [{site: c}, {site: e}]}, bad: {count: 1}}
""",
    )
    assert (good.is_good, by_rows.is_good, dead.is_good) == (True, True, True)
    assert wrong.differences == (
        "strong: 2 rows expected, 2 came",
        "  - site: 'e'",
        "  + site: 'd'",
        "bad: 1 row expected, 0 came",
    )


def test_batches_run_as_a_stream_and_a_late_row_is_left_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    batches = """
      beams:
        batches:
          - [{json: {dbz: 50, site: a}, time: "2026-01-01T00:00:05Z"}]
          - [{json: {dbz: 50, site: a}, time: "2026-01-01T00:05:00Z"}]
          - [{json: {dbz: 50, site: late}, time: "2026-01-01T00:00:06Z"}]
"""
    as_it_is, as_hoped = verdicts(
        spark,
        tmp_path,
        f"""
cases:
  - case: as it is
    given: {batches}
    expect:
      counts: {{rows: [{{w: {{start: "2026-01-01", end: "2026-01-01T00:01:00Z"}}, n: 1}}]}}
  - case: as somebody hoped
    given: {batches}
    expect: {{counts: {{rows: [{{n: 2}}]}}}}
""",
    )
    assert as_it_is.differences == ()
    assert as_hoped.differences == ("counts: 1 row expected, 1 came", "  - n: 2", "  + n: 1")


def test_a_wrong_column_of_the_pipeline_or_of_a_case_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path
) -> None:
    case = """cases:
  - case: one
    given: {beams: {rows: [{dbz: 46}]}}
    expect: {strong: {rows: [{dbzz: 46}]}}
  - case: two
    given: {beams: {rows: [{dbz: high}]}}
    expect: {strong: {count: 1}}
"""
    wrong = PIPELINE.replace("where dbz > 45", "where dbzz > 45")
    for verdict in verdicts(spark, tmp_path, case.partition("  - case: two")[0], wrong):
        (said,) = verdict.differences
        assert said.startswith("p.yaml:9:71: stages.strong.sql: ")
    one, two = verdicts(spark, tmp_path, case)
    assert (
        "p.test.yaml:4: cases[0].expect.strong.rows[0].dbzz: there is no column"
        in one.differences[0]
    )
    assert "p.test.yaml:6: " in two.differences[0]
    assert "'high' is no double" in two.differences[0]


KINDS = """
pipeline: p
sources:
  kinds:
    url: "fmq:/nowhere/kinds"
    decode:
      format: json
      schema: "x DOUBLE, d DECIMAL(10,2), t TIMESTAMP_NTZ, b BOOLEAN, i TINYINT, s STRUCT<a: INT>"
stages:
  same: {from: kinds, sql: "select x, d, t, b, i, s from kinds"}
sinks:
  out: {from: same, url: "log:/nowhere/out"}
"""


def test_numbers_are_compared_to_six_digits_however_small_they_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    pairs = [
        ("5.0e-7", "1.0e-9", False),
        ("0.0", "1.0e-9", False),
        ("1.0000001e-9", "1.0e-9", True),
        ("1.0e-9", "0", True),  # zero has no digits: what is left of a calculation is none
        ("1.0e-3", "0", False),
    ]
    cases = "".join(
        f"  - case: {came} for {wanted}\n"
        f"    given: {{kinds: {{rows: [{{x: {came}}}]}}}}\n"
        f"    expect: {{same: {{rows: [{{x: {wanted}}}]}}}}\n"
        for came, wanted, _ in pairs
    )
    found = verdicts(spark, tmp_path, f"cases:\n{cases}", KINDS)
    assert [one.is_good for one in found] == [is_same for _, _, is_same in pairs]


def test_every_type_of_a_column_goes_in_and_is_compared(
    spark: SparkSession, tmp_path: Path
) -> None:
    values = '{d: 0.1, t: "2026-01-02T03:04:05.5", b: true, i: -128, s: {a: 1}}'
    good, by_rows, wrong = verdicts(
        spark,
        tmp_path,
        f"""
cases:
  - case: messages
    given: {{kinds: {{messages: [{{json: {values}}}]}}}}
    expect: {{same: {{rows: [{values}]}}}}
  - case: rows
    given: {{kinds: {{rows: [{values}, {{d: 3}}]}}}}
    expect: {{same: {{rows: [{values}, {{d: 3, t: null, b: null, i: null, s: null}}]}}}}
  - case: others
    given: {{kinds: {{rows: [{values}]}}}}
    expect: {{same: {{rows: [{{d: 0.11, t: "2026-01-02T03:04:05", b: false}}]}}}}
""",
        KINDS,
    )
    assert (good.differences, by_rows.differences) == ((), ())
    assert wrong.differences[0] == "same: 1 row expected, 1 came"


def test_a_value_that_does_not_fit_its_column_is_told_and_the_other_cases_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    misfits = {
        "{i: 300}": "300 is no tinyint",
        "{i: true}": "True is no tinyint",
        '{b: "maybe"}': "'maybe' is no boolean",
        "{d: 0.125}": "0.125 is no decimal(10,2)",
        "{d: 123456789}": "123456789 is no decimal(10,2)",
        '{d: "NaN"}': "'NaN' is no decimal(10,2)",
        '{t: "2026-01-02T03:04:05Z"}': "'2026-01-02T03:04:05Z' is no timestamp_ntz",
        "{s: 5}": "5 is no struct<a:int>",
    }
    cases = "".join(
        f"  - case: number {number}\n"
        f"    given: {{kinds: {{rows: [{row}]}}}}\n"
        f"    expect: {{same: {{count: 1}}}}\n"
        for number, row in enumerate([*misfits, "{x: 1}"])
    )
    *found, last = verdicts(spark, tmp_path, f"cases:\n{cases}", KINDS)
    for number, (one, said) in enumerate(zip(found, misfits.values(), strict=True)):
        (difference,) = one.differences
        assert f"p.test.yaml:{3 + 3 * number}: cases[{number}].given.kinds.rows[0]." in difference
        assert said in difference
    assert last.is_good


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("given: {}, expect: {strng: {count: 1}}", "no source, stage or sink strng"),
        ("given: {alerts: {rows: []}}, expect: {bad: {count: 1}}", "is a sink, and no rows come"),
        ("given: {strong: {messages: []}}, expect: {bad: {count: 1}}", "strong is a stage"),
        ("given: {beams: {}}, expect: {bad: {count: 1}}", "one of messages, batches and rows"),
        ("given: {beams: {rows: []}}, expect: {strong: {}}", "should have rows, or count"),
        ("given: {beams: {messages: [{text: a, hex: '00'}]}}, expect: {bad: {count: 1}}", "one of"),
        ("given: {beams: {messages: [{hex: '0'}]}}, expect: {bad: {count: 1}}", "pairs of hexa"),
        ("pipeline: q, given: {}, expect: {bad: {count: 1}}", "there is no q"),
    ],
)
def test_a_case_that_does_not_fit_is_one_line_before_spark_starts(
    tmp_path: Path, case: str, said: str
) -> None:
    file = tmp_path / "p.test.yaml"
    file.write_text(f"cases:\n  - {{case: x, {case}}}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        load_cases(file, plan(parse_pipelines(PIPELINE)))
    assert caught.value.line == 2


def test_cases_are_looked_for_beside_the_pipeline() -> None:
    assert cases_beside(Path("/a/storm.yaml")) == Path("/a/storm.test.yaml")
