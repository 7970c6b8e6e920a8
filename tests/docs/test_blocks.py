"""Every block of Python in the documentation does what it says, in the order of its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from docs import given
from docs.blocks import PAGES, python_blocks
from docs.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What the blocks of a page print, at the least.
PRINTED = {
    "README": ["1 ", "b'another'", "0"],
    "chaos": ["b'hello'", "True"],
    "dispatcher": ["b'42 km/h'"],
    "endpoints": ["fmq:"],
    "flight": ["b'a beam'", "1"],
    "jrtc": ["'status': 'up'"],
    "lhhttt": ["b'one'", "b'two'"],
    "lrose-network": ["fmqp:", "[b'a beam', b'another']"],
    "relay": ["copied=1"],
    "streams": ["b'21.5'", "b'set 22'", "b'1013'"],
    "uprotocol": ["b'42 km/h'", "b'unlocked'"],
    "wide-queues": ["fmq:"],
}
#: Blocks that go on until Ctrl-C, and what each prints before.
ENDLESS = {
    ("groups", 0): "b'hello'",
    ("jrtc", 0): "b'off'",
    ("latest-data", 1): "f_3600.nc",
    ("latest-data", 3): "120000.nc",
    ("psi", 1): "4.0",
}
#: What serves beside them.
BESIDE = {("psi", 1): "penstock serve psi /data/rig"}
#: Earlier blocks of the page that these use.
USED_BY = {("latest-data", 1): [0], ("latest-data", 3): [0]}
#: Blocks that run in tests/pipeline/spark/test_pages.py.
ON_SPARK = {
    ("decoding", 0),
    ("jrtc", 5),
    ("latest-data", 2),
    *(("pipelines", number) for number in (0, 1)),
    *(("spark", number) for number in (0, 1, 2)),
}
NOT_RUN = {
    ("endpoints", 0): "it lists what there is to write",
    ("jrtc", 4): "it listens at the usual ports: tests/protocols/jrtc/test_collector.py",
}

#: What is there before, and beside: lines of shell, and what the pages do not make themselves.
GIVEN: dict[str, list[str | Callable[[Machine], None]]] = {
    "data-map": ["penstock serve datamapper"],
    "decoding": [given.protobuf_beams],
    "dispatcher": [
        given.example("uprotocol/ubus.yaml", "bus.yaml"),
        "penstock dispatch run bus.yaml",
    ],
    "groups": ["penstock put log:/data/jobs --text hello"],
    "jrtc": [given.routed_streams],
    "latest-data": [
        "mkdir -p /data/radar/20240115",
        "touch /data/radar/20240115/120000.nc /data/radar/f_3600.nc",
        "penstock serve ldata --root /data",
    ],
    "lhhttt": ["penstock serve lhhttt --port 10000"],
    "psi": [given.psi_stores],
    "radar": [given.pulses],
}
#: Names that a page speaks of and does not make.
NAMES = {"groups": "work = print", "lhhttt": "work = print", "jrtc": given.NAMES_OF_STREAMS}


def blocks_of(page: str) -> dict[tuple[str, int], str]:
    return {(page, number): block.lstrip("\n") for number, block in enumerate(python_blocks(page))}


def prepared(machine: Machine, page: str) -> None:
    for step in GIVEN.get(page, []):
        if isinstance(step, str):
            machine.do(step)
        else:
            step(machine)


PAGES_WITH_PYTHON = [page for page in PAGES if python_blocks(page)]
ENDING = {
    page: [
        text for key, text in blocks_of(page).items() if key not in {*ENDLESS, *ON_SPARK, *NOT_RUN}
    ]
    for page in PAGES_WITH_PYTHON
}


@pytest.mark.parametrize("page", [page for page, blocks in ENDING.items() if blocks])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    with Machine(tmp_path) as machine:
        prepared(machine, page)
        printed = machine.python("\n".join([NAMES.get(page, ""), *ENDING[page]]))
    for text in PRINTED.get(page, []):
        assert text in printed


@pytest.mark.parametrize(("page", "number"), ENDLESS)
def test_a_block_that_goes_on_prints_what_comes(page: str, number: int, tmp_path: Path) -> None:
    with Machine(tmp_path) as machine:
        prepared(machine, page)
        if line := BESIDE.get((page, number)):
            machine.do(line)
        blocks = blocks_of(page)
        before = [blocks[page, earlier] for earlier in USED_BY.get((page, number), ())]
        script = "\n".join([NAMES.get(page, ""), *before, blocks[page, number]])
        machine.python(script, until_it_says=ENDLESS[page, number])


def test_every_block_is_run() -> None:
    blocks = {key for page in PAGES_WITH_PYTHON for key in blocks_of(page)}
    assert {*ENDLESS, *ON_SPARK, *NOT_RUN} <= blocks
