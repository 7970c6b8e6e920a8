"""How does a test wait for what another thread or process does?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until"]


def until(is_so: Callable[[], object], timeout: float = 20.0) -> None:
    """Return when it is so; fail when that takes longer."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
