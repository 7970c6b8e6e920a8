"""How does a test wait for what another thread or process does?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until"]

_T = TypeVar("_T")


def until(get: Callable[[], _T | None], timeout: float = 40.0) -> _T:
    """Return what this gives, once it gives something true; fail when that takes longer."""
    deadline = time.monotonic() + timeout
    while not (found := get()):
        assert time.monotonic() < deadline, f"nothing happened within {timeout} s"
        time.sleep(0.005)
    return found
