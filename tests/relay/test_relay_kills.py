"""A relay, or the server that it goes through, is killed: what is in the target?"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocols.flight.serving import ServerProcess, served, server_process, wires_to
from relay.background import Background, fill, numbers
from support.until import until

#: Forks a relay for every line, so that a life costs no start of Python.
LIVES = """
import json, os, sys
from penstock import open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.relay import Relay, relay_options

batch_from_messages([])  # loads, once for all, what Arrow loads with the first batch

def run(given):
    options = relay_options(**given)
    said = []
    def say(books):
        if not said:
            said.append(print("copying", os.getpid(), flush=True))
    with open_reader(options.source) as reader, open_writer(options.target) as writer:
        return Relay(reader, writer, options, on_progress=say).run()

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        print("done", run(json.loads(line)).in_doubt, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class Lives:
    """One relay, in one process after the other."""

    def __init__(self, **given: object) -> None:
        self._given = json.dumps({**given, "follow": False, "batch": 20})
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def live(self, kill_after: float | None) -> list[str]:
        """Return what a life said that was killed so many seconds after its first batch."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(self._given, file=self.process.stdin, flush=True)
        said = [self.process.stdout.readline()]
        if kill_after is not None and said[0].startswith("copying"):
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(said[0].split()[1]), signal.SIGKILL)
        while said[-1] not in {"ended\n", ""}:
            said.append(self.process.stdout.readline())
        return said

    def end(self) -> None:
        self.process.communicate(timeout=20)


@pytest.mark.parametrize(
    ("kills", "kind", "policy"),
    [
        (10, "log:{}/target?segment=256k&sync=none", None),
        (3, "fmq:{}/target?slots=200000&size=32M", "queue-throttled:50"),
        pytest.param(100, "log:{}/target?segment=256k&sync=none", None, marks=pytest.mark.full),
    ],
)
def test_a_relay_that_is_killed_again_and_again_delivers_everything_once(
    kills: int, kind: str, policy: str | None, tmp_path: Path
) -> None:
    count = 4_000 + kills * 3_000
    source, target = f"log:{tmp_path}/source", kind.format(tmp_path)
    fill(source, count)
    rng = random.Random(kills)
    lives = Lives(source=source, target=target, state=str(tmp_path / "state"), policy=policy)
    try:
        all_said = [lives.live(rng.random() * 0.04) for _ in range(kills)]
        last = lives.live(None)
    finally:
        lives.end()
    assert last[-2:] == ["done 0\n", "ended\n"]
    assert numbers(target.partition("?")[0]) == list(range(count))
    # Some of them may have been quicker than the signal.
    assert sum(not any("done" in line for line in said) for said in all_said) >= kills // 2


# --- a server between -----------------------------------------------------------------------------


def kill_and_restart(server: ServerProcess, times: int, relay: Background, count: int) -> None:
    for i in range(times):
        until(lambda: relay.copied() >= count * (i + 1) // (times + 2))  # noqa: B023
        server.kill()
        server.start()
    until(lambda: relay.copied() >= count)


def test_a_server_of_the_target_that_is_killed_gets_everything_once(tmp_path: Path) -> None:
    count = 8_000
    source = f"log:{tmp_path}/source"
    fill(source, count)
    (tmp_path / "root").mkdir()
    with server_process(tmp_path / "root") as server:
        relay = Background(
            source, f"{server.url}copy?kind=log&retry=1s", batch=50, state=tmp_path / "state"
        )
        kill_and_restart(server, 2, relay, count)
        books = relay.end()
    assert (books.read, books.copied, books.held, books.in_doubt) == (count, count, 0, 0)
    assert books.outages >= 1
    assert numbers(f"log:{tmp_path}/root/copy") == list(range(count))


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (4_000, "kind=log"),
        (4_000, "kind=fmq&slots=131072&size=16M"),
        pytest.param(100_000, "kind=log", marks=pytest.mark.full),
    ],
)
def test_connections_to_the_target_that_are_cut_again_and_again_deliver_everything_once(
    tmp_path: Path, count: int, kind: str
) -> None:
    source, root = f"log:{tmp_path}/source", tmp_path / "root"
    fill(source, count)
    root.mkdir()
    rng = random.Random(count)
    with served(root) as server, wires_to(server) as (wire, bulk):
        target = f"{wire.url('copy')}?{kind}&retry=1s"
        relay = Background(source, target, batch=20, state=tmp_path / "state")
        cuts = 0
        while relay.copied() < count:
            time.sleep(rng.uniform(0.01, 0.1))
            rng.choice([bulk.cut, bulk.cut, wire.cut])()
            cuts += 1
        books = relay.end()
        # After a cut of the wire it may be a while until there is another one for much.
        assert bulk.connections > (1 if cuts > 10 else 0)
    assert (books.read, books.copied, books.held, books.in_doubt) == (count, count, 0, 0)
    assert numbers(f"{kind[5:8]}:{root}/copy") == list(range(count))


@pytest.mark.full
def test_a_server_of_the_source_that_is_killed_looks_like_delay(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    target = f"log:{tmp_path}/target"
    count = 10_000
    fill(f"log:{root}/stream", count)
    with server_process(root) as server:
        relay = Background(f"{server.url}stream", target, batch=50, quota="200kB/s")
        kill_and_restart(server, 2, relay, count)
        fill(f"log:{root}/stream", 10, count)
        until(lambda: relay.copied() == count + 10)
        books = relay.end()
    assert (books.copied, books.lost, books.held) == (count + 10, 0, 0)
    assert numbers(target) == list(range(count + 10))


def test_a_relay_stops_while_a_side_is_away(tmp_path: Path) -> None:
    source = f"log:{tmp_path}/source"
    fill(source, 100)
    (tmp_path / "root").mkdir()
    with server_process(tmp_path / "root") as server:
        relay = Background(source, f"{server.url}copy?kind=log&retry=1s")
        until(lambda: relay.copied() == 100)
        server.kill()
        fill(source, 10, 100)
        until(lambda: relay.relay is not None and relay.relay.trouble is not None)
        began = time.monotonic()
        books = relay.end()
        assert time.monotonic() - began < 10
        server.start()
    assert (books.copied, books.held) == (100, 10)
