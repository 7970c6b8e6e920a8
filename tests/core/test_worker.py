"""A worker ends when it is told to, and tells of what it fails at."""

from __future__ import annotations

import ast
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

import penstock
from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from support.until import until

log = logging.getLogger("tests.worker")
QUICK = Backoff(initial=0.001, maximum=0.01)


def test_a_loop_ends_its_wait_when_it_is_told_to_stop() -> None:
    waited = []

    def job(worker: Worker) -> None:
        while not worker.wait(60):
            pass
        waited.append(threading.current_thread().name)

    worker = Worker("a loop", job, log=log).start()
    assert worker.is_alive
    assert worker.stop(5)
    assert waited == ["a loop"]
    assert not worker.is_alive


def test_a_loop_that_waits_for_a_socket_is_roused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(
            "receiving",
            lambda _: ours.recv(1),
            log=log,
            rouse=lambda: ours.shutdown(socket.SHUT_RD),
        ).start()
        time.sleep(0.02)
        assert worker.is_alive
        assert worker.stop(5)


def test_rounds_come_again_and_at_each_wake() -> None:
    rounds = []
    worker = Worker("rounds", lambda _: rounds.append(1), log=log, every=60).start()
    worker.wake()
    until(lambda: len(rounds) == 1)
    worker.wake()
    until(lambda: len(rounds) == 2)
    assert worker.stop(5)
    often = Worker("often", lambda _: rounds.append(1), log=log, every=0.001).start()
    until(lambda: len(rounds) > 5)
    assert often.stop(5)


def test_a_round_that_fails_is_told_of_and_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Exception] = []
    rounds = []

    def job(_: Worker) -> None:
        rounds.append(1)
        if len(rounds) in (1, 2):
            raise ValueError(f"round {len(rounds)}")

    caplog.set_level(logging.INFO)
    worker = Worker(
        "upkeep", job, log=log, every=0.001, backoff=QUICK, on_failure=told.append
    ).start()
    until(lambda: len(rounds) > 4)
    assert worker.stop(5)
    assert [str(error) for error in told] == ["round 1", "round 2"]
    assert worker.error is told[-1]
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:3] == [
        "upkeep fails, and tries again",
        "upkeep fails again: round 2",
        "upkeep works again, after 2 failures",
    ]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[1].exc_info is None


def test_a_loop_that_fails_ends_unless_it_is_to_be_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def job(_: Worker) -> None:
        calls.append(1)
        if len(calls) < 4:
            raise OSError("no")

    once = Worker("once", job, log=log).start()
    assert once.join(5)
    assert len(calls) == 1
    assert isinstance(once.error, OSError)
    assert "once has failed, and ends" in caplog.text
    again = Worker("again", job, log=log, restart=True, backoff=QUICK).start()
    assert again.join(5)
    assert len(calls) == 4


def test_a_back_off_grows_until_it_has_worked_and_ends_at_a_stop() -> None:
    slept: list[float] = []

    def job(worker: Worker) -> None:
        for attempt in range(4):
            if attempt == 2:
                worker.note_success()
            began = time.monotonic()
            worker.back_off()
            slept.append(time.monotonic() - began)
        worker.back_off()

    pace = Backoff(table=(0.01, 0.1, 60.0), jitter=0)
    worker = Worker("pace", job, log=log, backoff=pace).start()
    until(lambda: len(slept) == 4)
    assert slept[0] < 0.09 <= slept[1]
    assert slept[2] < 0.09 <= slept[3]
    assert worker.stop(5)


def test_it_may_stop_itself_and_begin_anew() -> None:
    ends = []

    def job(worker: Worker) -> None:
        ends.append(worker.stop(5))

    worker = Worker("itself", job, log=log).start()
    assert worker.join(5)
    assert worker.start().join(5)
    assert ends == [True, True]
    assert worker.stop()


def test_one_that_was_never_started_is_stopped() -> None:
    worker = Worker("idle", lambda _: None, log=log)
    assert worker.stop()
    assert not worker.is_alive


def test_after_a_fork_it_can_be_started_again() -> None:
    worker = Worker("forked", lambda worker: worker.wait(), log=log).start()
    child = os.fork()
    if child == 0:
        is_dead = not worker.is_alive
        worker.start()
        os._exit(0 if is_dead and worker.is_alive and worker.stop(5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.stop(5)


def test_what_does_not_stop_in_time_is_said() -> None:
    held = threading.Event()
    worker = Worker("held", lambda _: held.wait(10), log=log).start()
    assert not worker.stop(0.01)
    held.set()
    assert worker.join(5)


def test_nothing_else_starts_threads() -> None:
    source = Path(penstock.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Attribute(value=ast.Name("threading"), attr="Thread" | "Timer"):
                    found.append(path.relative_to(source).as_posix())
                case ast.ImportFrom(module="threading", names=names):
                    found += [path.name for name in names if name.name in {"Thread", "Timer"}]
    assert set(found) == {"core/worker.py"}
