"""The blocks of Python in the documentation do what they say, in the order of their page."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.command import PENSTOCK
from docs.blocks import PAGES, ROOT, python_blocks
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What each page's blocks print, at the least.
PRINTED = {
    "README": ["1 ", "b'another'", "0"],
    "chaos": ["b'hello'", "True"],
    "data-map": [],
    "dispatcher": ["b'42 km/h'"],
    "endpoints": ["fmq:"],
    "flight": ["b'a beam'", "1"],
    "logs": [],
    "lrose-network": ["fmqp:", "[b'a beam', b'another']"],
    "relay": ["copied=1"],
    "streams": ["b'21.5'", "b'set 22'", "b'1013'"],
    "uprotocol": ["b'42 km/h'", "b'unlocked'"],
    "wide-queues": ["fmq:"],
}
#: What has to run beside the blocks of a page, and the file that is there when it does.
BESIDE = {
    "dispatcher": (["dispatch", "run", "examples/uprotocol/ubus.yaml"], "tmp/penstock-ubus/in.fmq"),
}
#: Blocks that wait for what a page cannot bring: another machine, Spark, messages for ever.
NOT_RUN = {
    ("data-map", 1): "asks a server",
    ("endpoints", 0): "shows what there is to write",
}
ELSEWHERE = {
    "decoding": "tests/pipeline/spark/test_decoding.py",
    "first-protocol": "tests/examples/test_first_protocol.py",
    "graphs": "tests/workers/test_graph_run.py",
    "groups": "tests/queue/groups",
    "jrtc": "tests/examples/test_jrtc.py",
    "latest-data": "tests/registry",
    "lhhttt": "tests/protocols/lhhttt",
    "pipelines": "tests/pipeline/spark",
    "psi": "tests/protocols/psi",
    "radar": "tests/radar",
    "spark": "tests/pipeline/spark",
}


@contextlib.contextmanager
def beside(page: str, folder: Path) -> Iterator[None]:
    """Run what a page says should run, while its blocks do."""
    if page not in BESIDE:
        yield
        return
    arguments, sign = BESIDE[page]
    environment = {**os.environ, "UBUS": f"{folder}/tmp/penstock-ubus"}
    with subprocess.Popen([PENSTOCK, *arguments], cwd=ROOT, env=environment) as process:
        try:
            until((folder / sign).exists)
            yield
        finally:
            process.terminate()


@pytest.mark.parametrize("page", PRINTED)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    blocks = [b for i, b in enumerate(python_blocks(page)) if (page, i) not in NOT_RUN]
    script = "\n".join(block.lstrip("\n") for block in blocks)
    for folder in ("/tmp/", "/data/"):
        script = script.replace(folder, f"{tmp_path}{folder}")
        Path(f"{tmp_path}{folder}").mkdir(exist_ok=True)
    with beside(page, tmp_path):
        done = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PENSTOCK_STREAMS": str(tmp_path / "streams"), "PATH": ""},
        )
    assert done.returncode == 0, done.stderr
    for text in PRINTED[page]:
        assert text in done.stdout


def test_every_page_with_python_is_run_here_or_elsewhere() -> None:
    pages = {page for page in PAGES if python_blocks(page)}
    assert pages == PRINTED.keys() | ELSEWHERE.keys()
    root = Path(__file__).parents[2]
    assert all((root / place).exists() for place in ELSEWHERE.values())
