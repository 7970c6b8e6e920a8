"""What runs for long is shown: a table on a terminal, lines in a log file, JSON for programs."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.command import PENSTOCK, OnTerminal, fill, json_lines, run
from penstock.cli.display import Display
from support.until import until


class _Tap(Display):
    """Shows a tap."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, refresh=4)
        self.state = "open"

    def _view(self) -> str:
        return self.state

    def _news(self) -> Any:
        for name in ("hot", "cold"):
            if self._is_due(name, self.state):
                yield {"tap": name, "state": self.state}, f"{name} [red] {self.state}"


def test_lines_are_said_once_until_the_state_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    with _Tap("auto") as tap:
        tap.look()
        tap.look()
        tap.state = "shut"
        tap.look()
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        *("hot [red] open", "cold [red] open"),
        *("hot [red] shut", "cold [red] shut"),
    ]
    assert not said.out


def test_json_is_said_of_each_and_again_after_its_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("penstock.cli.display.time.monotonic", lambda: now)
    with _Tap("json") as tap:
        tap.look()
        now += 0.9
        tap.look()
        now += 0.2
        tap.look()
    said = capsys.readouterr()
    found = json_lines(said.out.encode())
    assert [line["tap"] for line in found] == ["hot", "cold", "hot", "cold"]
    assert found[0] == {"event": "progress", "tap": "hot", "state": "open"}
    assert not said.err


def test_none_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with _Tap("none") as tap:
        tap.look()
    assert capsys.readouterr() == ("", "")


def _relays(folder: Path, *, follow: bool) -> str:
    fill(f"fmq:{folder}/a", 3)
    file = folder / "relays.yaml"
    one = f"{{source: 'fmq:{folder}/a', target: 'fmq:{folder}/b', follow: {str(follow).lower()}}}"
    file.write_text(f"relays: {{'beams[red]': {one}}}\n")
    return str(file)


def test_relays_are_a_table_on_a_terminal_and_brackets_are_not_lost(tmp_path: Path) -> None:
    with OnTerminal("relay", _relays(tmp_path, follow=True)) as command:
        command.read_until(b"maybe twice", times=3)  # drawn again and again
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
    table, _, end = command.seen.rpartition(b"beams[red]: stopped: 3 messages copied")
    assert end
    assert b"beams[red]" in table


def test_relays_are_lines_in_a_log_file(tmp_path: Path) -> None:
    done = run("relay", _relays(tmp_path, follow=False))
    assert done.returncode == 0
    assert done.stderr.startswith(b"beams[red]: ")
    assert b"3 messages copied" in done.stdout


def test_a_dispatcher_is_a_table_on_a_terminal_and_lines_in_a_log_file(tmp_path: Path) -> None:
    file = tmp_path / "bus.yaml"
    ring = f"{{receive: 'fmq:{tmp_path}/in', send: 'fmq:{tmp_path}/{{ue_id}}'}}"
    file.write_text(
        f"dispatcher: test-bus\nauthority: vehicle1\nstate: ./state\ngrace: 200ms\n"
        f"legs: {{local: {{ring: {ring}, authorities: [vehicle1]}}}}\n"
    )
    with OnTerminal("dispatch", "run", str(file)) as command:
        command.read_until(b"authorities", times=3)  # drawn again and again
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
    assert b"stopped: 0 received" in command.seen

    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [PENSTOCK, "dispatch", "run", str(file)], stdout=subprocess.DEVNULL, stderr=errors
        ) as process,
    ):
        until(lambda: b"0 received" in log.read_bytes())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
