"""A recording is played again: a part of it, by either time, again and again, with pauses."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK, run
from penstock import open_reader, open_writer
from penstock.cli.cp import _Playback
from penstock.core.capabilities import SourceTimed
from penstock.core.units import format_time
from penstock.relay import relay_options
from support.until import until

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A message each second, out of order, in several segments."""
    url = f"log:{tmp_path}/recording?segment=16k"
    with open_writer(url) as writer:
        for number in range(300):
            writer.write(b"%03d" % number + bytes(200), time_ns=START + (number ^ 1) * SECOND)
    return f"log:{tmp_path}/recording"


def payloads(url: str) -> list[int]:
    with open_reader(url) as reader:
        return [int(message.payload[:3]) for message in reader.available()]


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_messages_are_found_by_when_they_happened(
    tmp_path: Path, recording: str, kind: str
) -> None:
    if kind == "fmq":
        run("cp", recording, f"fmq:{tmp_path}/queue")
        recording = f"fmq:{tmp_path}/queue"
    with open_reader(recording) as reader:
        assert isinstance(reader, SourceTimed)
        at = START + 201 * SECOND
        assert reader.next_happened(0, at, at + 5 * SECOND) == 200
        assert reader.next_happened(201, at, at + SECOND) is None
        assert reader.next_happened(0, at + 10**12, at + 10**13) is None
        assert reader.read_many(1)[0].seq == 0  # nobody was moved


def test_segments_of_other_times_are_not_looked_at(recording: str) -> None:
    from penstock.queue.log.segments import look, numbers_of

    folder = Path(recording.partition(":")[2])
    numbers = numbers_of(folder)
    assert len(numbers) > 3
    noted = [look(folder, number).source for number in numbers]
    assert noted[-1] is None  # it is still written
    for number, times in zip(numbers[:-1], noted[:-1], strict=True):
        assert times is not None
        assert times[0] <= START + number * SECOND <= times[1]
    # A segment of an earlier release has no note, and is looked at.
    path = folder / f"{numbers[1]:020d}.fmq"
    data = bytearray(path.read_bytes())
    data[512:536] = bytes(24)
    path.write_bytes(data)
    with open_reader(recording) as reader:
        assert isinstance(reader, SourceTimed)
        wanted = START + (numbers[1] ^ 1) * SECOND
        assert reader.next_happened(0, wanted, wanted + 1) == numbers[1]


def test_a_range_by_source_time_is_copied_and_shown(tmp_path: Path, recording: str) -> None:
    first, last = format_time(START + 100 * SECOND), format_time(START + 109 * SECOND)
    asked = ["--from", first, "--to", last, "--by", "source"]
    target = f"log:{tmp_path}/copy"
    done = run("cp", recording, target, *asked)
    assert done.returncode == 0, done.stderr
    assert sorted(payloads(target)) == list(range(100, 110))
    shown = run("cat", recording, *asked, "--format", r"%{seq}\n")
    # Message 109 happened at second 108, and 108 at 109, which is the end.
    numbers = sorted(int(line) for line in shown.stdout.split())
    assert numbers == [*range(100, 108), 109]
    empty = run("cp", recording, f"{target}2", "--from", "2001-01-01", "--to", "2001-01-02")
    assert empty.returncode == 0
    assert b"it has 0 to 299, appended from" in empty.stderr


def test_a_range_is_played_faster_than_it_was(tmp_path: Path, recording: str) -> None:
    began = time.monotonic()
    asked = ["--from", "-40", "--to", "279", "--speed", "20"]
    done = run("cp", recording, f"log:{tmp_path}/copy", *asked)
    assert done.returncode == 0, done.stderr
    assert payloads(f"log:{tmp_path}/copy") == list(range(260, 280))
    assert time.monotonic() - began > 0.8


def test_it_is_played_again_until_it_is_told_to_stop(tmp_path: Path, recording: str) -> None:
    target = f"log:{tmp_path}/copy"
    open_writer(target).close()
    played = ["--from", "290", "--loop", "--speed", "100"]
    with subprocess.Popen(
        [PENSTOCK, "cp", recording, target, *played], stdout=subprocess.PIPE
    ) as process:
        try:
            until(lambda: len(payloads(target)) > 25)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    found = payloads(target)
    assert found == (list(range(290, 300)) * 1000)[: len(found)]
    assert f"{len(found)} messages copied".encode() in out
    wrong = run("cp", recording, target, "--loop", "--follow")
    assert wrong.returncode == 2


def test_the_space_bar_pauses_and_goes_on(tmp_path: Path, recording: str) -> None:
    target = f"log:{tmp_path}/copy"
    open_writer(target).close()
    arguments = [PENSTOCK, "cp", recording, target, "--speed", "30"]
    pid, ours = pty.fork()
    if pid == 0:
        os.execve(PENSTOCK, arguments, {**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    try:
        until(lambda: len(payloads(target)) > 10)
        os.write(ours, b" ")
        seen = b""
        while b"paused" not in seen:
            seen += os.read(ours, 65536)
        stopped = len(payloads(target))
        time.sleep(0.5)
        assert len(payloads(target)) == stopped
        os.write(ours, b" ")
        until(lambda: len(payloads(target)) > stopped)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # a terminal ends so
            while os.read(ours, 65536):
                pass
        status, pid = os.waitpid(pid, 0)[1], 0
        assert os.waitstatus_to_exitcode(status) == 130
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)


def test_what_nobody_took_is_counted_once_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server such as iwrf+tcp: counts it from its start on, through all rounds."""
    source, target = f"log:{tmp_path}/a", f"log:{tmp_path}/b"
    with open_writer(source) as writer:
        writer.write_many([b"x"] * 10)
    with open_reader(source) as reader, open_writer(target) as writer:
        real = writer.statistics
        monkeypatch.setattr(
            writer, "statistics", lambda: real()._replace(untaken=real().messages // 2)
        )
        options = relay_options(source=source, target=target, follow=False)
        played = _Playback(reader, writer, options)
        for _ in range(3):
            reader.seek("start")
            assert played.run(lambda: False, lambda: False, None)
        assert (played.statistics().copied, played.statistics().untaken) == (30, 15)
