"""How does a test see that a call waits, and that it goes on?"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

__all__ = ["A_WHILE", "SOON", "background", "waits"]

#: A call that has to wait has not gone on after this time (seconds).
A_WHILE = 0.15
#: One that need not wait any more has gone on by then.
SOON = 20.0


@contextlib.contextmanager
def background(call: Callable[..., object], *arguments: object) -> Iterator[Future[object]]:
    """Make a call in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *arguments)


def waits(call: Future[object]) -> bool:
    """Tell whether a call is still under way after a while."""
    try:
        call.result(A_WHILE)
    except NotYet:
        return True
    return False
