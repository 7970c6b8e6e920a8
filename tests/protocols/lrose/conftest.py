"""A server that the tests of a file share; each test has a queue of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocols.lrose.fmq_server import FmqServer
from protocols.lrose.serving import served, served_as_lrose


@pytest.fixture(scope="module")
def fmq_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fmq")


@pytest.fixture(scope="module")
def fmq_server(fmq_root: Path) -> Iterator[FmqServer]:
    with served(fmq_root, max_queue=1 << 26) as server:
        yield server


@pytest.fixture(scope="module")
def lrose_server(fmq_root: Path) -> Iterator[str]:
    """The URL of one that has LROSE's faults; it serves the same directory."""
    with served_as_lrose(fmq_root) as url:
        yield url


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> str:
    """A queue that no other test uses."""
    kept = [letter if letter.isalnum() else "_" for letter in request.node.name]
    return f"tests/{''.join(kept)[-120:]}"


@pytest.fixture(params=["ours", "lrose"])
def either(request: pytest.FixtureRequest) -> str:
    """The URL of a server of ours, and of one that does as LROSE's."""
    if request.param == "lrose":
        return str(request.getfixturevalue("lrose_server"))
    server: FmqServer = request.getfixturevalue("fmq_server")
    return server.url
