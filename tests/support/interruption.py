"""How does a test interrupt a call by a signal?"""

from __future__ import annotations

import gc
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Interrupted", "interrupted_after"]


class Interrupted(BaseException):
    """As `KeyboardInterrupt`: not an error of what it interrupts."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `Interrupted` in the body that long after it began, unless it is done before."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupted

    gc.disable()  # what is raised within a finalizer gets to nobody
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
