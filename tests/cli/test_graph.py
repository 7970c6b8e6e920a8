"""`penstock graph`, as a process: what it prints, Ctrl-C, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.command import PENSTOCK, json_lines, run
from penstock import open_writer
from workers.graphs import EXAMPLES, graph_of, messages_of

GRAPH = """\
graph: doubles
vertices:
  double: {use: "work:double", from: in, to: out}
edges:
  in: {url: "log:DIR/in"}
  out: {url: "log:DIR/out"}
"""


def write(folder: Path, text: str = GRAPH) -> str:
    graph_of(folder, text)
    with open_writer(f"log:{folder}/in") as writer:
        writer.write_many([b"%d" % number for number in range(10)])
    return str(folder / "graph.yaml")


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [PENSTOCK, "graph", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_once_does_what_is_there_and_prints_the_counts(tmp_path: Path) -> None:
    done = run("graph", "run", write(tmp_path), "--once", "--state", str(tmp_path / "queues"))
    assert done.returncode == 0, done.stderr
    assert sorted(map(int, messages_of(f"log:{tmp_path}/out"))) == list(range(0, 20, 2))
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert ["running", "doubles"] in lines
    assert ["double", "1", "0", "10", "10", "0", "10"] in lines
    assert ["in", "0", "10", "0", "0", "0", "0"] in lines


def test_ctrl_c_ends_it_in_time_with_its_books(tmp_path: Path) -> None:
    file = write(tmp_path)
    with started(file, "--json", "--status", "200ms", cwd=tmp_path) as process:
        assert process.stdout is not None
        start = json.loads(process.stdout.readline())
        assert start == {
            "event": "start",
            "graph": "doubles",
            "edges": {"in": f"log:{tmp_path}/in", "out": f"log:{tmp_path}/out"},
        }
        for line in process.stdout:
            status = json.loads(line)
            assert status["event"] == "status"
            if status["vertices"]["double"]["work"]["done"] == 10:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    end = json_lines(output)[-1]
    assert end["event"] == "end"
    assert end["edges"]["in"]["done"] == 10
    assert end["vertices"]["double"]["running"] == 0
    assert b"Traceback" not in errors


def test_what_is_lost_is_exit_code_3_and_what_cannot_begin_is_1(tmp_path: Path) -> None:
    text = GRAPH.replace('in: {url: "log:DIR/in"}', "in:").replace(
        'out: {url: "log:DIR/out"}', "out: {durable: false}"
    )
    file = write(tmp_path, text.replace("double: {use", "nobody: {use"))
    queues = str(tmp_path / "queues")
    with started(file, "--json", "--state", queues, cwd=tmp_path) as process:
        assert process.stdout is not None
        places = json.loads(process.stdout.readline())["edges"]
        with open_writer(places["out"]) as writer:
            writer.write(b"left behind")
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert b"1 messages lost" in errors
    file = write(tmp_path, GRAPH.replace("work:double", "work:doubel"))
    done = run("graph", "run", file, "--once", "--state", queues)
    assert done.returncode == 1
    assert b"penstock: double: work has no function doubel" in done.stderr


def test_a_graph_is_drawn_without_running_it(tmp_path: Path) -> None:
    svg = tmp_path / "words.svg"
    done = run("graph", "draw", str(EXAMPLES / "words.yaml"), "--text", "--svg", str(svg))
    assert done.returncode == 0, done.stderr
    assert "└── lines  queue, port 10000" in done.stdout.decode()
    assert "<svg " in svg.read_text()


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH.replace("from: in", "from: inn"))
    done = run("graph", "check", str(file))
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"penstock: {file}:3: vertices.double.from: there is no edge inn (hint: did you mean in?)\n"
    )


def test_spark_refuses_what_it_cannot_run() -> None:
    done = run("graph", "run", str(EXAMPLES / "words.yaml"), "--engine", "spark")
    assert done.returncode == 1
    assert b"words.yaml:8: vertices.shout.command: Spark runs functions" in done.stderr
