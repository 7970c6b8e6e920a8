"""What do the tests of workers share?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where streams are in a test: in memory, and away after it."""
    with TemporaryDirectory(prefix="penstock-test-", dir="/dev/shm") as folder:
        path = str(Path(folder, "streams"))
        monkeypatch.setenv("PENSTOCK_STREAMS", path)
        yield path
