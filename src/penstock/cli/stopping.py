"""How does a long command end when it is told to?"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["StopSign", "stop_on_signal"]


class StopSign:
    """Whether somebody asked us to stop."""

    def __init__(self) -> None:
        self.is_up = False

    def __call__(self) -> bool:
        return self.is_up


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopSign]:
    """Let Ctrl-C and SIGTERM end a loop between two messages; a second one ends it at once."""
    sign = StopSign()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        sign.is_up = True
        restore()

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    before = {one: signal.signal(one, stop) for one in signals}
    try:
        yield sign
    finally:
        restore()
