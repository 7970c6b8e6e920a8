from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from cli.command import PENSTOCK, run
from protocols.lhhttt.queues import Asker, served, served_elsewhere


def _start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [PENSTOCK, "serve", "lhhttt", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def _stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=20)[0]


def test_messages_are_put_shown_and_taken_by_commands(tmp_path: Path) -> None:
    process, url = _start("--journal", f"log:{tmp_path}/queue")
    done = run("put", url, "--text", "one", "--text", "two", "--type", "5")
    assert done.returncode == 0
    assert b"type is left out" in done.stderr
    assert b"subtype" not in done.stderr
    assert json.loads(run("info", url, "--json").stdout)["count"] == 2
    done = run("cat", url, "--raw")
    assert done.stdout == b"onetwo"
    assert b"taken away" in done.stderr
    assert run("cat", url, "--raw").stdout == b""
    assert "2 messages queued, 2 delivered" in _stop(process)
    assert process.returncode == 0


def test_a_server_names_all_the_urls_that_it_is_reached_by(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with subprocess.Popen(
        [PENSTOCK, "serve", "lhhttt", "--port", "0", "--tcp", "--unix", str(path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        urls = process.stdout.readline().split()[4::2]
        assert [url.partition(":")[0] for url in urls] == ["lhhttt", "lhhttt+tcp", "lhhttt+unix"]
        for url in urls:
            assert run("put", url, "--text", "one").returncode == 0
        assert "3 messages queued" in _stop(process)


def test_a_server_without_a_journal_tells_by_its_exit_code_what_ended_with_it() -> None:
    process, url = _start()
    run("put", url, "--text", "left")
    assert "1 held" in _stop(process)
    assert process.returncode == 3


@pytest.mark.parametrize(
    ("option", "least"), [("max-message", "1024"), ("max-clients", "1"), ("capacity", "1")]
)
def test_a_limit_under_which_nothing_passes_is_refused(option: str, least: str) -> None:
    done = run("serve", "lhhttt", "--port", "0", f"--{option}", "0")
    assert done.returncode == 1
    assert option.replace("-", "_").encode() in done.stderr
    assert least.encode() in done.stderr


def test_cat_says_that_it_takes_messages_of_the_prototype_away() -> None:
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"PUT:x")
        done = run("cat", f"lhhttt://{server.address}?mode=legacy", "--raw")
    assert done.stdout == b"x"
    assert b"taken away" in done.stderr


def test_cp_names_what_the_protocol_has_no_place_for(tmp_path: Path) -> None:
    source = f"log:{tmp_path}/source"
    run("put", source, "--text", "a", "--type", "5")
    with served() as server:
        done = run("cp", source, f"lhhttt://{server.address}")
        assert done.returncode == 0, done.stderr
        assert b"type" in done.stderr
        assert server.statistics().queue.held == 1


def test_an_option_that_does_not_fit_is_refused() -> None:
    for arguments in (["--policy", "block"], ["--journal", "fmq:/x"], ["--lease", "0s"]):
        done = run("serve", "lhhttt", "--port", "0", *arguments)
        assert done.returncode != 0


def test_a_killed_server_leaves_its_journal(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with served_elsewhere("--journal", journal) as (process, port), Asker(port) as asker:
        asker.ask(b"RPUT:a:1:x")
        process.kill()
        process.wait()
    assert run("cat", journal, "--raw").stdout == b"x"
