"""A stream is measured: rates, latencies, and what is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.command import fill, run
from penstock.cli.bench import _expect, bench
from penstock.core.errors import AlreadyExists, NotFound, PenstockError


def test_a_reader_that_is_never_ready_is_told_and_not_waited_for_forever() -> None:
    silent = [sys.executable, "-c", "input()"]
    with subprocess.Popen(
        silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        with pytest.raises(PenstockError, match=r"was not ready within 0.05 s"):
            _expect(process, "ready", within=0.05)
        process.communicate("\n")


def test_a_log_loses_nothing_and_goes_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "latency.png"
    bench(f"log:{tmp_path}/log", 400, "100", 800.0, readers=2, plot=picture)
    lines = capsys.readouterr().out.splitlines()
    assert "400 messages of 100 B" in lines[0]
    assert lines[1].split() == ["messages/s", "bytes/s", "lost", "twice"]
    assert [line.split()[0] for line in lines[2:5]] == ["writer", "reader", "reader"]
    rest = [line for line in lines[5:] if line]
    assert rest[0].split() == ["p50", "p90", "p99", "p99.9", "slowest"]
    assert [line.split()[0] for line in rest[1:]] == ["reader", "reader"]
    assert max(map(len, lines[1:])) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["latency.png"]


def test_what_a_small_queue_overwrites_is_lost_and_the_books_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"fmq:{tmp_path}/queue?slots=16&size=64k"
    with pytest.raises(typer.Exit) as raised:
        bench(url, 5000, batch=2000, as_json=True)
    assert raised.value.exit_code == 3
    found = json.loads(capsys.readouterr().out)
    reader = found["readers"][0]
    assert reader["lost"] > 0
    assert reader["messages"] + reader["lost"] == 5000
    assert reader["twice"] == 0
    assert reader["bytes"] == reader["messages"] * 128
    late = reader["latencies_ns"]
    assert len(late) == 1001
    assert 0 < late[0] <= late[500] <= late[-1]


def test_without_readers_there_is_no_table_of_latencies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(f"log:{tmp_path}/log", 100, readers=0)
    told = capsys.readouterr().out
    assert "writer" in told
    assert "slowest" not in told


def test_a_stream_of_somebody_is_left_alone(tmp_path: Path) -> None:
    fill(f"log:{tmp_path}/log", 3)
    with pytest.raises(AlreadyExists, match="is there already"):
        bench(f"log:{tmp_path}/log", 10)
    with pytest.raises(typer.BadParameter):
        bench(f"log:{tmp_path}/other", 10, "8")


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/log"
    with pytest.raises(typer.BadParameter, match=r"ends with \.png or \.svg"):
        bench(url, plot=tmp_path / "latency.doc")
    with pytest.raises(NotFound, match="no file can be written to"):
        bench(url, plot=tmp_path / "none" / "latency.png")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_cannot_be_read_is_told_in_a_line(tmp_path: Path) -> None:
    done = run("bench", f"csv:{tmp_path}/table.csv", "-n", "10")
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("penstock: a reader cannot read: there is no file")
    assert "(hint: " in line
