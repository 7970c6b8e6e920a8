from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import AlreadyExists, InvalidOption, NotFound
from penstock.core.retry import Backoff
from penstock.core.supervision import (
    Health,
    NotStarted,
    Process,
    Program,
    ProgramState,
    Restart,
    Supervisor,
)
from support.unprivileged import run_without_rights
from support.until import until

QUICKLY = Backoff(initial=0.01, maximum=0.02)


def shell(name: str, script: str, **options: object) -> Program:
    chosen = {"backoff": QUICKLY, "grace": 5.0, **options}
    return Program(name=name, command=("sh", "-c", script), **chosen)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pid_in(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_text().strip().isdigit()


def test_a_program_that_fails_is_started_again_and_one_that_is_done_is_not(tmp_path: Path) -> None:
    counted = f"echo x >> {tmp_path}/runs; test $(wc -l < {tmp_path}/runs) -ge 4"
    with Supervisor([shell("fails", counted)]) as supervisor:
        assert supervisor.wait(timeout=20)
        found = supervisor.statistics()["fails"]
    assert (found.state, found.starts, found.failures) == (ProgramState.ENDED, 4, 3)
    assert (found.pid, found.last_end) == (None, "ended with status 0")


@pytest.mark.parametrize(
    ("restart", "script", "starts_again"),
    [
        (Restart.NEVER, "exit 3", False),
        (Restart.NEVER, "exit 0", False),
        (Restart.ON_FAILURE, "exit 0", False),
        (Restart.ON_FAILURE, "kill -9 $$", True),
        (Restart.ALWAYS, "exit 0", True),
    ],
)
def test_the_policy_says_who_is_started_again(
    restart: Restart, script: str, *, starts_again: bool
) -> None:
    with Supervisor([shell("it", script, restart=restart)]) as supervisor:
        if starts_again:
            until(lambda: supervisor.statistics()["it"].starts >= 3)
        else:
            assert supervisor.wait(timeout=20)
            assert supervisor.statistics()["it"].starts == 1


def test_waits_between_failures_grow() -> None:
    backoff = Backoff(initial=0.1, factor=4.0, jitter=0.0)
    starts: list[float] = []
    program = shell("it", "echo here; exit 1", backoff=backoff)
    with Supervisor([program], on_output=lambda *_: starts.append(time.monotonic())):
        until(lambda: len(starts) >= 3)
    assert starts[1] - starts[0] >= 0.1
    assert starts[2] - starts[1] >= 0.4


def test_lines_of_output_are_told_with_the_name_of_their_program() -> None:
    told: list[tuple[str, str]] = []
    programs = [
        shell("one", "echo first; echo second >&2; printf rest"),
        shell("long", "head -c 200000 /dev/zero | tr '\\0' a; echo; echo end"),
    ]
    with Supervisor(programs, on_output=lambda name, line: told.append((name, line))) as supervisor:
        assert supervisor.wait(timeout=20)
    assert [line for name, line in told if name == "one"] == ["first", "second", "rest"]
    long = [line for name, line in told if name == "long"]
    assert "".join(long[:-1]) == "a" * 200_000
    assert long[-1] == "end"


def test_all_that_a_program_started_ends_with_it(tmp_path: Path) -> None:
    script = f"sleep 100 & echo $! > {tmp_path}/child; wait"
    with Supervisor([shell("it", script)]) as supervisor:
        until(pid_in(tmp_path / "child"))
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
        supervisor.end("it")
        assert supervisor.wait(["it"], timeout=20)
    until(lambda: not is_running(child))


def test_what_does_not_end_when_it_is_told_to_is_ended_by_force_at_its_deadline() -> None:
    ready: list[str] = []
    deaf = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    program = shell("deaf", deaf, grace=0.3)
    with Supervisor([program], on_output=lambda _, line: ready.append(line)) as supervisor:
        until(lambda: bool(ready))
        began = time.monotonic()
    assert 0.25 <= time.monotonic() - began < 5
    found = supervisor.statistics()["deaf"]
    assert (found.state, found.failures) == (ProgramState.ENDED, 0)
    assert found.last_end == "was ended by SIGKILL: it was told to end"


def test_many_programs_are_ended_at_the_same_time() -> None:
    ready: list[str] = []
    deaf = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    programs = [shell(f"deaf{n}", deaf, grace=1.0) for n in range(6)]
    with Supervisor(programs, on_output=lambda name, _: ready.append(name)):
        until(lambda: len(ready) == 6)
        began = time.monotonic()
    assert time.monotonic() - began < 4


def test_a_program_that_is_not_well_is_started_anew(tmp_path: Path) -> None:
    health = Health(command=("test", "!", "-e", f"{tmp_path}/ill"), every=0.05, failures=2)
    with Supervisor([shell("it", "exec sleep 100", health=health)]) as supervisor:
        time.sleep(0.4)
        assert supervisor.statistics()["it"].starts == 1
        (tmp_path / "ill").touch()
        until(lambda: supervisor.statistics()["it"].starts >= 2)
        (tmp_path / "ill").unlink()
        found = supervisor.statistics()["it"]
    assert found.failures >= 1
    assert found.last_end == "was ended by SIGTERM: it was not well"


def test_a_look_at_its_health_that_hangs_says_that_it_is_not_well() -> None:
    health = Health(command=("sleep", "100"), every=0.05, timeout=0.1, failures=1)
    program = shell("it", "exec sleep 100", health=health, restart=Restart.NEVER)
    with Supervisor([program]) as supervisor:
        assert supervisor.wait(timeout=20)
        assert supervisor.statistics()["it"].failures == 1


def test_programs_come_go_and_come_again_by_name() -> None:
    with Supervisor() as supervisor:
        supervisor.add(shell("it", "exec sleep 100"))
        until(lambda: supervisor.statistics()["it"].state is ProgramState.RUNNING)
        with pytest.raises(AlreadyExists):
            supervisor.add(shell("it", "exit 0"))
        supervisor.restart("it")
        until(lambda: supervisor.statistics()["it"].starts == 2)
        supervisor.end("it")
        assert supervisor.wait(["it"], timeout=20)
        supervisor.restart("it")
        until(lambda: supervisor.statistics()["it"].starts == 3)
        supervisor.end("it")
        assert supervisor.wait(["it"], timeout=20)
        assert supervisor.statistics()["it"].failures == 0
        supervisor.add(shell("it", "exit 0"))
        assert supervisor.wait(["it"], timeout=20)
        with pytest.raises(NotFound, match="'other'"):
            supervisor.restart("other")


def test_one_that_is_started_again_has_not_ended_from_that_call_on() -> None:
    with Supervisor([shell("it", "exit 0", restart=Restart.NEVER)]) as supervisor:
        for _ in range(20):
            assert supervisor.wait(["it"], timeout=20)
            supervisor.restart("it")
            with pytest.raises(AlreadyExists):
                supervisor.add(shell("it", "exit 0"))
        assert supervisor.wait(["it"], timeout=20)
        assert supervisor.statistics()["it"].starts == 21


def test_a_program_that_is_not_there_fails_and_is_tried_again() -> None:
    program = Program(name="it", command=("/not/there",), backoff=QUICKLY)
    with Supervisor([program]) as supervisor:
        until(lambda: supervisor.statistics()["it"].failures >= 3)
        assert supervisor.statistics()["it"].last_end == (
            "/not/there cannot be started: No such file or directory"
        )
    with pytest.raises(NotStarted, match="No such file"):
        Process(["/not/there"])
    with pytest.raises(InvalidOption, match="no command"):
        Program(name="it", command=())


def test_words_that_no_system_takes_end_no_other_program() -> None:
    command = ("sleep", "100")
    bad = Program(name="bad", command=command, environment={"X": "a\0b"}, backoff=QUICKLY)
    with Supervisor([Program(name="good", command=command), bad]) as supervisor:
        until(lambda: supervisor.statistics()["bad"].failures > 1)
        assert "null byte" in str(supervisor.statistics()["bad"].last_end)
        books = supervisor.statistics()["good"]
        assert (books.state, books.starts) == (ProgramState.RUNNING, 1)


def test_each_end_is_told() -> None:
    told: list[tuple[str, str | None]] = []
    with Supervisor(
        [shell("it", "exit 7", restart=Restart.NEVER)],
        on_end=lambda name, found: told.append((name, found.last_end)),
    ) as supervisor:
        assert supervisor.wait(timeout=20)
    assert told == [("it", "ended with status 7")]


def test_an_error_of_whoever_listens_does_not_end_the_supervision() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no")

    program = shell("it", "echo line; exit 1")
    with Supervisor([program], on_output=refuse, on_end=refuse) as supervisor:
        until(lambda: supervisor.statistics()["it"].starts >= 3)


SUPERVISED = """
import sys, time
from penstock.core.supervision import Program, Supervisor
script = f"echo $$ > {sys.argv[1]}; exec sleep 100"
with Supervisor([Program(name="it", command=("sh", "-c", script))]):
    time.sleep(100)
"""


def test_programs_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", SUPERVISED, str(path)]) as process:
        try:
            until(pid_in(path))
            pid = int(path.read_text())
            assert is_running(pid)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    "bad",
    [
        Program(name="bad", command=("no\0name",), restart=Restart.NEVER),
        shell("bad", "exit 0", environment={"A": "a\0b"}, restart=Restart.NEVER),
        shell("bad", "exit 0", directory="/no\0where", restart=Restart.NEVER),
    ],
    ids=["command", "environment", "directory"],
)
def test_a_program_that_nobody_could_start_does_not_end_the_supervision(bad: Program) -> None:
    with Supervisor([bad, shell("good", "sleep 60")]) as supervisor:
        assert supervisor.wait(["bad"], timeout=20)
        assert "cannot be started" in (supervisor.statistics()["bad"].last_end or "")
        until(lambda: supervisor.statistics()["good"].pid is not None)
        first = supervisor.statistics()["good"].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: supervisor.statistics()["good"].starts == 2)


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    """A program that becomes root whoever starts it, as sudo does, and sleeps for a minute."""
    if os.geteuid() != 0:
        pytest.skip("only root makes a program that becomes root")
    source, program = tmp_path / "foreign.c", tmp_path / "foreign"
    source.write_text(
        "#include <unistd.h>\n"
        'int main(void) { if (setuid(0)) return 1; write(1, "here\\n", 5); sleep(60); return 0; }\n'
    )
    subprocess.run(["cc", str(source), "-o", str(program)], check=True)
    program.chmod(0o4755)
    for folder in [tmp_path, *tmp_path.parents]:  # everybody may start it
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)
    return str(program)


def test_a_program_of_another_user_that_cannot_be_ended_ends_no_supervision(foreign: str) -> None:
    said: list[str] = []

    def check() -> None:
        program = Program(name="foreign", command=(foreign,), grace=0.2)
        with Supervisor(
            [program, shell("good", "sleep 60")], on_output=lambda _, line: said.append(line)
        ) as supervisor:
            until(lambda: said == ["here"])
            supervisor.restart("foreign")
            assert supervisor.wait(["foreign"], timeout=20)
            books = supervisor.statistics()
            assert books["good"].state is ProgramState.RUNNING
            assert "still runs" in (books["foreign"].last_end or "")
            assert books["foreign"].starts == 1, "no second one beside it"
            pids.write_text(f"{books['foreign'].last_pid}")
        process = Process([foreign])
        pids.write_text(f"{pids.read_text()} {process.pid}")
        until(lambda: Path(f"/proc/{process.pid}/status").read_text().count("Uid:\t0\t0\t0"))
        assert process.end(0.1) is None
        process.close()

    pids = Path(foreign).with_name("pids")
    pids.touch(0o666)
    pids.chmod(0o666)
    try:
        run_without_rights(check)
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
