"""`penstock serve fmqp`, and the other commands by its URLs: real processes on loopback."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import PENSTOCK, json_lines, run
from penstock.protocols.lrose import ping
from support.mosquitto import free_port


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    root = tmp_path_factory.mktemp("root")
    command = [PENSTOCK, "serve", "fmqp", "--root", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        words = process.stdout.readline().split()
        assert words[:2] == ["serving", str(root)]
        yield root, words[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.readline().startswith("stopped: ")


def test_a_new_queue_that_is_too_small_is_told(served: tuple[Path, str], tmp_path: Path) -> None:
    _, url = served
    lines = b"%d\n" * 50 % (*range(50),)
    put = run("put", f"{url}/small/put?slots=10", stdin=lines)
    assert put.returncode == 3
    assert b"the queue holds 10 messages: the first 40 are overwritten" in put.stderr
    assert run("put", f"log:{tmp_path}/log", stdin=lines).returncode == 0
    assert run("cp", f"log:{tmp_path}/log", f"{url}/small/cp?slots=10").returncode == 3
    assert run("cp", f"log:{tmp_path}/log", f"{url}/large?slots=100").returncode == 0


def test_put_cat_and_info_work_by_both_spellings(served: tuple[Path, str]) -> None:
    root, url = served
    put = run("put", f"{url}/radar/beams", "--text", "one", "--text", "two", "--type", "5")
    assert put.returncode == 0, put.stderr
    address = url.removeprefix("fmqp://")
    shown = json_lines(run("cat", f"fmqp:://{address}:radar/beams", "--json").stdout)
    assert [(m["seq"], m["type"], m["size"]) for m in shown] == [(0, 5, 3), (1, 5, 3)]
    info = json.loads(run("info", f"{url}/radar/beams", "--json").stdout)
    assert (info["layout"], info["count"], info["details"]["software"]) == ("remote", 2, "penstock")
    assert (root / "radar" / "beams.stat").exists()
    process = str(info["details"]["process"])  # a number that names: without separators
    shown_info = run("info", f"{url}/radar/beams").stdout.decode()
    assert process in next(line for line in shown_info.splitlines() if "process" in line).split()


def test_a_path_outside_is_refused_in_one_line(served: tuple[Path, str]) -> None:
    _, url = served
    refused = run("cat", f"{url}//etc/passwd")
    assert refused.returncode == 1
    assert b"not below the directory" in refused.stderr
    assert refused.stderr.count(b"\n") == 1


def test_the_server_answers_pings(served: tuple[Path, str]) -> None:
    host, _, port = served[1].removeprefix("fmqp://").rpartition(":")
    assert ping(host, int(port)) is not None


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    refused = run("serve", "fmqp", "--root", str(tmp_path / "missing"), "--port", "0")
    assert refused.returncode != 0
    assert b"no directory" in refused.stderr


def test_the_environment_moves_the_port_as_it_does_for_its_clients(tmp_path: Path) -> None:
    port = free_port()
    command = [PENSTOCK, "serve", "fmqp", "--root", str(tmp_path)]
    environment = {**os.environ, "DS_BASE_PORT": str(port - 13)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.readline().strip().endswith(f":{port}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
