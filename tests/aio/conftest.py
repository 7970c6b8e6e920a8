"""What do the tests of asyncio share?"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from support.tasks import threads


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Whatever a test did, its threads end soon after."""
    yield
    gc.collect()
    deadline = time.monotonic() + 40
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []
