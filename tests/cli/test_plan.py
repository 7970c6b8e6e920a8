"""`penstock plan`, as a process: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import run

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "radar" / "storm-watch.yaml")


def test_plan_prints_the_graph_and_its_queries() -> None:
    done = run("plan", EXAMPLE)
    assert done.returncode == 0
    text = done.stdout.decode()
    assert "└── pulses  source  iwrf+fmq:/tmp/radar/ts [1]" in text
    assert "[2] storm-files-grids_out  foreach batch" in text
    assert done.stderr == b""


def test_plan_draws_pictures_and_prints_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "plan.svg", tmp_path / "plan.png"
    done = run("plan", EXAMPLE, "--svg", str(svg), "--png", str(png), "--json")
    assert done.returncode == 0, done.stderr
    assert "<svg " in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    found = json.loads(done.stdout)
    assert [query["kind"] for query in found["queries"]] == ["single", "foreach_batch"]
    assert found["pipelines"][0]["settings"]["checkpoint"] == "/tmp/radar/checkpoints"


def test_plan_prints_it_for_graphviz_and_mermaid() -> None:
    done = run("plan", EXAMPLE, "--dot", "--mermaid")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b'digraph "storm-watch, storm-files" {')
    assert b"\nflowchart LR\n" in done.stdout


def test_a_function_that_is_not_there_is_found_without_spark(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "pipeline: p\nsources: {a: {url: 'fmq:/a'}}\nstages:\n"
        "  s: {from: a, use: 'stages_of_p:halve'}\n  t: {from: s, use: 'none_such:f'}\n"
        "sinks: {b: {from: t, console: true}}\n"
    )
    (tmp_path / "stages_of_p.py").write_text("raise RuntimeError\ndef halves(df): return df\n")
    done = run("plan", str(file))
    assert done.returncode == 1
    said = done.stderr.decode()
    assert "p.yaml:4: stages.s.use: stages_of_p has no function halve" in said
    assert "did you mean halves?" in said
    assert "p.yaml:5: stages.t.use: there is no module none_such" in said


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(Path(EXAMPLE).read_text().replace("from: strong", "from: strnog"))
    done = run("plan", str(file))
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode() == (
        f"penstock: {file}:35: sinks.alerts.from: there is no source or stage strnog "
        "(hint: did you mean strong?)\n"
    )


def test_a_warning_goes_beside_the_output(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(Path(EXAMPLE).read_text().replace("from: strong", "from: rays"))
    done = run("plan", str(file))
    assert done.returncode == 0
    assert f"penstock: warning: {file}:26: stages.strong: nothing uses it" in done.stderr.decode()


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = run("plan", str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert b"none.yaml: cannot be read: No such file or directory" in done.stderr
    assert run("plan").returncode == 2


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    done = run("plan", EXAMPLE, "--svg", str(tmp_path / "none" / "plan.svg"))
    assert done.returncode == 1
    assert b"plan.svg: No such file or directory" in done.stderr


SECRETS = """
pipeline: p
sources:
  one: {url: "flight://ann:${ANYTHING}@host:5000/x"}
stages:
  kept: {from: one, sql: "SELECT payload FROM one WHERE '${DB_SECRET}' = ''"}
sinks:
  out: {from: kept, url: "up+mqtt://host/?topic=up://v/1/1/8001&password=${ANYTHING}"}
settings:
  spark: {spark.hadoop.fs.s3a.secret.key: "${ANYTHING}", spark.app.name: "${DB_SECRET}"}
"""


def test_plan_shows_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTHING", "hunter2")
    monkeypatch.setenv("DB_SECRET", "correct horse")
    file, svg = tmp_path / "p.yaml", tmp_path / "plan.svg"
    file.write_text(SECRETS)
    for more in (["--json"], ["--svg", str(svg)]):
        done = run("plan", str(file), *more)
        assert done.returncode == 0, done.stderr
        said = (done.stdout + done.stderr).decode()
        assert "hunter2" not in said
        assert "correct horse" not in said
        assert "${DB_SECRET}" in said
    drawn = svg.read_text()
    assert "flight://…@host:5000/x" in drawn
    assert "hunter2" not in drawn


def test_no_error_shows_a_password(tmp_path: Path) -> None:
    url = "nosuch://ann:hunter2@host/x?token=hunter2"
    file = tmp_path / "relays.yaml"
    file.write_text(f"relays:\n  one: {{source: '{url}', target: 'fmq:/x'}}\n")
    for command in (["info", url], ["relay", str(file)]):
        done = run(*command)
        assert done.returncode == 1
        assert b"hunter2" not in done.stdout + done.stderr
        assert b"nosuch" in done.stderr
