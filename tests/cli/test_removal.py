"""A stream is removed while commands follow it, and its writer makes it again: all is accounted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import PENSTOCK, json_lines, run
from penstock import open_reader
from penstock.protocols.flight import FlightServer, ServerOptions
from support.removal import BEFORE, COUNT, removed_writer

pytestmark = pytest.mark.parametrize("kind", ["fmq", "log"])

#: What is there is shown within this time, on a busy machine too.
SOON = 10.0


class Follower:
    """A command that follows a stream, and what it says line by line."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[bytes] = []
        self._process = subprocess.Popen(
            [PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.lines.extend(iter(output.readline, b""))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self) -> tuple[int, int]:
        """Stop it; return its exit code and how many messages it says that it lost."""
        self._process.send_signal(signal.SIGTERM)
        self._thread.join(SOON)
        assert self._process.stderr is not None
        with self._process.stderr as output:
            errors = output.read().decode()
        found = re.search(r"([\d,]+) messages? lost in all", errors)
        lost = int(found[1].replace(",", "")) if found else 0
        return self._process.wait(SOON), lost


@pytest.mark.parametrize("remote", [False, True])
def test_cat_shows_or_counts_every_message(tmp_path: Path, kind: str, remote: bool) -> None:
    with (
        FlightServer(ServerOptions(root=tmp_path, port=0)) as server,
        removed_writer(kind, tmp_path / "stream") as writer,
    ):
        cat = Follower("cat", f"{server.url}stream" if remote else writer.url, "--follow", "--json")
        writer.write_half()
        cat.until(lambda: len(cat.lines) >= BEFORE)
        writer.remove_and_write_the_rest()
        cat.until(lambda: len(cat.lines) >= COUNT)
        time.sleep(0.3)
        code, lost = cat.end()
    payloads = [json.loads(line)["payload_b64"] for line in cat.lines]
    assert len(set(payloads)) == len(payloads)
    assert len(payloads) + lost == COUNT
    assert code == (3 if lost else 0)


def test_cp_copies_or_counts_every_message_and_goes_on_later(tmp_path: Path, kind: str) -> None:
    target = f"log:{tmp_path}/target"
    state = ["--state", f"{tmp_path}/state", "--progress", "json"]
    with removed_writer(kind, tmp_path / "stream") as writer:
        cp = Follower("cp", writer.url, target, "--follow", *state)
        writer.write_half()
        cp.until(lambda: count(target) >= BEFORE)
        writer.remove_and_write_the_rest()
        cp.until(lambda: count(target) >= COUNT)
        time.sleep(0.3)
        code, lost = cp.end()
        books = json_lines(cp.lines[-1])[-1]
        assert books["copied"] + books["lost"] == COUNT
        assert (books["lost"], code) == (lost, 3 if lost else 0)
        done = run("cp", writer.url, target, *state)
        assert done.returncode == 0
        assert json_lines(done.stdout)[-1]["copied"] == 0
    with open_reader(target) as reader:
        found = [message.payload for message in reader.available()]
    assert len(set(found)) == len(found) == COUNT - lost


def test_mon_counts_every_message(tmp_path: Path, kind: str) -> None:
    with removed_writer(kind, tmp_path / "stream") as writer:
        mon = Follower("mon", writer.url, "--interval", "100ms", "--json")
        mon.until(lambda: len(mon.lines) >= 2)

        def counted() -> int:
            samples = [json.loads(line) for line in mon.lines]
            return sum(each["messages"] + each["lost"] for each in samples)

        writer.write_half()
        mon.until(lambda: counted() >= BEFORE)
        writer.remove_and_write_the_rest()
        mon.until(lambda: counted() >= COUNT)
        mon.end()
    assert counted() == COUNT


def count(url: str) -> int:
    done = run("info", url, "--json")
    return int(json.loads(done.stdout)["count"]) if done.returncode == 0 else 0
