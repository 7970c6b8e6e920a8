"""`penstock mon`: what passes through a stream, interval by interval."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.command import PENSTOCK, OnTerminal, fill
from penstock import NotFound, PenstockError, open_reader, open_writer
from penstock.cli.main import app
from penstock.cli.mon import _Sample, _samples, _Watcher, _watcher
from penstock.cli.signals import StopSign


def watched(watcher: _Watcher) -> _Sample:
    """Watch for a moment: what is there by now is all seen."""
    return watcher.watch(time.monotonic() + 0.02, StopSign())


@pytest.mark.parametrize(
    ("scheme", "framing"),
    [("fmq:{}?layout=classic", 12), ("fmq:{}", None), ("log:{}", None)],
)
def test_every_message_is_counted_once_with_its_bytes(
    tmp_path: Path, scheme: str, framing: int | None
) -> None:
    url = scheme.format(tmp_path / "a")
    fill(url, 5)
    watcher = _watcher(url, look=False)
    with open_writer(url) as writer:
        found = [watched(watcher)]
        for count in (0, 1, 60, 39):
            writer.write_many([bytes(1000)] * count)
            found.append(watched(watcher))
    watcher.close()
    assert [each.messages for each in found] == [0, 0, 1, 60, 39]
    assert [each.bytes for each in found] == [0, 0, 1000, 60_000, 39_000]
    if framing is not None:
        assert [each.stored_bytes for each in found] == [0, 0, 1012, 60 * 1012, 39 * 1012]
    else:
        assert sum(each.stored_bytes or 0 for each in found) >= 100_000
    assert {(each.lost, each.backlog) for each in found} == {(0, 0)}
    assert all(each.seconds >= 0.02 for each in found)


def test_the_bytes_of_a_queue_that_wraps_are_told_from_what_is_in_it(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a?layout=classic&slots=10"
    fill(url, 10)
    watcher = _watcher(url, look=False)
    with open_writer(url) as writer:
        writer.write_many([bytes(100)] * 50)
    found = watched(watcher)
    watcher.close()
    assert found.stored_bytes == 50 * 112
    assert found.messages + found.lost == 50


def test_a_queue_made_anew_is_counted_from_its_start(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a?layout=classic&slots=10"
    fill(url, 9)
    watcher = _watcher(url, look=True)
    CliRunner().invoke(app, ["create", url, "--replace"])
    fill(url, 2)
    assert watched(watcher).messages == 2


def test_what_it_could_not_keep_up_with_is_counted_as_lost(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a?slots=16"
    fill(url, 1)
    watcher = _watcher(url, look=False)
    with open_writer(url) as writer:
        writer.write_many([b"x"] * 100)
    found = watched(watcher)
    watcher.close()
    assert found.messages + found.lost == 100
    assert found.lost >= 80


def test_the_slowest_reader_is_shown(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, 30)
    holding = "import sys, penstock; reader = penstock.open_reader(sys.argv[1]); "
    holding += "reader.read_many(10); reader.acknowledge(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holding, f"{url}?hold=archive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watcher = _watcher(url, look=False)
        found = watched(watcher)
        watcher.close()
        process.communicate(b"\n", timeout=10)
    assert found.slowest == 20


def test_a_writer_that_waits_for_its_reader_is_only_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"fmq:{tmp_path}/a"
    options = "?layout=classic&slots=8&blocking=true&timeout=0.2"
    with open_writer(url + options) as writer, open_reader(url) as reader:
        writer.write_many([b"x"] * 6)
        assert len(reader.read_many(2)) == 2
        watcher = _watcher(url, look=False)
        writer.write(b"x")
        found = watched(watcher)
        watcher.close()
        assert "only looked at" in capsys.readouterr().err
        assert (found.messages, found.bytes, found.stored_bytes) == (1, None, 16)
        assert found.slowest == 5
        assert len(list(reader.available())) == 5


@pytest.mark.parametrize("scheme", ["fmq", "log"])
@pytest.mark.parametrize("option", ["group", "hold"])
def test_what_is_for_the_readers_of_a_name_is_not_taken_from_them(
    tmp_path: Path, scheme: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme}:{tmp_path}/a"
    open_writer(url).close()
    named = f"{url}?{option}=workers"
    open_reader(named).close()
    watcher = _watcher(named, look=False)
    fill(url, 5)
    assert watched(watcher).messages == 5
    with open_reader(named) as reader:
        assert len(reader.read_many(10)) == 5
    watcher.close()
    assert "only looked at" in capsys.readouterr().err
    with pytest.raises(NotFound):
        _watcher(f"{scheme}:{tmp_path}/none?{option}=workers&wait=1s", look=False)


def test_a_writer_that_begins_to_wait_is_only_looked_at_from_then_on(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(f"{url}?layout=classic&slots=8", 1)
    watcher = _watcher(url, look=False)
    assert watched(watcher).bytes == 0
    with open_writer(f"{url}?blocking=true&timeout=0.2") as writer:
        writer.write(b"xy")
        assert watched(watcher).bytes == 2
        writer.write(b"xy")
        found = watched(watcher)
    watcher.close()
    assert (found.messages, found.bytes) == (1, None)
    assert found.slowest == 1


class _Slow(_Watcher):
    """Notes how long it was to watch, and takes longer."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def watch(self, until: float, stop: StopSign) -> _Sample:
        del stop
        self.asked.append(until - time.monotonic())
        time.sleep(0.35 if len(self.asked) == 1 else 0)
        return _Sample(0, 1.0, 0, 0, 0, 0, 0, None)

    def close(self) -> None:
        """Nothing is open."""


