"""An endpoint of somebody else, of which we know only what it says that it can do: cp and relay."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import PENSTOCK, fill, json_lines, run
from penstock import InPlaceReader, NotFound, Replayable, open_reader
from penstock.core import endpoints
from penstock.core.capabilities import AppendOnce, Listable
from penstock.core.endpoints import endpoint_of

PACKAGE = Path(__file__).parents[1] / "support" / "third_party"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(PACKAGE))
    endpoints._load.cache_clear()
    yield
    endpoints._load.cache_clear()
    sys.modules.pop("penstock_sqlite", None)


def payloads(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]


def there(url: str) -> int:
    try:
        return len(payloads(url))
    except NotFound:
        return 0


def test_it_is_asked_what_it_can_do(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/a.db"
    fill(url, 3)
    assert isinstance(endpoint_of(url), AppendOnce)
    assert not isinstance(endpoint_of(url), Listable)
    with open_reader(url) as reader:
        assert isinstance(reader, Replayable)
        assert not isinstance(reader, InPlaceReader)
    assert b"SQLite" in run("info", url).stdout


def test_it_is_copied_to_and_from(tmp_path: Path) -> None:
    source, middle = f"log:{tmp_path}/source", f"sqlite:{tmp_path}/middle.db"
    state = str(tmp_path / "state")
    for rest in (1000, 500):  # with a state, only what is new
        fill(source, rest)
        said = run("cp", source, middle, "--state", state)
        assert said.stdout.startswith(f"{rest:,} messages copied".encode()), said
    back = f"fmq:{tmp_path}/back"
    assert run("cp", middle, back).returncode == 0
    assert payloads(back) == payloads(source)
    assert run("cp", middle, f"sqlite:{tmp_path}/x/../middle.db").returncode == 1  # itself


@pytest.mark.parametrize("is_target", [True, False])
def test_each_message_is_copied_once_though_the_relay_is_killed(
    tmp_path: Path, is_target: bool
) -> None:
    ours, theirs = f"log:{tmp_path}/ours", f"sqlite:{tmp_path}/theirs.db"
    source, target = (ours, theirs) if is_target else (theirs, ours)
    fill(source, 2000)
    command = [PENSTOCK, "cp", source, target, "--state", str(tmp_path / "state"), "--batch", "3"]
    chance, cut = random.Random(1), 0
    while cut < 2 and there(target) < 2000:
        process = subprocess.Popen([*command, "--follow"], stdout=subprocess.DEVNULL)
        try:
            before = there(target)
            while there(target) == before and process.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.05))
        finally:
            process.kill()
            process.wait()
        cut += 0 < there(target) < 2000
    assert cut
    assert run(*command[1:]).returncode == 0
    assert payloads(target) == payloads(source)


def test_a_relay_goes_through_it(tmp_path: Path) -> None:
    fill(f"log:{tmp_path}/source", 200)
    file = tmp_path / "relays.yaml"
    file.write_text(
        "state: positions\n"
        "relays:\n"
        f"  in: {{source: 'log:{tmp_path}/source', target: 'sqlite:{tmp_path}/a.db',\n"
        "        follow: false}\n"
    )
    for copied in (200, 0):
        (end,) = [
            line
            for line in json_lines(run("relay", str(file), "--progress", "json").stdout)
            if line["event"] == "end"
        ]
        assert (end["state"], end["copied"]) == ("done", copied)
    assert payloads(f"sqlite:{tmp_path}/a.db") == payloads(f"log:{tmp_path}/source")
