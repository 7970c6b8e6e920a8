"""Ctrl-C ends a command soon, and it says how far it came."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.command import PENSTOCK, fill, run
from penstock import NotFound, open_reader
from penstock.cli.signals import Ending
from penstock.core.endpoints import create, describe
from protocols.flight.serving import served, wires_to
from support.until import until

#: Well above the second that a command has to end by itself; what is tested is that it ends.
SOON = 10
#: What a command does before it is interrupted is not what is tested.
PATIENCE = 60


@pytest.fixture
def blocking_url(tmp_path: Path) -> str:
    """A queue that takes five messages, and no more until somebody reads them."""
    return f"fmq:{tmp_path / 'blocking'}?layout=classic&slots=5&size=4k&blocking=true"


def test_a_server_that_has_ended_leaves_ctrl_c_as_it_was() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Ending() as ending:
        signal.raise_signal(signal.SIGINT)  # it interrupts nothing
        ending.wait()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def interrupted(
    *arguments: str, when: Callable[[], bool], stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Start the command, press Ctrl-C once, and return its exit code, output and errors."""
    with subprocess.Popen(
        [PENSTOCK, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.flush()
        until(when)
        time.sleep(0.2)  # what another process can see, this one may not have counted yet
        process.send_signal(signal.SIGINT)
        # Standard input stays open: its end would end `put` by itself.
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
        return process.wait(timeout=SOON), output, errors


def holds(url: str, count: int) -> Callable[[], bool]:
    return lambda: describe(url).count == count


def test_put_that_waits_for_lines_says_how_many_were_written(queue_url: str) -> None:
    create(queue_url)
    code, output, errors = interrupted(
        "put", queue_url, "--jsonl", "-",
        stdin=b'{"payload_b64": "AAEC"}\n' * 3,
        when=holds(queue_url, 3),
    )  # fmt: skip
    assert (code, output) == (130, b"")
    assert errors == b"penstock: interrupted; 3 messages written (9 B)\n"


def test_put_that_waits_for_a_reader_says_how_many_were_written(blocking_url: str) -> None:
    create(blocking_url)
    texts = [f"--text={number}" for number in range(9)]
    code, output, errors = interrupted("put", blocking_url, *texts, when=holds(blocking_url, 5))
    assert (code, output) == (130, b"")
    assert errors == b"penstock: interrupted; 5 messages written (5 B)\n"


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_cp_that_waits_for_a_reader_says_how_many_were_copied(
    options: list[str], queue_url: str, blocking_url: str
) -> None:
    fill(queue_url, 9)
    create(blocking_url)
    code, output, errors = interrupted(
        "cp", queue_url, blocking_url, *options, when=holds(blocking_url, 5)
    )
    assert (code, output) == (130, b"")
    assert errors == b"penstock: interrupted; 5 messages copied (45 B)\n"
    with open_reader(blocking_url) as reader:
        assert len(list(reader.available())) == 5


def test_cat_whose_output_nobody_takes_ends(queue_url: str) -> None:
    url = queue_url.replace("slots=20&size=8192", "slots=5000&size=4M")
    fill(url, 5000)
    with subprocess.Popen(
        [PENSTOCK, "cat", url, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as catting:
        assert catting.stdout is not None
        assert catting.stderr is not None
        assert catting.stdout.read(1) == b"{"
        time.sleep(0.3)  # until the pipe is full; earlier is fine as well
        catting.send_signal(signal.SIGINT)
        assert catting.wait(timeout=SOON) == 130
        assert catting.stderr.read() == b""


# --- a network that falls silent ------------------------------------------------------------------


@pytest.mark.parametrize(("side", "options"), [("source", ""), ("target", "?kind=log&bulk=false")])
def test_a_copy_on_a_silent_network_ends_soon_and_goes_on_later_where_it_was(
    tmp_path: Path, side: str, options: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with served(root) as server, wires_to(server) as wires:
        here, there = f"log:{tmp_path}/here", f"log:{root}/there"
        remote = f"flight://127.0.0.2:{server.port}/there{options}"
        source, target = (remote, here) if side == "source" else (here, remote)
        written, copied = (there, here) if side == "source" else (here, there)
        fill(written, 100)
        command = ["cp", source, target, "--follow", "--state", f"{tmp_path}/state"]
        with (
            subprocess.Popen([PENSTOCK, *command], stderr=subprocess.PIPE) as process,
            ExitStack() as stack,
        ):
            stack.callback(process.kill)
            until(lambda: is_there(copied, 100))
            fill(written, 10)  # by the connection that stays
            until(lambda: is_there(copied, 110))
            time.sleep(0.7)  # until it waits again
            for wire in wires:
                wire.answers.clear()
            if side == "target":
                fill(written, 10)
            time.sleep(0.7)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            errors = process.stderr.read()
            code = process.wait(timeout=SOON)
            assert time.monotonic() - began < SOON
        assert code == 130
        assert b"penstock: interrupted; 110 messages copied" in errors
        for wire in wires:
            wire.cut()
            wire.answers.set()
        if side == "source":
            fill(written, 10)
        assert run(*[each for each in command if each != "--follow"]).returncode == 0
    with open_reader(copied) as reader:
        assert len(list(reader.available())) == 120


def test_a_follower_of_a_silent_network_ends_soon(tmp_path: Path) -> None:
    with served(tmp_path) as server, wires_to(server) as (wire, _):
        fill(f"fmq:{tmp_path}/there", 3)
        with subprocess.Popen(
            [PENSTOCK, "cat", wire.url("there"), "--follow"], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            wire.answers.clear()
            time.sleep(0.7)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=SOON) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_lets_no_handler_run_is_ended_soon(tmp_path: Path, number: int) -> None:
    with (
        served(tmp_path) as server,
        wires_to(server) as (wire, _),
        subprocess.Popen(
            [PENSTOCK, "put", wire.url("there?bulk=false")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"x\n" * 3)
        process.stdin.flush()
        until(lambda: is_there(f"fmq:{tmp_path}/there", 3))
        wire.answers.clear()
        process.stdin.write(b"x\n" * 3)
        process.stdin.flush()
        time.sleep(0.7)  # until it is in that call
        process.send_signal(number)
        assert process.wait(timeout=SOON) == 130
        assert process.stderr.read().startswith(b"penstock: interrupted")


def is_there(url: str, count: int) -> bool:
    try:
        return describe(url).count == count
    except NotFound:
        return False


# --- at any moment --------------------------------------------------------------------------------


def test_ctrl_c_while_the_command_is_imported_is_silent(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("print('importing', flush=True)\nwhile True: pass\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [PENSTOCK, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SOON) == -signal.SIGINT  # a shell says 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        ["sh", "-c", f'trap "" {number}; exec "$@"', "sh", PENSTOCK, "put", f"log:{tmp_path}/log"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        until(lambda: is_there(f"log:{tmp_path}/log", 1))
        process.send_signal(number)
        time.sleep(0.3)
        process.stdin.write(b"y\n")
        process.stdin.close()
        assert process.wait(timeout=SOON) == 0
    assert is_there(f"log:{tmp_path}/log", 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_ends_is_silent(number: int) -> None:
    program = (
        "import atexit, sys, time\n"
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(30)))\n"
        "from penstock.cli import main\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ""},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"penstock ")
        assert process.stdout.readline() == b"ending\n"
        process.send_signal(number)
        assert process.wait(timeout=SOON) == -number
        assert process.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_measurement_with_its_readers_and_removes_the_stream(
    tmp_path: Path, number: int
) -> None:
    arguments = ["bench", f"log:{tmp_path}/log", "-n", "1000000", "--rate", "1000"]
    with subprocess.Popen(
        [PENSTOCK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"penstock: writing 1,000,000 messages of 128 B\n"
        os.killpg(process.pid, number)  # as a terminal does: all of its group get it
        assert process.wait(timeout=SOON) == 130
        assert process.stderr.read() == b""
    assert list(tmp_path.iterdir()) == []


def test_the_reader_of_a_measurement_that_was_killed_ends_without_a_traceback(
    tmp_path: Path,
) -> None:
    arguments = ["bench", f"log:{tmp_path}/log", "-n", "1000000", "--rate", "1000"]
    with subprocess.Popen([PENSTOCK, *arguments], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"penstock: writing 1,000,000 messages of 128 B\n"
        process.kill()
        assert process.stderr.read() == b""  # until the reader has ended, too


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_put_which_says_how_far_it_came_and_leaves_no_half_file(
    tmp_path: Path, number: int
) -> None:
    with subprocess.Popen(
        [PENSTOCK, "put", f"log:{tmp_path}/log"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"x\n" * 3)
        process.stdin.flush()
        until(lambda: is_there(f"log:{tmp_path}/log", 3))
        process.send_signal(number)
        assert process.stderr.read() == b"penstock: interrupted; 3 messages written (3 B)\n"
        assert process.wait(timeout=SOON) == 130
    with subprocess.Popen(
        [PENSTOCK, "put", f"csv:{tmp_path}/file.csv"], stdin=subprocess.PIPE
    ) as process:
        until((tmp_path / "file.csv.new").exists)
        time.sleep(0.5)  # until it waits for its input
        process.send_signal(number)
        assert process.wait(timeout=SOON) == 130
    assert [each.name for each in tmp_path.iterdir()] == ["log"]


def test_what_put_says_after_ctrl_c_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [PENSTOCK, "put", f"log:{tmp_path}/log", "--rate", "100"],
        stdin=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(b"x\n" * 10_000)
        process.stdin.flush()
        seen = b""
        while b"/s" not in seen:  # the line of its progress
            seen += os.read(ours, 1000)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SOON) == 130
        while b"interrupted" not in seen:
            seen += os.read(ours, 1000)
    os.close(ours)
    assert b"\r\x1b[Kpenstock: interrupted; " in seen