def test_intervals_that_were_missed_are_not_made_up_for() -> None:
    watcher = _Slow()
    assert len(list(_samples(watcher, 0.1, 3, StopSign()))) == 3
    assert all(asked > 0.04 for asked in watcher.asked)


def test_a_pipe_gets_a_line_for_each_interval(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, 3)
    done = CliRunner().invoke(app, ["mon", url, "--look", "-i", "5ms", "-n", "22"])
    lines = done.stdout.splitlines()
    assert len(lines) == 24
    assert lines[0] == lines[21]
    assert lines[0].split()[:2] == ["time", "messages"]
    assert lines[1].split()[1:5] == ["0", "0.0", "-", "-"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_json_is_an_object_a_line_until_it_is_stopped(tmp_path: Path, number: int) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, 3)
    with (
        open_writer(url) as writer,
        subprocess.Popen(
            [PENSTOCK, "mon", url, "--json", "--interval", "200ms"], stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline())]
        writer.write_many([bytes(10)] * 7)
        found += [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(20) == 0
    assert sum(each["messages"] for each in found) == 7
    assert sum(each["bytes"] for each in found) == 70
    assert set(found[0]) == {
        "time", "seconds", "messages", "messages_per_second", "bytes", "bytes_per_second",
        "stored_bytes", "lost", "backlog", "slowest_reader_behind",
    }  # fmt: skip
    assert all(0.05 < each["seconds"] < 10 for each in found)


def test_a_terminal_gets_a_live_table(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, 3)
    with OnTerminal("mon", url, "-i", "100ms", "-n", "3") as command:
        assert command.exit_code() == 0
    assert b"backlog" in command.seen
    assert b"0 messages, 0 lost" in command.seen


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "none"),
        (("--look",), "none"),
        (("--interval", "0"), "above 0"),
        (("--interval", "soon"), "duration"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(app, ["mon", f"fmq:{tmp_path}/none", *arguments])
    assert isinstance(done.exception, PenstockError)
    assert reason in str(done.exception)


def test_a_stream_that_is_removed_and_made_anew_is_looked_at_again(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, 5)
    watcher = _watcher(url, look=True)
    (tmp_path / "a.fmq").unlink()
    found = [watched(watcher)]
    fill(url, 30)
    found += [watched(watcher), watched(watcher)]
    watcher.close()
    assert [each.messages for each in found] == [0, 30, 0]
