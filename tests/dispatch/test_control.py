"""Asking a running dispatcher: what comes by its socket may be anything."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConnectionLost, LockTimeout, NotFound, PenstockError
from penstock.dispatch import bus, control
from penstock.dispatch.bus import Running
from penstock.dispatch.config import load_bus
from penstock.dispatch.control import ControlServer, ask, find_place, state_lock
from penstock.dispatch.dispatcher import Dispatcher
from penstock.queue.storage import LockFile
from support.descriptors import cpu_seconds, starved


def _answer(question: dict[str, Any]) -> Any:
    match question.get("command"):
        case "echo":
            return question
        case "missing":
            raise NotFound("it is not there", hint="look elsewhere")
        case "wrong":
            raise RuntimeError("a fault")
    raise PenstockError("unknown", hint="ask for echo")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    # Longer than the name of a socket may be.
    folder = tmp_path / ("long" * 20) / ("path" * 20)
    folder.mkdir(parents=True)
    server = ControlServer(folder, _answer)
    yield folder
    server.close()
    assert not (folder / "control").exists()


def _raw(state: Path, data: bytes) -> bytes:
    folder = os.open(state, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(f"/proc/self/fd/{folder}/control")
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _connected(state: Path) -> Iterator[socket.socket]:
    folder = os.open(state, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{folder}/control")
        os.close(folder)
        yield connection


def test_a_question_is_answered(state: Path) -> None:
    question = {"command": "echo", "text": "ü" * 100_000}
    assert ask(state, question) == question


def test_what_goes_wrong_is_told_with_its_hint(state: Path) -> None:
    with pytest.raises(NotFound, match="it is not there") as caught:
        ask(state, {"command": "missing"})
    assert caught.value.hint == "look elsewhere"
    with pytest.raises(PenstockError, match="RuntimeError: a fault"):
        ask(state, {"command": "wrong"})


def test_who_leaves_without_a_word_gets_none(state: Path) -> None:
    assert _raw(state, b"") == b""


@pytest.mark.parametrize("data", [b"\n", b"{", b"[]\n", b"\xff\xfe\n", b"5\n", b"{}"])
def test_what_is_not_a_question_does_no_harm(state: Path, data: bytes) -> None:
    assert b'"error"' in _raw(state, data)
    assert ask(state, {"command": "echo"}) == {"command": "echo"}


def test_a_question_without_end_is_cut_off(state: Path) -> None:
    try:
        said = _raw(state, b"x" * (2 << 20))
    except OSError:
        said = b""  # it hung up while we were talking
    assert b"answer" not in said
    assert ask(state, {"command": "echo"}) == {"command": "echo"}


def test_only_its_own_user_may_ask(state: Path) -> None:
    mode = (state / "control").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_nobody_answers_where_none_runs(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost):
        ask(tmp_path, {"command": "echo"})


def test_a_socket_that_was_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        folder = os.open(tmp_path, os.O_RDONLY)
        left.bind(f"/proc/self/fd/{folder}/control")
        os.close(folder)
    server = ControlServer(tmp_path, _answer)
    assert ask(tmp_path, {"command": "echo"}) == {"command": "echo"}
    server.close()


def test_a_question_that_comes_a_byte_now_and_then_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_PATIENCE", 0.5)
    server = ControlServer(tmp_path, _answer)
    folder = os.open(tmp_path, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{folder}/control")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 10:
                connection.send(b"x")
                time.sleep(0.2)
        assert time.monotonic() - began < 5
    os.close(folder)
    assert ask(tmp_path, {"command": "echo"}) == {"command": "echo"}
    server.close()


def test_without_descriptors_it_waits_at_no_cost_and_answers_again_with_them(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        with starved(process.pid):
            ask(tmp_path, {"command": "echo"})  # it keeps a descriptor for that
            with contextlib.ExitStack() as stack:
                for _ in range(5):
                    stack.enter_context(_connected(tmp_path))
                before = cpu_seconds(process.pid)
                time.sleep(1)
                assert cpu_seconds(process.pid) - before < 0.25
        assert ask(tmp_path, {"command": "echo"}) == {"command": "echo"}
        process.stdin.close()
        assert process.stderr.read().count("\n") == 1
        assert process.wait(10) == 0


_SERVER = """
import logging, sys
from pathlib import Path
from penstock.dispatch.control import ControlServer
logging.basicConfig(level=logging.WARNING)
server = ControlServer(Path(sys.argv[1]), lambda question: question)
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
server.close()
"""


_BUS = """
dispatcher: bus
authority: vehicle1
state: ./state
legs:
  local: {in-process: {}, authorities: [vehicle1]}
"""


def test_a_dispatcher_that_starts_while_a_command_looks_at_its_state_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bus.yaml"
    file.write_text(_BUS)
    config = load_bus(file)
    Running(config).close()  # it has run before
    is_looking, is_locked_out = threading.Event(), threading.Event()
    described = control.described

    class ObservedLock(LockFile):
        def try_lock(self, byte: int, count: int = 1) -> bool:
            is_locked = super().try_lock(byte, count)
            if not is_locked:
                is_locked_out.set()
            return is_locked

    def describe(dispatcher: Dispatcher) -> dict[str, Any]:
        is_looking.set()
        assert is_locked_out.wait(20)
        return described(dispatcher)

    monkeypatch.setattr(control, "described", describe)
    monkeypatch.setattr(control, "LockFile", ObservedLock)
    with ThreadPoolExecutor() as pool:
        status = pool.submit(find_place(file).status)
        assert is_looking.wait(20)
        starting = pool.submit(Running, config)
        assert status.result(20)["is_running"] is False
        starting.result(20).close()


def test_a_dispatcher_whose_state_stays_in_use_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bus.yaml"
    file.write_text(_BUS)
    config = load_bus(file)
    monkeypatch.setattr(bus, "_LOCK_PATIENCE", 0.1)
    with state_lock(config.state), pytest.raises(LockTimeout, match="or a command"):
        Running(config)
