"""The commands of a page run, in the order in which a reader would try them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.command import PENSTOCK
from docs.blocks import shell_lines
from support.mosquitto import free_port
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What is there before: what a page speaks of, and does not make itself.
GIVEN = {
    "README": [],
    "concepts": [],
    "flight": ["penstock put fmq:/tmp/served/radar/beams --text hello"],
    "latest-data": [
        "mkdir -p /data/radar/20240115",
        "touch /data/radar/20240115/120000.nc",
    ],
    "logs": [],
    "relay": [
        "penstock put fmq:/data/beams --text hello",
        "penstock put log:/data/day --text hello",
    ],
    "shell": [
        "printf '%s\\n' storm hail | penstock put log:/tmp/beams --type 3",
        """echo '{"sensor": "a", "value": 1.5}' | penstock put log:/tmp/readings""",
        "penstock put log:/data/archive --text old",
        "penstock put fmq:/data/beams --text one",
        "penstock put fmq:/data/old --text two",
        "penstock put log:/data/test1 --text three",
        "penstock put fmq:/data/radar1 --text four",
    ],
    "start-here": [],
    "wide-queues": [],
}
#: Lines that need another machine, a server of Spark's, a terminal, or a reader's own data.
ELSEWHERE = re.compile(
    r"//(rig|desk|radar1|broker)|\bserve\b|\btop\b|\bprepare\b|\bdoctor\b|relays\.yaml|iwrf|RadxConvert"
    r"|\[|--decode 'struct:|--plot|--before 1000000|0\.0\.0\.0"
)
#: These end when they are told to.
ENDLESS = re.compile(r"--follow|--loop|\bwatch\b")
#: Where nothing is to be found: an exit code that says so is right.
MAY_FAIL = re.compile(r"--from 2026-05-01|yesterday")
FOLDERS = re.compile(r"/(?:tmp|data|archive|dev/shm)(?=/|\b)")


@pytest.mark.parametrize("page", GIVEN)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    for folder in ("tmp", "data", "archive", "dev/shm"):
        (tmp_path / folder).mkdir(parents=True)
    lines = [*GIVEN[page], *(line for line in shell_lines(page) if not ELSEWHERE.search(line))]
    assert len(lines) > len(GIVEN[page])
    with served(tmp_path / "tmp/served") if page == "flight" else nullcontext("8815") as port:
        for line in lines:
            run(line.replace("8815", port), tmp_path)


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve a folder by Flight, as the page says, at a port that is free; yield that."""
    root.mkdir()
    port = free_port()
    command = [PENSTOCK, "serve", "flight", "--root", str(root), "--port", str(port)]

    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    with subprocess.Popen(command) as server:
        try:
            until(answers)
            yield str(port)
        finally:
            server.terminate()


def run(line: str, folder: Path) -> None:
    call = FOLDERS.sub(lambda found: f"{folder}{found[0]}", line)
    call = call.replace("penstock ", f"{shlex.quote(str(PENSTOCK))} ", 1)
    if ENDLESS.search(line):
        before, _, last = call.rpartition("| ")
        call = f"{before and before + '| '}timeout -s INT 3 {last}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", call],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
    )
    fine = {0, 124, 130} if ENDLESS.search(line) else {0, 1} if MAY_FAIL.search(line) else {0}
    assert done.returncode in fine, f"{line}\n{done.stdout[-500:]}{done.stderr}"
    assert "Traceback" not in done.stderr
