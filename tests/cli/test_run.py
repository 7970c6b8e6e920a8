"""`penstock run`, as a process: what it prints, Ctrl-C, and going on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cli.command import PENSTOCK, json_lines, run
from penstock import open_reader, open_writer

TEXT = """
pipeline: p
sources: {{a: {{url: "fmq:{0}/a"}}}}
stages: {{half: {{from: a, sql: "select * from a where seq % 2 = 0"}}}}
sinks: {{out: {{from: half, url: "log:{0}/out"}}}}
"""


def write(folder: Path, first: int, end: int) -> None:
    with open_writer(f"fmq:{folder}/a?slots=1000") as writer:
        writer.write_many([b"%d" % i for i in range(first, end)])


@pytest.mark.timeout(300)  # it starts Spark twice
def test_ctrl_c_ends_it_cleanly_and_the_next_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path))
    write(tmp_path, 0, 100)
    running = subprocess.Popen(
        [PENSTOCK, "run", str(file), "--master", "local[1]", "--progress", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert running.stdout is not None
    for line in running.stdout:
        if json.loads(line)["rows"] == 100:
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: all of them get it
    output, errors = running.communicate(timeout=100)
    assert running.returncode == 0, errors
    assert b"Traceback" not in errors
    assert json_lines(output)[-1] == {
        "event": "end",
        "rows": 100,
        "lost": 0,
        "lost_unknown": 0,
        "skipped": 0,
        "stopped": True,
    }
    write(tmp_path, 100, 130)
    checkpoint = str(tmp_path / ".penstock" / "checkpoints")
    done = subprocess.run(
        [PENSTOCK, "run", str(file), "--master", "local[1]", "--once", "--checkpoint", checkpoint],
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"done: 30 rows, nothing lost" in done.stderr
    with open_reader(f"log:{tmp_path}/out") as reader:
        found = [int(message.payload) for message in reader.available()]
    assert found == list(range(0, 130, 2))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_signal_to_all_processes_and_losses_are_told(tmp_path: Path) -> None:
    """As `timeout` ends a program: Java stays until the batches are done."""
    file = tmp_path / "p.yaml"
    text = TEXT.format(tmp_path).replace('/a"}', '/a", failOnDataLoss: false}')
    file.write_text(text)
    with open_writer(f"fmq:{tmp_path}/a?slots=64") as writer:
        writer.write_many([b"%d" % i for i in range(10)])
    command = [PENSTOCK, "run", str(file), "--master", "local[1]", "--progress"]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [*command, "none", "--once"], capture_output=True, cwd=tmp_path, env=environment, check=True
    )
    assert done.stdout == b""
    with open_writer(f"fmq:{tmp_path}/a") as writer:
        writer.write_many([b"%d" % i for i in range(10, 110)])
    running = subprocess.Popen(
        [*command, "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
        env=environment,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if json.loads(line)["rows"] == 64:
            break
    os.killpg(running.pid, signal.SIGTERM)
    output, errors = running.communicate(timeout=100)
    assert running.returncode == 3, errors
    end = json_lines(output)[-1]
    assert (end["rows"], end["lost"], end["stopped"]) == (64, 36, True)
    assert errors.endswith(b"penstock: 36 messages lost\n")


def test_a_mistake_is_said_before_spark_is_started(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path))
    done = run("run", str(file), "--once")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"penstock: {file}:3: sources.a.url: there is no queue at {tmp_path}/a (hint: start what "
        f"writes it, or create it: penstock create fmq:{tmp_path}/a)\n"
    )


def test_spark_without_java_is_said_with_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path))
    write(tmp_path, 0, 1)
    checkpoint = str(tmp_path / "checkpoints")  # or it is below the working directory
    done = run(
        "run", str(file), "--once", "--checkpoint", checkpoint, PATH="/nowhere", JAVA_HOME=""
    )
    assert done.returncode == 1
    assert b"Spark needs Java 17 or newer; there is none (hint: install it" in done.stderr
