"""A query that dies of an outage goes on when the file says so; what dies for good is one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.command import PENSTOCK
from penstock import open_writer
from penstock.pipeline.run import Progress, QueryFailed
from support.spark_lives import programs, running, session_of
from support.spark_pipelines import base, once
from support.spark_streams import payloads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

STAGE = """
from pathlib import Path


def reaching(frame, marks):
    def reach(batches):
        tries = len(list(Path(marks).glob("*")))
        if tries < 2:
            (Path(marks) / str(tries)).touch()
            raise ConnectionRefusedError("the other machine is down")
        yield from batches
    return frame.mapInArrow(reach, frame.schema)
"""


@pytest.fixture
def stage(here: Path) -> Iterator[str]:
    name = f"restarts_{here.name}"
    (here / f"{name}.py").write_text(STAGE)
    (here / "marks").mkdir()
    yield f"{name}:reaching"
    sys.modules.pop(name, None)


def test_a_query_that_an_outage_ends_is_started_again_with_growing_delays(
    spark: SparkSession, here: Path, stage: str
) -> None:
    pipeline = (
        base(here)
        .stage("far", from_="a", use=stage, options={"marks": str(here / "marks")})
        .sink("out", from_="far", url=f"log:{here}/out")
    )
    with pytest.raises(QueryFailed, match="ConnectionRefusedError: the other machine is down"):
        once(pipeline, spark, here)
    said: list[str] = []
    seen: list[Progress] = []
    again = pipeline.with_settings(restart={"initial": "200ms", "jitter": 0, "max_attempts": 2})
    outcome = once(again, spark, here, say=said.append, on_progress=seen.append)
    assert payloads(f"log:{here}/out") == [b"message %d" % i for i in range(100)]
    assert [line.partition("; ")[2] for line in said] == [
        "it is started again in 200 ms (attempt 1 of 2)"
    ]
    assert (outcome.rows, outcome.queries[0].restarts) == (100, 1)
    assert "waiting" in {one.state for one in seen}


@pytest.mark.full
def test_after_so_many_attempts_the_run_ends(spark: SparkSession, here: Path, stage: str) -> None:
    pipeline = (
        base(here)
        .stage("far", from_="a", use=stage, options={"marks": str(here / "marks")})
        .sink("out", from_="far", url=f"log:{here}/out")
        .with_settings(restart={"initial": "10ms", "max_attempts": 1})
    )
    with pytest.raises(QueryFailed, match="the other machine is down"):
        once(pipeline, spark, here)
    # What is no outage is not tried again.
    said: list[str] = []
    wrong = base(here).stage("x", from_="a", sql="select raise_error('no') as payload from a")
    wrong = wrong.sink("wrong", from_="x", url=f"log:{here}/wrong").with_settings(restart=True)
    with pytest.raises(QueryFailed):
        once(wrong, spark, here, say=said.append)
    assert said == []


TEXT = """
pipeline: p
sources: {{a: {{url: "fmq:{0}/a"}}}}
sinks: {{out: {{from: a, url: "log:{0}/out"}}}}
settings: {{master: "local[1]", trigger: 200ms}}
"""


#: Which of the two the system says depends on the moment.
PLANNER_DIED = (
    r"p-out: the Python process that plans the query has died \((Broken pipe|Connection reset)\)"
)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "line"),
    [
        ("java", r"Java, in which Spark runs, has ended: killed by SIGKILL \(hint: what "),
        ("python_streaming_source_runner", PLANNER_DIED + r" \(hint: "),
    ],
)
def test_the_death_of_java_or_of_the_planner_is_one_line(
    tmp_path: Path, victim: str, line: str
) -> None:
    with open_writer(f"fmq:{tmp_path}/a?slots=1000") as writer:
        writer.write_many([b"x"] * 10)
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path))
    with programs() as started:
        program = started.add(running(tmp_path / "errors", file))
        program.until(state="running", rows=10)
        before = program.errors()
        for pid in session_of(program.process.pid):
            command = _command(pid)
            if victim in command and ("java" not in victim or "/java" in command.split("\0")[0]):
                os.kill(pid, signal.SIGKILL)
        with open_writer(f"fmq:{tmp_path}/a") as writer:
            writer.write(b"x")
        assert program.process.wait(60) == 1
        said = program.errors().removeprefix(before).splitlines()
        assert len(said) == 1, said
        assert re.match("penstock: " + line, said[0]), said


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_file_says_restarts_in_words_that_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path).replace("trigger: 200ms", "restart: {initial: never}"))
    done = subprocess.run([PENSTOCK, "plan", str(file)], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"p.yaml:5: settings.restart.initial: should be a time such as 1s" in done.stderr
