"""Apps and producers in processes of their own, some of them killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.stream_id import StreamId
from penstock.queue.subscription import requests_for
from penstock.workers.router import Router
from support.until import until

TESTS = str(Path(__file__).parents[1])
PATHS = [f"deployment://jbpf_agent/set/codelet{n}" for n in range(2)]
#: Two destinations, two devices, two paths: eight streams.
STREAMS = {
    (destination, device, path): StreamId.generate(destination, device, path, "telemetry")
    for destination in (1, 2)
    for device in (1, 2)
    for path in PATHS
}
#: What each app asks for, and what it has to get of these.
APPS: dict[str, tuple[tuple[StreamId, ...], set[StreamId]]] = {
    "everything": (requests_for(), set(STREAMS.values())),
    "udp": (requests_for(2), {s for (d, _, _), s in STREAMS.items() if d == 2}),
    "both-destinations": (
        requests_for({1, 2}, device=1),
        {s for (_, device, _), s in STREAMS.items() if device == 1},
    ),
    "device-2": (requests_for(device=2), {s for (_, d, _), s in STREAMS.items() if d == 2}),
    "path-0": (
        requests_for(path=PATHS[0]),
        {s for (_, _, p), s in STREAMS.items() if p == PATHS[0]},
    ),
    "exact": (requests_for(1, 1, PATHS[1], "telemetry"), {STREAMS[1, 1, PATHS[1]]}),
    "overlapping": (
        (*requests_for(1, 1), *requests_for(device=1), *requests_for(1, 1, PATHS[1], "telemetry")),
        {s for (_, device, _), s in STREAMS.items() if device == 1},
    ),
    "name": (requests_for(name="telemetry"), set(STREAMS.values())),
}


class Process:
    """A role of `support.routed_apps`."""

    def __init__(self, role: str, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.routed_apps", role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": TESTS},
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def running(role: str, **arguments: object) -> Iterator[Process]:
    process = Process(role, **arguments)
    try:
        yield process
    finally:
        process.kill()


def app(name: str, *, pause: float = 0.0, policy: str = "block") -> dict[str, Any]:
    requests, wanted = APPS[name]
    return {
        "name": name,
        "requests": [request.hex() for request in requests],
        "streams": len(wanted),
        "pause": pause,
        "policy": policy,
    }


def consumers(*names: str) -> contextlib.AbstractContextManager[Process]:
    return running("consume", apps=[app(name) for name in names])


def producer(count: int, hold: str, pace: float = 0.0) -> dict[str, Any]:
    return {
        "streams": [s.hex() for s in STREAMS.values()],
        "count": count,
        "hold": hold,
        "pace": pace,
    }


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(125_000, marks=pytest.mark.full)], ids=["small", "a million"]
)
@pytest.mark.usefixtures("directory")
def test_each_of_eight_apps_gets_exactly_what_matches_in_order(count: int) -> None:
    """Four apps in each of two processes."""
    names = list(APPS)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(running("produce", **producer(count, ",".join(APPS))))
        halves = [stack.enter_context(consumers(*half)) for half in (names[:4], names[4:])]
        source.hear()
        for half in halves:
            for _ in range(4):
                half.hear()
        source.say()
        for half in halves:
            for _ in range(4):
                heard = half.hear()
                wanted = APPS[heard["name"]][1]
                assert heard["counts"] == {stream.hex(): count for stream in wanted}
                assert heard["in_order"]
                assert heard["lost"] == 0
                assert heard["messages"] == count * len(wanted)


@pytest.mark.parametrize(
    ("kills", "between"),
    [(2, 0.2), pytest.param(10, 1.0, marks=pytest.mark.full)],
    ids=["twice", "ten times"],
)
def test_an_app_that_is_killed_costs_the_others_nothing(
    directory: str, kills: int, between: float
) -> None:
    count = 500 * 10 * kills
    victim = {**app("name"), "name": "victim"}
    with contextlib.ExitStack() as stack:
        hold = "everything,udp,victim"
        source = stack.enter_context(running("produce", **producer(count, hold, between / 10)))
        others = stack.enter_context(consumers("everything", "udp"))
        for each in (source, others, others):
            each.hear()
        source.say()
        router = Router(directory)
        for _ in range(kills):
            with running("consume", apps=[victim]) as doomed:
                doomed.hear()
                assert "victim" in {app.name for app in router.apps()}
                time.sleep(between)
            until(lambda: "victim" not in {app.name for app in router.apps()})
        for _ in range(2):
            heard = others.hear()
            assert heard["counts"] == {s.hex(): count for s in APPS[heard["name"]][1]}
            assert heard["in_order"]
            assert heard["lost"] == 0


@pytest.mark.usefixtures("directory")
def test_a_slow_app_loses_only_its_own_messages_and_counts_them() -> None:
    count = 10_000
    slow = app("name", pause=0.05, policy="drop_oldest")
    with contextlib.ExitStack() as stack:
        # Nobody waits for the slow one.
        source = stack.enter_context(running("produce", **producer(count, "exact")))
        both = stack.enter_context(running("consume", apps=[app("exact"), slow]))
        for each in (source, both, both):
            each.hear()
        source.say()
        heard = {answer["name"]: answer for answer in (both.hear(), both.hear())}
        exact = heard["exact"]
        assert (exact["messages"], exact["lost"], exact["in_order"]) == (count, 0, True)
        assert heard["name"]["lost"] > 0
        assert heard["name"]["messages"] + heard["name"]["lost"] == count * len(STREAMS)
