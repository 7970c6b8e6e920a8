"""The commands of every page run, in the order in which a reader would try them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from docs import given
from docs.blocks import PAGES, shell_lines
from docs.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What is there before: what a page speaks of, and does not make itself.
GIVEN: dict[str, list[str | Callable[[Machine], None]]] = {
    "data-map": ["penstock put fmq:/data/fmq/beams --text hello"],
    "decoding": [given.protobuf_beams],
    "dispatcher": [given.example("uprotocol/ubus.yaml", "bus.yaml")],
    "flight": ["penstock put fmq:/tmp/served/radar/beams --text hello"],
    "graphs": [given.graph_of_words],
    "latest-data": [
        "mkdir -p /data/radar/20240115",
        "touch /data/radar/20240115/120000.nc",
        given.program("RadxConvert"),
    ],
    "lrose-network": ["mkdir -p /data/fmq"],
    "lrose-queues": ["penstock put 'fmq:/path/name?layout=classic' --text hello"],
    "psi": [
        given.psi_stores,
        "penstock put log:/data/frames --text frame",
        "penstock serve psi /data/rig",
    ],
    "radar": [given.pulses],
    "radar-files": [given.beams],
    "relay": [
        given.pulses,
        "penstock put fmq:/data/beams --text hello",
        "penstock put log:/data/day --text hello",
        "penstock serve flight --root /data",
        given.page_yaml("relay", "relays.yaml"),
    ],
    "shell": [
        "printf '%s\\n' storm hail | penstock put log:/tmp/beams --type 3",
        """echo '{"sensor": "a", "value": 1.5}' | penstock put log:/tmp/readings""",
        "head -c 12 /dev/zero | penstock put log:/tmp/samples --file -",
        "penstock put log:/data/archive --text old",
        "penstock put fmq:/data/beams --text one",
        "penstock put fmq:/data/old --text two",
        "penstock put log:/data/test1 --text three",
        "penstock put fmq:/data/radar1 --text four",
        "penstock serve flight --root /data",
    ],
}
#: Lines that do not run here, and why.
NOT_RUN = {
    r"\[": "it lists options",
    r"\bprepare\b": "it takes a minute; make test begins with it",
    r"\btop\b": "it needs a terminal: tests/cli/test_top.py",
    r"nmea:": "an endpoint that is installed first: tests/examples/test_first_protocol.py",
    r"jrtc (run|show)|ID=|forward\.yaml": "tests/examples/test_jrtc.py",
    r"up\+mqtt:|^penstock cp .*up\+zenoh:": "it needs a broker: tests/protocols/uprotocol",
    r"plan words\.yaml": "a graph of functions alone: tests/cli/test_graph.py",
    r"storm-watch\.yaml|--engine spark": "it starts Spark: tests/cli/test_run.py, test_plan.py",
}


def is_run(line: str) -> bool:
    return not any(re.search(pattern, line) for pattern in NOT_RUN)


PAGES_WITH_LINES = [page for page in PAGES if any(map(is_run, shell_lines(page)))]


@pytest.mark.timeout(400)  # some of them have sixty commands
@pytest.mark.parametrize("page", PAGES_WITH_LINES)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    with Machine(tmp_path) as machine:
        for step in GIVEN.get(page, []):
            if isinstance(step, str):
                machine.do(step)
            else:
                step(machine)
        for line in filter(is_run, shell_lines(page)):
            machine.do(line)


def test_what_does_not_run_is_still_there() -> None:
    lines = [line for page in PAGES for line in shell_lines(page)]
    assert all(any(re.search(pattern, line) for line in lines) for pattern in NOT_RUN)
    assert GIVEN.keys() <= set(PAGES_WITH_LINES)
