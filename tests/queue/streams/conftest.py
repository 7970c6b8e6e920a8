"""What do the tests of streams share?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.lives import Lives, Report


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Processes that create and use streams until they are killed."""
    processes = Lives("support.stream_lives")
    yield processes
    processes.end()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where streams are in a test; a process that a test starts has to be told."""
    path = str(tmp_path / "streams")
    monkeypatch.setenv("PENSTOCK_STREAMS", path)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report")
