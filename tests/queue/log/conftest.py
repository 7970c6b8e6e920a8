"""What the tests of the log share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.lives import Lives

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Processes that write and read until they are killed."""
    processes = Lives("support.log_lives")
    yield processes
    processes.end()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where many small segments cost little."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
